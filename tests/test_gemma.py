"""The real pair of two tokenizers: Gemma 3 270M drafted for by SmolLM2, where ``make gemma`` has fetched the former."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from layerskip import (
    PromptSet,
    Sampling,
    SpeculativeConfig,
    Target,
    TargetError,
    generate,
    load_target,
    save_draft_checkpoint,
)
from layerskip.bridges.fit import Calibration
from layerskip.drafters.token_translation import Translation
from layerskip.mask import SkipMask
from layerskip.models.bridge import BridgeShape, save_bridges
from layerskip.scan.scan import Scanner
from layerskip.texts.continuations import continue_prompts
from tests.accelerator import DEVICE

NEW_TOKENS = 24
PROMPTS = PromptSet.packaged().take(None if os.environ.get("LAYERSKIP_ALL_PROMPTS") else 3)


@pytest.fixture(scope="module")
def gemma3() -> Target:
    try:
        return load_target("gemma3", dtype="float32", device=DEVICE)
    except TargetError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def draft(gemma3: Target, smollm2: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    """SmolLM2 as a folder."""
    folder = tmp_path_factory.mktemp("draft") / "smollm2"
    return str(save_draft_checkpoint(smollm2, SkipMask.none(smollm2.layers), folder))


def test_a_draft_of_another_tokenizer_changes_nothing(gemma3: Target, draft: str) -> None:
    config, accepted = SpeculativeConfig("cross_tokenizer", 4, draft=draft), 0
    for item in PROMPTS:
        ids = torch.tensor([gemma3.encode(item.messages())])
        made = gemma3.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)
        result = generate(gemma3, item.messages(), config, max_new_tokens=NEW_TOKENS)
        assert result.tokens == made[0, ids.shape[1] :].tolist()
        accepted += result.stats.accepted
    assert accepted > 0


def test_the_two_tokenizers_share_what_they_spell_alike(gemma3: Target, smollm2: Target) -> None:
    """One is of bytes, the other of pieces; what is drawn from either is text of both."""
    assert gemma3.tokenizer is not None
    assert smollm2.tokenizer is not None
    shared = Translation(gemma3.tokenizer, smollm2.tokenizer).shared
    assert len(shared) > 10_000
    for own, theirs in shared[:: len(shared) // 200]:
        if not {own, theirs} & {*gemma3.eos_ids, *smollm2.eos_ids}:
            assert gemma3.tokenizer.decode([own]) == smollm2.tokenizer.decode([theirs])


def test_tokens_are_drawn_with_a_draft_of_another_tokenizer(gemma3: Target, draft: str) -> None:
    """That their law is the target's own is for smaller models to show; of these, that shared tokens are accepted."""
    config = SpeculativeConfig("cross_tokenizer", 4, draft=draft)
    made = [
        generate(gemma3, item.messages(), config, max_new_tokens=NEW_TOKENS, sampling=Sampling(1.0), seed=0)
        for item in PROMPTS
    ]
    assert sum(result.stats.accepted for result in made) > 0
    assert all(result.tokens for result in made)


def test_a_bridged_mask_is_scanned_as_it_decodes(gemma3: Target, tmp_path: Path) -> None:
    """Sliding windows, and norms behind every sub-layer."""
    continuations = continue_prompts(gemma3, PROMPTS, Sampling(), NEW_TOKENS)
    mask = SkipMask.parse("layers:3-5;mlp:9", gemma3.layers)
    fit = Calibration(gemma3, continuations, 2**30).fit(BridgeShape.of(gemma3, mask))
    save_bridges(tmp_path / "bridge", fit.bridges, gemma3, {})
    (scan,) = (scanner := Scanner(gemma3, continuations, Sampling(), 3)).scan([mask], bridges=[fit.bridges])
    config = SpeculativeConfig("layer_skip", 3, mask=mask.format(), bridge=str(tmp_path / "bridge"))
    for item, found in zip(PROMPTS, scanner.rounds(scan, 3, config.stop), strict=True):
        result = generate(gemma3, item.messages(), config, max_new_tokens=NEW_TOKENS)
        assert found == list(result.stats.rounds)
