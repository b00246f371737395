"""A real pair with two tokenizers: SmolLM2 drafts for Gemma 3 270M. Skipped without ``make gemma``."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerskip import DraftPlan, PromptSet, SpeculativeConfig, Target, generate, load_target, save_draft_checkpoint
from layerskip.models.loading import WHEELS
from tests.accelerator import DEVICE
from tests.exhaustive import EXHAUSTIVE
from tests.generated import generated

NEW_TOKENS = 24


def test_a_draft_with_another_tokenizer_does_not_change_the_output(smollm2: Target, tmp_path: Path) -> None:
    pytest.importorskip(WHEELS["gemma3"].package)
    gemma3 = load_target("gemma3", dtype="float32", device=DEVICE)
    draft = save_draft_checkpoint(smollm2, DraftPlan.none(smollm2.layers), tmp_path)
    config, accepted = SpeculativeConfig("cross_tokenizer", 4, draft_model=str(draft)), 0
    for item in PromptSet.packaged().take(None if EXHAUSTIVE else 3):
        result = generate(gemma3, item.messages(), config, max_new_tokens=NEW_TOKENS)
        assert result.tokens == generated(gemma3.model, gemma3.encode(item.messages()), NEW_TOKENS)
        accepted += result.stats.accepted
    assert accepted > 0
