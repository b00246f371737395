"""Cascades with known costs: the contract, and which members are asked at all."""

from __future__ import annotations

import copy

from layerskip.config import AcceptRule, SpeculativeConfig, StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import Cascade, PricedCascade
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.registry import build_drafter
from layerskip.models.target import Target
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, SAMPLINGS, Recorder, contract, generated, target_of
from tests.drafters.members import LOOKUP, SKIP, Choosing, member_of
from tests.drafters.test_draft_model import noisy_copy
from tests.drafters.test_token_recycling import experienced_drafter


class Priced(Choosing):
    samplings = SAMPLINGS[1:2]
    takers: tuple[int | None, ...] = (None,)
    """Members whose drafts are verified at times; None for rounds in which no draft pays."""

    def test_members_take_turns(self) -> None:
        target = target_of("llama")
        cascade = self.drafter(target)
        assert isinstance(cascade, PricedCascade)
        taken, observe = set[int | None](), cascade.observe

        def observed(verdict: Verdict) -> None:
            taken.add(cascade._drafted)
            observe(verdict)

        cascade.observe = observed  # type: ignore[method-assign]
        for prompt in PROMPTS * 2:
            decode(target, cascade, prompt, GREEDY, LENGTH)
        assert {*self.takers} <= taken and len(taken) > 1


# The second member has decoded before, so that it has something to draft.
TestLookupThenTreesThatHaveToPay = contract(
    lambda target: PricedCascade(
        [member_of("prompt_lookup", target), copy.deepcopy(experienced_drafter(target))], (1.25, 1.3)
    ),
    Priced,
    trees=True,
)
# Which member drafts is decided before anything is drawn.
TestLookupThenLayerSkipThatHasToPay = contract(
    lambda target: PricedCascade(
        [member_of(method, target) for method in ("prompt_lookup", "layer_skip")], (1.02, 1.04), (0.0, 0.05)
    ),
    Priced,
    takers=(1, None),
)


def _sure_model_and_lookup(target: Target) -> Drafter:
    """The first of two models leaves rounds with a low first confidence to the second."""
    sure, second = (
        DraftModel(noisy_copy(target), target.layers, 3, stop) for stop in (StopRule("threshold", 0.6), StopRule())
    )
    return PricedCascade([sure, member_of("prompt_lookup", target), second], (1.01, 1.02), (0.01, 0.0, 0.01))


TestSureModelAndLookupThatHaveToPay = contract(_sure_model_and_lookup, Priced, takers=(0, 2), samplings=SAMPLINGS[:1])


def test_without_draft_costs_a_model_is_asked_if_no_lookup_pays() -> None:
    target, asked, lost = target_of("llama"), 0, 0
    first, second = (Recorder(member_of(method, target)) for method in ("prompt_lookup", "layer_skip"))
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


def test_lossy_rules_use_the_cascade_without_costs() -> None:
    members = [SpeculativeConfig.from_dict(fields) for fields in (LOOKUP, SKIP)]
    costs = {"verify_cost": (1.1, 1.2), "draft_cost": (0.0, 0.1)}
    for rule, method in (("exact", PricedCascade), ("typical", Cascade)):
        config = SpeculativeConfig("cascade", members=tuple(members), accept=AcceptRule(rule), **costs)  # type: ignore[arg-type]
        assert type(build_drafter(config, target_of("llama"))) is method
