"""Cascades with and without costs: the contract, which member is asked, what each observes, and how much of it is taken."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from layerskip.config import Costs
from layerskip.decoding.decode import decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import Cascade
from tests.drafters.contract import (
    FEW_PROMPTS,
    GREEDY,
    LENGTH,
    PROMPTS,
    SAMPLINGS,
    DrafterContract,
    contract,
    generated,
    target_of,
)
from tests.drafters.members import SECONDS, Member, member_of
from tests.drafters.recorder import Recorder, branches_of, proposed, started
from tests.drafters.test_token_recycling import experienced_drafter


class Choosing(DrafterContract):
    """The contract of cascades. Their estimates show only in the choice of members, which few tokens need not change."""

    history_dependent = True
    keeps_state = True
    samplings = SAMPLINGS[1:2]
    takers: tuple[int | None, ...] = ()
    """Members whose drafts are verified at times; None for rounds in which no draft pays."""

    def test_state_lasts_until_it_is_reset(self) -> None:
        target = target_of("llama")
        drafter, runs = self.drafter(target), []
        for _ in range(2):
            drafter.reset_state()
            runs.append([decode(target, drafter, prompt, GREEDY, LENGTH).stats for prompt in FEW_PROMPTS * 2])
        assert runs[0] == runs[1]

    def test_members_take_turns(self) -> None:
        target = target_of("llama")
        cascade = self.drafter(target)
        assert isinstance(cascade, Cascade)
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
    lambda target: Cascade([member_of("prompt_lookup", target), copy.deepcopy(experienced_drafter(target))], (1.25, 1.3)),
    Choosing,
    trees=True,
    takers=(None,),
    samples_by_default=False,
)
# Which member drafts is decided before anything is drawn.
TestLookupThenLayerSkipThatHasToPay = contract(
    lambda target: Cascade(
        [member_of(method, target) for method in ("prompt_lookup", "layer_skip")], (1.02, 1.04), (0.0, 0.05)
    ),
    Choosing,
    takers=(1, None),
)


class Often(Member):
    """Looks up a draft in two of three rounds."""

    lookup = True
    rounds = 0

    def draft(self, context: Context, limit: int) -> Draft:
        self.rounds += 1
        return Draft.of_lookup([1][: self.rounds % 3], [-1][: self.rounds % 3], context.last.device)


TRAINED = ("eagle", "draft_model", "cross_tokenizer")


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
        assert len(second.drafts) < len(result.stats.rounds)
        for context, branches in second.drafts:
            assert context == text[: len(context)]
            hits = sum(text[len(context) : len(context) + len(branch)] == branch for branch in branches)
            assert hits or method not in ("draft_model", "cross_tokenizer")  # these draft with the target itself
            right += hits
    assert right > 0


def test_without_draft_costs_a_model_is_asked_if_no_lookup_pays() -> None:
    target, asked, lost = target_of("llama"), 0, 0
    second = Recorder(member_of("layer_skip", target))
    cascade = Cascade([member_of("prompt_lookup", target), second], (1.1, 1.2))
    for prompt in PROMPTS:
        second.drafts.clear()
        result = decode(target, watched := Recorder(cascade), prompt, GREEDY, LENGTH)
        assert result.tokens == generated("llama", prompt, LENGTH)
        theirs = dict(second.drafts)
        for context, branches in watched.drafts:
            assert branches == theirs[context] if context in theirs else branches  # without it a lookup was verified
        asked, lost = asked + len(theirs), lost + len(watched.drafts) - len(theirs)
    assert asked > 5
    assert lost > 5


class Scripted(Member):
    """Drafts the next tokens of a text of zeros, if it ``hits``, and records the lengths at which it was asked."""

    hits = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def draft(self, context: Context, limit: int) -> Draft:
        self.asked.append(len(context.tokens))
        right = 0.7 if self.hits else 0.0
        chance = random.Random(len(context.tokens))
        return Draft(torch.tensor([0 if chance.random() < right else 9 for _ in range(2)]))


class Trees(Member):
    """Always drafts the same tree of two branches of two tokens, the first one likelier."""

    lookup = True

    def draft(self, context: Context, limit: int) -> Draft:
        return Draft.of_lookup([1, 2, 3, 4], [-1, 0, -1, 2], context.last.device, path_probs=[0.6, 0.5, 0.3, 0.2])


SILENT = Member(proposes=False)
SILENT.lookup = True


def _run_along(branches: list[tuple[int, ...]], text: Sequence[int]) -> int:
    """Returns how many tokens of a text the best branch has."""
    return max((len(branch) for branch in branches if tuple(text[: len(branch)]) == branch), default=0)


def _asked(cascade: Cascade, member: Scripted, known: int, end: int) -> list[int]:
    """Returns at which lengths of a text of zeros the member was asked."""
    member.asked.clear()
    while known < end:
        draft = proposed(cascade, [0] * known, 4)
        accepted = _run_along(branches_of(draft), [0] * 4)
        cascade.observe(Verdict(tuple(draft.tokens.tolist()), accepted, 0, torch.tensor([0])))
        known += accepted + 1
    return list(member.asked)


def test_a_long_declined_member_is_asked_again_and_taken_once_it_pays() -> None:
    second = Scripted()
    second.hits = False
    cascade = started(Cascade([SILENT, second], (1.1, 1.2), (0.0, 0.3)), 0)
    asked = _asked(cascade, second, 1, 600)
    assert asked[0] == 1
    assert [b - a for a, b in itertools.pairwise(asked)][-3:] == [129] * 3
    second.hits = True
    asked = _asked(cascade, second, 600, 2000)
    assert 600 < asked[0] < 729
    assert len(asked) > 400  # of some 600 rounds that were left
    cascade.reset_state()
    second.hits = False
    assert _asked(started(cascade, 0), second, 1, 2) == [1]


@pytest.mark.parametrize(
    ("costs", "single_pass", "pays"),
    [((0.0, 0.95), False, True), ((0.0, 1.0), False, False), ((0.0, 2.5), True, True)],
)
def test_a_member_that_can_never_pay_is_never_asked(costs: Costs, single_pass: bool, pays: bool) -> None:
    """Each token of a chain costs a step then, however right it is. A tree drafted in one pass costs one step only."""
    second = Scripted()
    second.single_pass = single_pass
    assert bool(_asked(started(Cascade([SILENT, second], (1.0, 1.0), costs), 0), second, 1, 600)) == pays


@pytest.mark.parametrize(
    ("costs", "sizes"),
    [
        ((), [4, 4]),
        ((1.05, 1.6, 1.9, 2.2), [1, 1]),  # of one token 0.6 are accepted, of two 1.1, of three 1.4
        ((1.0, 1.0, 1.3, 1.4), [4, 2]),  # half as many of each, once none was
        ((1.8, 1.9, 2.0, 2.1), [4, 4]),  # by then the usual rate is as slow
        ((2.8, 2.9, 3.0, 3.1), [0, 0]),
    ],
)
def test_a_tree_is_cut_to_the_tokens_that_pay(costs: tuple[float, ...], sizes: list[int]) -> None:
    """The second time it is known that the text took another branch."""
    cascade, found = started(Cascade([SILENT, Trees()], costs), 0), []
    for text in ([7, 7], [7, 7, 7]):
        draft = proposed(cascade, text, 4)
        found.append(draft.tokens.shape[0])
        assert draft.parents == ((-1, 0, -1, 2)[: found[-1]] if found[-1] > 2 else None)
        cascade.observe(Verdict(draft.lookup_tokens, 0, 7, torch.tensor([7])))
    assert found == sizes


def test_tokens_cut_from_a_tree_are_scored_too() -> None:
    """The text takes the second branch again and again, of which nothing is verified at first."""
    cascade, text, sizes = started(Cascade([SILENT, Trees()], (1.05, 1.6, 1.9, 2.2)), 0), [7], []
    for _ in range(12):
        draft = proposed(cascade, text, 4)
        sizes.append(draft.tokens.shape[0])
        following = [3, 4, 7]
        cascade.observe(Verdict(draft.lookup_tokens, _run_along(branches_of(draft), following), 7, torch.tensor([7])))
        text += following
    assert (sizes[0], sizes[-1]) == (1, 4)
