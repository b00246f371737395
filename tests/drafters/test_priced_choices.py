"""Every choice of a cascade with known costs, against what the text had shown by then."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from layerskip.decoding.drafter import Context
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import PricedCascade
from tests.drafters.members import (
    Member,
    ResultLog,
    ScriptedMember,
    Trees,
    run_along,
)
from tests.drafters.recorder import branches_of


def _asked(cascade: PricedCascade, members: Sequence[ResultLog], begin: int, end: int) -> list[list[int]]:
    """Returns at which lengths of a text of zeros each member was asked."""
    asked: list[list[int]] = [[] for _ in members]
    known = begin
    while known < end:
        for member in members:
            member.last = None
        draft = cascade.draft(Context([0] * known, torch.tensor([0])), 4)
        accepted = run_along(branches_of(draft), [0] * 9)
        cascade.observe(Verdict(tuple(draft.tokens.tolist()), accepted, 0, torch.tensor([0])))
        for member, places in zip(members, asked, strict=True):
            places += [known] if member.last is not None else []
        known += accepted + 1
    return asked


def test_a_long_declined_member_is_asked_again_and_taken_once_it_pays() -> None:
    first, second = Member(), ResultLog(script := ScriptedMember([0] * 3000))
    first.proposes, first.lookup, script.hit_rate = False, True, 0.0
    cascade = PricedCascade([first, second], (1.1, 1.2), (0.0, 0.3))
    cascade.start([0], None, None)  # type: ignore[arg-type]
    (asked,) = _asked(cascade, [second], 1, 600)
    assert asked[0] == 1
    assert [b - a for a, b in itertools.pairwise(asked)][-3:] == [129] * 3
    script.hit_rate = 1.0
    (asked,) = _asked(cascade, [second], 600, 2000)
    assert 600 < asked[0] < 729
    assert len(asked) > 400  # of some 450 rounds that were left
    cascade.reset_state()
    script.hit_rate = 0.0
    cascade.start([0], None, None)  # type: ignore[arg-type]
    assert _asked(cascade, [second], 1, 2) == [[1]]


@pytest.mark.parametrize(("price", "single_pass"), [(0.95, False), (1.0, False), (2.5, False), (2.5, True)])
def test_a_member_that_can_never_pay_is_never_asked(price: float, single_pass: bool) -> None:
    """Each token of a chain costs a step then, however right it is. A tree drafted in one pass costs one step only."""
    first, second = Member(), ResultLog(ScriptedMember([0] * 3000))
    first.proposes, first.lookup = False, True
    second.single_pass = single_pass
    cascade = PricedCascade([first, second], (1.0, 1.0), (0.0, price))
    cascade.start([0], None, None)  # type: ignore[arg-type]
    (asked,) = _asked(cascade, [second], 1, 600)
    assert bool(asked) == (price < 1 or single_pass)


def test_a_better_model_is_discovered_after_a_good_one() -> None:
    """Both gain, but the second, which the first leaves no rounds, would gain more."""
    text = [0] * 3000
    first, second = ResultLog(ScriptedMember(text)), ResultLog(ScriptedMember(text))
    first.drafter.hit_rate, first.drafter.draft_rate, second.drafter.hit_rate = 0.9, 1.0, 1.0  # type: ignore[attr-defined]
    cascade = PricedCascade([first, second], (1.0, 1.0), (0.02, 0.0))
    cascade.start([0], None, None)  # type: ignore[arg-type]
    asked = _asked(cascade, [first, second], 1, 250)
    assert len(asked[0]) > 50
    assert not asked[1]
    _asked(cascade, [first, second], 250, 1500)
    asked = _asked(cascade, [first, second], 1500, 2500)
    assert len(asked[1]) > 3 * len(asked[0])


@pytest.mark.parametrize(
    ("costs", "sizes"),
    [
        ((1.0, 1.0, 1.0, 1.0), [4, 4]),
        ((1.05, 1.6, 1.9, 2.2), [1, 1]),  # of one token 0.6 are accepted, of two 1.1, of three 1.4
        ((1.0, 1.0, 1.3, 1.4), [4, 2]),  # half as many of each, once none was
        ((1.8, 1.9, 2.0, 2.1), [4, 4]),  # by then the usual rate is as slow
        ((2.8, 2.9, 3.0, 3.1), [0, 0]),
    ],
)
def test_a_tree_is_cut_to_the_tokens_that_pay(costs: tuple[float, ...], sizes: list[int]) -> None:
    """The second time it is known that the text took another branch."""
    silent = Member(proposes=False)
    cascade, found = PricedCascade([silent, Trees()], costs), []
    cascade.start([7], None, None)  # type: ignore[arg-type]
    for text in ([7, 7], [7, 7, 7]):
        draft = cascade.draft(Context(text, torch.tensor(text[-1:])), 4)
        found.append(draft.tokens.shape[0])
        assert draft.parents == ((-1, 0, -1, 2)[: found[-1]] if found[-1] > 2 else None)
        cascade.observe(Verdict(draft.lookup_tokens, 0, 7, torch.tensor([7])))
    assert found == sizes


@pytest.mark.parametrize(("context", "size"), [(1, 4), (100, 4), (150, 1), (200, 0), (300, 0)])
def test_costs_are_those_at_the_context_of_the_text(context: int, size: int) -> None:
    """Between two contexts half of each counts, and outside of them the nearest. The sizes are those of the test above."""
    silent = Member(proposes=False)
    near, between, far = (1.0, 1.0, 1.0, 1.0), (1.05, 1.6, 1.9, 2.2), (2.8, 2.9, 3.0, 3.1)
    middle = tuple(2 * half - one for half, one in zip(between, near, strict=True))
    costs = {100: near, 200: far} if context != 150 else {100: near, 200: middle}
    cascade = PricedCascade([silent, Trees()], tuple(costs.items()))
    text = [7] * context
    cascade.start(text, None, None)  # type: ignore[arg-type]
    assert cascade.draft(Context(text, torch.tensor([7])), 4).tokens.shape[0] == size


def test_a_member_is_tried_at_the_contexts_where_its_drafts_are_cheap() -> None:
    first, second = Member(proposes=False), Member()
    costs = (100, (0.0, 5.0)), (200, (0.0, 0.1))
    cascade = PricedCascade([first, second], (1.0, 1.0), costs)
    spent = []
    for context in (100, 200):
        cascade.reset_state()
        cascade.start([0] * context, None, None)  # type: ignore[arg-type]
        cascade.draft(Context([0] * context, torch.tensor([0])), 4)
        cascade.observe(Verdict((1,), 1, 7, torch.tensor([7])))
        spent.append(cascade._asked[1])
    assert spent == [5.0, 0.1]


def test_tokens_cut_from_a_tree_are_scored_too() -> None:
    """The text takes the second branch again and again, of which nothing is verified at first."""
    silent = Member(proposes=False)
    cascade, text, sizes = PricedCascade([silent, Trees()], (1.05, 1.6, 1.9, 2.2)), [7], []
    cascade.start(text, None, None)  # type: ignore[arg-type]
    for _ in range(12):
        draft = cascade.draft(Context(text, torch.tensor(text[-1:])), 4)
        sizes.append(draft.tokens.shape[0])
        following = [3, 4, 7]
        cascade.observe(Verdict(draft.lookup_tokens, run_along(branches_of(draft), following), 7, torch.tensor([7])))
        text += following
    assert sizes[0] == 1
    assert sizes[-1] == 4
    cascade.reset_state()
    cascade.start(text, None, None)  # type: ignore[arg-type]
    assert cascade.draft(Context(text, torch.tensor(text[-1:])), 4).tokens.shape[0] == 1


def test_a_truncated_tree_may_become_a_chain() -> None:
    tree = Trees().draft(Context([7], torch.tensor([7])), 4)
    assert tree.truncate(4) is tree
    for size, parents in ((1, None), (2, None), (3, (-1, 0, -1))):
        cut = tree.truncate(size)
        assert (cut.tokens.tolist(), cut.parents) == ([1, 2, 3][:size], parents)
        assert (cut.lookup_tokens, cut.path_probs) == ((1, 2, 3)[:size], (0.6, 0.5, 0.3)[:size])
