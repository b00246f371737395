"""Tests the measured cost of drafts, with a clock that counts passes instead of seconds."""

from __future__ import annotations

from typing import Any

import pytest

from layerskip import SpeculativeConfig
from layerskip.costs import timing
from layerskip.costs.timing import time_drafting
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context
from layerskip.decoding.sampling import Sampling
from layerskip.models.target import Target
from tests.drafters.contract import VOCABULARY
from tests.drafters.members import Member
from tests.families import build

LOOKUP = SpeculativeConfig("prompt_lookup")
SKIP = SpeculativeConfig("layer_skip", 3, mask="layers:1")


@pytest.fixture
def passes() -> list[Any]:
    """The passes that the clock counts."""
    return []


@pytest.fixture
def target(passes: list[Any], monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target whose passes, and those of its views, are counted."""
    model = build("llama", 1, vocab_size=VOCABULARY).cpu()  # on a GPU captured passes run without the model
    model.get_input_embeddings().register_forward_pre_hook(lambda *given: passes.append(given))
    monkeypatch.setattr(timing, "now", lambda device: float(len(passes)))
    return Target(model, None, "toy")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_a_token_of_a_chain_costs_one_pass(target: Target, sampling: Sampling) -> None:
    """One pass is also the cost of a step. The draft length has no effect."""
    assert time_drafting(target, LOOKUP, 9) == 0.0
    for length in (1, 3, 20):
        config = SpeculativeConfig("layer_skip", length, mask="layers:1")
        assert time_drafting(target, config, 9, sampling) == 1.0


class _Trees(Member):
    """Drafts a tree of three levels with six passes, and nothing after more tokens than it can read."""

    def __init__(self, passes: list[Any], maximum: int, at_once: bool) -> None:
        super().__init__()
        self._passes, self._most, self.single_pass = passes, maximum, at_once

    def draft(self, context: Context, limit: int) -> Draft:
        if len(context.tokens) > self._most:
            return Draft.empty(context.last.device)
        self._passes += [None] * 6
        return Draft.of_tree([1, 2, 3, 4], [-1, 0, 1, -1], context.last.device)


@pytest.mark.parametrize(("at_once", "cost"), [(False, 2.0), (True, 6.0)])
@pytest.mark.parametrize("maximum", [1000, 100, 0])
def test_the_cost_of_a_tree_is_that_of_a_level(
    at_once: bool, cost: float, maximum: int, target: Target, passes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "build_drafter", lambda config, target: _Trees(passes, maximum, at_once))
    assert time_drafting(target, SKIP, 300) == (cost if maximum else 0.0)
