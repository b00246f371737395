"""Plain decoding, the baseline: the contract, and rounds of one token each."""

from __future__ import annotations

from layerskip.config import SpeculativeConfig
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.stats import Round
from layerskip.drafters.registry import build_drafter
from layerskip.models.target import Target
from tests.drafters.contract import PROMPTS, SAMPLINGS, DrafterContract, target_of


class TestNoDraft(DrafterContract):
    drafts = False
    samplings = SAMPLINGS

    def drafter(self, target: Target) -> Drafter:
        return build_drafter(SpeculativeConfig(), target)

    def test_every_round_commits_one_token(self) -> None:
        result = self.decode(target_of("llama"), PROMPTS[0], 10)
        assert result.stats.rounds == (Round(0, 0, 1),) * 9
