"""Every choice of a cascade with known costs, against what the text had shown by then."""

from __future__ import annotations

import copy
import itertools
import random
import statistics
from collections.abc import Sequence

import pytest
import torch

from layerskip.config import SpeculativeConfig
from layerskip.decoding.decode import decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import PricedCascade
from layerskip.drafters.registry import build_drafter
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, target_of
from tests.drafters.members import (
    LOOKUP,
    LookupScriptedMember,
    Member,
    Open,
    ResultLog,
    ScriptedMember,
    Trees,
    branches_of,
    mean,
    run_along,
    score,
)
from tests.drafters.test_token_recycling import experienced_drafter


def _paying(chances: Sequence[float], costs: dict[int, float], rate: float) -> tuple[int, float]:
    """Returns how many tokens of a chain gain most over their cost at a rate, and their round's tokens per step."""
    accepted = list(itertools.accumulate(chances, initial=0.0))
    gains = [found - rate * (costs[size] - 1) for size, found in enumerate(accepted)]
    size = gains.index(max(gains))
    return size, (1 + accepted[size]) / costs[size] if size else 0.0


@pytest.mark.parametrize("alone", [True, False])
def test_a_lookup_is_cut_to_the_tokens_that_pay(alone: bool) -> None:
    """Every choice on some texts, against the hit rates of everything that the texts had shown, taken or not."""
    source, text, costs = random.Random(1), list[int](), {0: 1.0, 1: 1.3, 2: 1.3, 3: 1.8, 4: 2.05}
    fields = {"method": "prompt_lookup", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 4}
    first = ResultLog(build_drafter(SpeculativeConfig.from_dict(fields), target_of("llama")))
    second = ResultLog(script := LookupScriptedMember([] if alone else text))
    script.hit_rate = 0.5
    cascade = PricedCascade([first, second], (costs[1], costs[2], costs[3]))  # beyond which they go on straight
    reached: dict[tuple[int, int], list[int]] = {}  # (match length, depth) to hits; the second has length 0
    tokens = steps = 1.0
    choices = dict.fromkeys(("first", "second", "second before first", "declined", "cut", "whole"), 0)

    for _ in range(8):
        text[:] = source.choices(range(4), k=30)
        text += text[8:20]
        cascade.start(text[:8], None, None)  # type: ignore[arg-type]
        open_drafts: Open = []
        known = 9
        while known < len(text) - 5:
            score(open_drafts, {}, text[:known], reached)
            first.last = second.last = Draft.empty(torch.device("cpu"))
            draft = cascade.draft(Context(text[:known], torch.tensor(text[known - 1 : known])), 4)
            (length, other_length), match = (each.last.tokens.shape[0] for each in (first, second)), first.last.match_length
            (size, worth), (other, others) = (
                _paying(
                    [mean(reached.get((matched, depth), []), 0.9**depth) for depth in range(1, count + 1)],
                    costs,
                    tokens / steps,
                )
                for matched, count in ((match, length), (0, other_length))
            )
            if others > worth:
                assert draft.lookup_tokens == second.last.lookup_tokens[:other] == tuple(draft.tokens.tolist())
                choices["second before first" if size else "second"] += 1
            elif size:
                assert draft.lookup_tokens == first.last.lookup_tokens[:size] == tuple(draft.tokens.tolist())
                choices["first"] += 1
                choices["cut" if size < length else "whole"] += 1
            else:
                assert not draft.tokens.shape[0]
                choices["declined"] += length > 0 or other_length > 0
            open_drafts += [(known, match, branches_of(first.last))] if length else []
            open_drafts += [(known, 0, branches_of(second.last))] if other_length else []
            accepted = run_along(branches_of(draft), text[known:])
            cascade.observe(Verdict(tuple(draft.tokens.tolist()), accepted, text[known + accepted], torch.tensor([0])))
            tokens, steps = 0.99 * tokens + accepted + 1, 0.99 * steps + costs[len(draft.tokens)]
            known += accepted + 1
    assert min(choices[which] for which in ("first", "cut", "whole")) > 5
    assert choices["declined"] > 5 if alone else min(choices["second"], choices["second before first"]) > 5


