"""Cascades with and without costs: the contract, which member is asked, and what each observes."""

from __future__ import annotations

import copy

import pytest
import torch

from layerskip.config import AcceptRule, SpeculativeConfig, StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import Cascade, PricedCascade
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.registry import build_drafter
from layerskip.models.target import Target
from tests.accelerator import DEVICE
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, SAMPLINGS, Recorder, contract, generated, target_of
from tests.drafters.members import LOOKUP, SECONDS, SKIP, Choosing, Member, member_of, skip_of
from tests.drafters.test_draft_model import noisy_copy
from tests.drafters.test_token_recycling import experienced_drafter

TestLookupThenLayerSkip = contract(
    lambda target: Cascade([member_of(method, target) for method in ("prompt_lookup", "layer_skip")]), Choosing
)
# The second member has decoded before, so that it has something to draft.
TestLookupThenTrees = contract(
    lambda target: Cascade([member_of("prompt_lookup", target), copy.deepcopy(experienced_drafter(target))]),
    trees=True,
    history_dependent=True,
    keeps_state=True,
)


# The first member leaves a round to the second if a stop rule ends its draft after the first token, drawn or not.
SURE = StopRule("threshold", 0.6)
TestSureModelThenLookup = contract(
    lambda target: Cascade([DraftModel(noisy_copy(target), target.layers, 3, SURE), member_of("prompt_lookup", target)])
)


def _sure_siblings_then_model(target: Target) -> Drafter:
    sure = build_drafter(SpeculativeConfig.from_dict(skip_of(target) | {"siblings": 1, "stop": SURE.to_dict()}), target)
    return Cascade([sure, DraftModel(noisy_copy(target), target.layers, 2, SURE)])


# Its drafts depend on the limit, too: no stop rule is applied to the only token of a draft.
TestSureSiblingsThenModel = contract(_sure_siblings_then_model, trees=True, history_dependent=True, samplings=SAMPLINGS[:1])


@pytest.mark.parametrize("proposes", [True, False])
def test_a_provisional_draft_is_taken_if_no_other_member_has_one(proposes: bool) -> None:
    """Plain passes of the model give its confidence in its first token; a draft of its own then has one token."""
    target = target_of("llama")
    model, unsure = noisy_copy(target), 0
    for prompt in PROMPTS:
        second = Member(proposes)
        rounds = Recorder(Cascade([DraftModel(model, target.layers, 3, SURE), second]))
        assert decode(target, rounds, prompt, GREEDY, LENGTH).tokens == generated("llama", prompt, LENGTH)
        for context, drafted in rounds.drafts:
            with torch.no_grad():
                chances = model(torch.tensor([context], device=DEVICE)).logits[0, -1].softmax(-1)
            if float(chances.max()) < SURE.threshold and len(context) < len(prompt) + LENGTH - 2:
                assert drafted == [(1,) if proposes else (int(chances.argmax()),)]
                unsure += 1
            else:
                assert drafted[0] == (int(chances.argmax()),)
        assert (second.verdicts > 0) == proposes
    assert unsure


def test_a_member_that_was_never_asked_keeps_the_text() -> None:
    target, first = target_of("llama"), Member()
    cascade = Cascade([first, member_of("retrieval", target)])
    first_run = decode(target, cascade, PROMPTS[2], GREEDY, LENGTH)
    first.proposes = False
    again = decode(target, cascade, PROMPTS[2], GREEDY, LENGTH)
    fresh = decode(target, member_of("retrieval", target), PROMPTS[2], GREEDY, LENGTH)
    assert first_run.tokens == again.tokens == fresh.tokens == generated("llama", PROMPTS[2], LENGTH)
    assert len(again.stats.rounds) < len(fresh.stats.rounds)
    assert again.stats.rounds[0].accepted > 0  # it can only know this from the earlier prompt


class Often(Member):
    """Drafts in two of three rounds."""

    rounds = 0

    def draft(self, context: Context, limit: int) -> Draft:
        self.rounds += 1
        self.proposes = self.rounds % 3 > 0
        return super().draft(context, limit)


TRAINED = ("eagle", "medusa", "draft_model", "cross_tokenizer")


@pytest.mark.parametrize("method", [*SECONDS, *TRAINED])
def test_a_member_that_was_skipped_for_rounds_catches_up(method: str) -> None:
    target, right = target_of("llama"), 0
    second = Recorder(member_of(method, target))
    cascade = Cascade([Often(), second])
    for prompt in PROMPTS:
        second.drafts.clear()
        result = decode(target, cascade, prompt, GREEDY, LENGTH)
        assert result.tokens == generated("llama", prompt, LENGTH)
        text = (*prompt, *result.tokens)
        for context, branches in second.drafts:
            assert context == text[: len(context)]
            hits = sum(text[len(context) : len(context) + len(branch)] == branch for branch in branches)
            assert hits or method not in ("draft_model", "cross_tokenizer")  # these draft with the target itself
            right += hits
    assert right > 0


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
