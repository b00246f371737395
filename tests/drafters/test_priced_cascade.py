"""Several drafters of known cost: the contract, and who is asked at all."""

from __future__ import annotations

import copy
from collections import Counter

import pytest

from layerskip.config import AcceptRule, SpeculativeConfig, StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter, Finder
from layerskip.decoding.stats import Round
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import Cascade
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle import Eagle
from layerskip.drafters.priced_cascade import PricedCascade
from layerskip.drafters.registry import build_drafter
from layerskip.heads.readout import Readout
from layerskip.models.target import Target
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, SAMPLINGS, Recorder, generated, target_of
from tests.drafters.heads import eagle_head, family_of
from tests.drafters.members import LOOKUP, SKIP, Choosing, member_of
from tests.drafters.test_draft_model import _like
from tests.drafters.test_token_recycling import experienced


class Priced(Choosing):
    samplings = SAMPLINGS[1:2]

    def rounds(self, passes: int) -> tuple[dict[int, set[tuple[int, ...]]], list[Round], Counter[int | None]]:
        """In which contexts each member has drafted in some passes over all prompts, all rounds, and how many were whose."""
        target = target_of("llama")
        cascade = self.drafter(target)
        assert isinstance(cascade, PricedCascade)
        cascade.members = members = tuple(Recorder(member) for member in cascade.members)
        taken, observe = Counter[int | None](), cascade.observe

        def heard(verdict: Verdict) -> None:
            taken[cascade._drafted] += 1
            observe(verdict)

        cascade.observe = heard  # type: ignore[method-assign]
        rounds = [r for prompt in PROMPTS * passes for r in decode(target, cascade, prompt, GREEDY, LENGTH).stats.rounds]
        drafts = (member.drafts for member in members)
        return {n: {context for context, branches in each if branches} for n, each in enumerate(drafts)}, rounds, taken


class TestLookupThenTreesThatHaveToPay(Priced):
    trees = True

    def drafter(self, target: Target) -> Drafter:
        """The second has decoded before, so that it has something to draft."""
        return PricedCascade([member_of("prompt_lookup", target), copy.deepcopy(experienced(target))], (1.25, 1.3))

    def test_some_drafts_are_taken_and_some_declined(self) -> None:
        drafted, rounds, _ = self.rounds(1)
        assert 0 < sum(found.drafted > 0 for found in rounds) < len(set().union(*drafted.values()))


class TestLookupRetrievalAndTreesThatHaveToPay(Priced):
    """Whoever finds drafts for nothing is asked, and all have their rounds."""

    trees = True

    def drafter(self, target: Target) -> Drafter:
        members = [member_of("prompt_lookup", target), member_of("retrieval", target), copy.deepcopy(experienced(target))]
        return PricedCascade(members, (1.0, 1.05))

    def test_more_than_one_drafts(self) -> None:
        _, _, taken = self.rounds(2)
        assert all(taken[place] for place in range(3))


class TestLookupThenWindowThatHasToPay(Priced):
    trees = True

    def drafter(self, target: Target) -> Drafter:
        members = [member_of(kind, target) for kind in ("prompt_lookup", "lookahead")]
        return PricedCascade(members, (1.02, 1.04), (0.0, 0.0))

    def test_it_has_some_rounds_and_not_all_that_are_left(self) -> None:
        _, _, taken = self.rounds(2)
        assert taken[1]
        assert taken[None]


class TestLookupThenLayerSkipThatHasToPay(Priced):
    """Drawn drafts, too: what decides who drafts is known before anything is drawn."""

    samplings = SAMPLINGS

    def drafter(self, target: Target) -> Drafter:
        skip = SKIP | {"mask": "attention:0" if target.layers == 1 else SKIP["mask"]}
        members = [build_drafter(SpeculativeConfig.from_dict(fields), target) for fields in (LOOKUP, skip)]
        return PricedCascade(members, (1.02, 1.04), (0.0, 0.05))

    def test_it_has_some_rounds_and_not_all_that_are_left(self) -> None:
        drafted, rounds, _ = self.rounds(2)
        assert 0 < len(drafted[1]) < sum(not found.drafted for found in rounds)


class TestLookupThenHeadThatHasToPay(Priced):
    trees = True

    def drafter(self, target: Target) -> Drafter:
        head, embeddings = eagle_head(family_of(target)), target.model.get_input_embeddings()
        second = Eagle(head, embeddings, Readout(target, head.tokens), 3, StopRule(), 3, 6)
        return PricedCascade([member_of("prompt_lookup", target), second], (1.05, 1.1), (0.0, 0.02))


class TestSureModelAndLookupThatHaveToPay(Priced):
    """Of two models the first leaves rounds where it is unsure to the second."""

    samplings = SAMPLINGS[:1]

    def drafter(self, target: Target) -> Drafter:
        sure, second = (
            DraftModel(_like(target), target.layers, 3, stop) for stop in (StopRule("threshold", 0.6), StopRule())
        )
        return PricedCascade([sure, member_of("prompt_lookup", target), second], (1.01, 1.02), (0.01, 0.0, 0.01))

    def test_where_the_first_is_unsure_another_drafts(self) -> None:
        drafted, _, taken = self.rounds(1)
        assert taken[0]
        assert taken[2]
        assert len(drafted[0]) > taken[0]


def test_who_runs_a_model_at_an_unknown_price_is_asked_where_nothing_that_was_found_pays() -> None:
    target, asked, lost = target_of("llama"), 0, 0
    first, second = (Recorder(member_of(kind, target)) for kind in ("prompt_lookup", "layer_skip"))
    cascade = PricedCascade([first, second], (1.1, 1.2))
    for prompt in PROMPTS:
        for recorder in (first, second):
            recorder.drafts.clear()
        result = decode(target, watched := Recorder(cascade), prompt, GREEDY, LENGTH)
        assert result.tokens == generated("llama", prompt, LENGTH)
        theirs = dict(second.drafts)
        for context, branches in watched.drafts:
            assert branches == theirs[context] if context in theirs else branches  # without it a lookup was verified
        asked, lost = asked + len(theirs), lost + len(watched.drafts) - len(theirs)
    assert asked > 5
    assert lost > 5


def test_lossy_rules_leave_the_order_to_decide() -> None:
    members = [SpeculativeConfig.from_dict(fields) for fields in (LOOKUP, SKIP)]
    costs = {"verify_cost": (1.1, 1.2), "draft_cost": (0.0, 0.1)}
    for rule, kind in (("exact", PricedCascade), ("typical", Cascade)):
        config = SpeculativeConfig("cascade", members=tuple(members), accept=AcceptRule(rule), **costs)  # type: ignore[arg-type]
        assert type(build_drafter(config, target_of("llama"))) is kind


@pytest.mark.parametrize("kind", ["prompt_lookup", "retrieval", "token_recycling", "lookahead", "layer_skip"])
def test_who_is_told_no_price_is_who_finds_drafts(kind: str) -> None:
    """A configuration says so before anything is built, the drafter once it is."""
    drafter = member_of(kind, target_of("llama"))
    fields = {"mask": "attention:0"} if kind == "layer_skip" else {}
    assert SpeculativeConfig.from_dict({"kind": kind} | fields).finds == (isinstance(drafter, Finder) and drafter.finds)