@pytest.mark.parametrize("price", [0.3, 0.45])
def test_a_model_is_asked_if_its_rounds_promise_more(price: float) -> None:
    """Every choice on some texts, against the means of its rounds, with those of earlier texts counted as sixteen."""
    source, text, costs = random.Random(2), list[int](), {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.3, 4: 1.4}
    first = ResultLog(build_drafter(SpeculativeConfig.from_dict(LOOKUP), target_of("llama")))
    second = ResultLog(ScriptedMember(text))
    cascade = PricedCascade([first, second], (1.1, 1.2, 1.3, 1.4), (0.0, price))
    reached: dict[tuple[int, int], list[int]] = {}
    # Tokens accepted and steps taken in rounds that the second was asked in, and two that are hoped for.
    before: list[tuple[float, float]] = [(1.0, 1.0)] * 2
    tokens = steps = 1.0
    choices = dict.fromkeys(("found", "found at less", "declined", "asked", "asked despite a lookup"), 0)
    for number in range(8):
        text[:] = source.choices(range(4), k=30)
        text += text[8:20]
        second.drafter.hit_rate = (0.9, 0.2)[number // 2 % 2]  # type: ignore[attr-defined]
        cascade.start(text[:8], None, None)  # type: ignore[arg-type]
        open_drafts: Open = []
        known, here = 9, list[tuple[float, float]]()
        while known < len(text) - 5:
            score(open_drafts, {}, text[:known], reached)
            first.last, second.last = Draft.empty(torch.device("cpu")), None  # type: ignore[assignment]
            draft = cascade.draft(Context(text[:known], torch.tensor(text[known - 1 : known])), 4)
            length, match = first.last.tokens.shape[0], first.last.match_length
            chances = [mean(reached.get((match, depth), []), 0.9**depth) for depth in range(1, length + 1)]
            _, found = _paying(chances, costs, tokens / steps)
            rounds = here + [tuple(map(statistics.fmean, zip(*before, strict=True)))] * min(len(before), 16)
            brought, took = map(statistics.fmean, zip(*rounds, strict=True))
            promise = (1 + brought) / took
            asked = second.last is not None
            assert asked == (promise > max(found, 1.0)) or promise == pytest.approx(max(found, 1.0))
            if asked and second.last.tokens.shape[0]:
                assert draft is second.last
            choices["asked" if asked else "found" if found else "declined"] += 1
            choices["asked despite a lookup"] += asked and found > 0
            choices["found at less"] += not asked and promise > 1
            open_drafts += [(known, match, branches_of(first.last))] if length else []
            accepted = run_along(branches_of(draft), text[known:])
            cascade.observe(Verdict(tuple(draft.tokens.tolist()), accepted, text[known + accepted], torch.tensor([0])))
            verifying, drafting = costs[draft.tokens.shape[0]], price * max(1, second.last.tokens.shape[0]) if asked else 0.0
            tokens, steps = 0.99 * tokens + accepted + 1, 0.99 * steps + verifying + drafting
            if asked:  # in vain at times: what is verified then is not its own
                here.append((accepted, drafting + verifying) if draft is second.last else (0, drafting + 1.0))
            known += accepted + 1
        before += here
        assert len(before) < 128
    assert min(choices.values()) > 4


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


def test_a_tree_that_does_not_pay_is_declined() -> None:
    target = target_of("llama")
    first = Member()
    first.proposes = False
    drafted = {}
    for cost in (1.0, 50.0):
        cascade = PricedCascade([first, copy.deepcopy(experienced_drafter(target))], (cost,))
        rounds = [decode(target, cascade, prompt, GREEDY, LENGTH).stats.rounds for prompt in PROMPTS * 2]
        drafted[cost] = sum(found.drafted > 0 for each in rounds for found in each)
    assert drafted[50.0] == 0 < drafted[1.0]


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
    silent = Member()
    silent.proposes = False
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
    silent = Member()
    silent.proposes = False
    near, between, far = (1.0, 1.0, 1.0, 1.0), (1.05, 1.6, 1.9, 2.2), (2.8, 2.9, 3.0, 3.1)
    middle = tuple(2 * half - one for half, one in zip(between, near, strict=True))
    costs = {100: near, 200: far} if context != 150 else {100: near, 200: middle}
    cascade = PricedCascade([silent, Trees()], tuple(costs.items()))
    text = [7] * context
    cascade.start(text, None, None)  # type: ignore[arg-type]
    assert cascade.draft(Context(text, torch.tensor([7])), 4).tokens.shape[0] == size


def test_a_member_is_tried_at_the_contexts_where_its_drafts_are_cheap() -> None:
    first, second = Member(), Member()
    first.proposes = False
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
    silent = Member()
    silent.proposes = False
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
