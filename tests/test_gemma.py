"""A real pair with two tokenizers: SmolLM2 drafts for Gemma 3 270M. Skipped without ``make gemma``."""

from __future__ import annotations

import pytest

from layerskip import PromptSet, SpeculativeConfig, Target, generate, load_target
from layerskip.mask import SkipMask
from layerskip.models.loading import WHEELS
from layerskip.models.skip_view import save_draft_checkpoint
from tests.accelerator import DEVICE
from tests.exhaustive import EXHAUSTIVE
from tests.generated import generated

NEW_TOKENS = 24
PROMPTS = PromptSet.packaged().take(None if EXHAUSTIVE else 3)


@pytest.fixture(scope="module")
def gemma3() -> Target:
    pytest.importorskip(WHEELS["gemma3"].package)
    return load_target("gemma3", dtype="float32", device=DEVICE)


@pytest.fixture(scope="module")
def draft(gemma3: Target, smollm2: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    """SmolLM2 saved to a folder."""
    folder = tmp_path_factory.mktemp("draft") / "smollm2"
    return str(save_draft_checkpoint(smollm2, SkipMask.none(smollm2.layers), folder))


def test_a_draft_with_another_tokenizer_does_not_change_the_output(gemma3: Target, draft: str) -> None:
    config, accepted = SpeculativeConfig("cross_tokenizer", 4, draft_model=draft), 0
    for item in PROMPTS:
        result = generate(gemma3, item.messages(), config, max_new_tokens=NEW_TOKENS)
        assert result.tokens == generated(gemma3.model, gemma3.encode(item.messages()), NEW_TOKENS)
        accepted += result.stats.accepted
    assert accepted > 0
