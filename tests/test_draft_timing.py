"""What drafts take, by a clock that counts passes instead of seconds."""

from __future__ import annotations

from typing import Any

import pytest

from layerskip import SpeculativeConfig, draft_timing
from layerskip.draft_timing import draft_costs, time_drafting
from layerskip.sampling import Sampling
from layerskip.target import Target
from tests.drafters.contract import VOCABULARY
from tests.families import build

LOOKUP = SpeculativeConfig("prompt_lookup")
SKIP = SpeculativeConfig("layer_skip", 3, mask="layers:1")


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    """Whose passes, and those of its views, are what the clock counts."""
    model = build("llama", 1, vocab_size=VOCABULARY)
    passes: list[Any] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda *given: passes.append(given))
    monkeypatch.setattr(draft_timing, "now", lambda device: float(len(passes)))
    return Target(model, None, "toy")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_a_token_of_a_chain_takes_a_pass(target: Target, sampling: Sampling) -> None:
    """Which is what a step takes; a length that only the end of a text would cut changes nothing."""
    for length in (1, 3, 20):
        config = SpeculativeConfig("layer_skip", length, mask="layers:1")
        assert time_drafting(target, config, 9, sampling) == 1.0


def test_what_finds_nothing_runs_no_pass(target: Target) -> None:
    assert time_drafting(target, LOOKUP, 9) == 0.0


def test_members_cost_what_their_drafts_take_and_are_timed_once(target: Target) -> None:
    known: dict[str, float] = {}
    longer = SpeculativeConfig("layer_skip", 5, mask="layers:1")
    assert draft_costs(target, (LOOKUP, SKIP, longer), 9, known=known) == (0.0, 1.0, 1.0)
    assert len(known) == 1
    (make,) = known
    known[make] = 0.5
    assert draft_costs(target, (LOOKUP, SKIP), 9, known=known) == (0.0, 0.5)
    other = SpeculativeConfig("layer_skip", 3, mask="attention:1")
    assert draft_costs(target, (LOOKUP, other), 9, known=known) == (0.0, 1.0)
    assert len(known) == 2
    assert draft_costs(target, (LOOKUP, LOOKUP), 9, known=known) == ()
    assert len(known) == 2
