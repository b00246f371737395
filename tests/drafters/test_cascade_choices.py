"""Whose draft does a cascade take? Every choice, against what the text had told of earlier drafts by then."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch

from layerskip.cache import KVCache
from layerskip.config import SpeculativeConfig
from layerskip.decode import decode
from layerskip.draft import Draft
from layerskip.drafters.base import Context, Drafter
from layerskip.drafters.build import build_drafter
from layerskip.drafters.cascade import Cascade
from layerskip.drafters.stopping import Stopped
from layerskip.sampling import Chooser
from layerskip.tree import path_to
from layerskip.verify import Verdict
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, target_of, toy_target
from tests.drafters.test_cascade import LOOKUP, Member
from tests.drafters.test_token_recycling import experienced

Open = list[tuple[int, int, list[list[int]]]]
"""Drafts that the text has not caught up with: where they begin, behind a match of how many tokens, and their branches."""


class Told(Member):
    """Drafts the next tokens of a text, of which some are wrong, where it is in the mood to."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__()
        self.text, self.mood = text, random.Random(3)

    def draft(self, context: Context, limit: int) -> Draft:
        said = [token if self.mood.random() < 0.7 else 9 for token in self.text[len(context.tokens) :][:2]]
        return Draft(torch.tensor(said if self.mood.random() < 0.9 else [], dtype=torch.int64))


class Kept(Member):
    """Another drafter, and its last draft."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter, self.tree_tokens = drafter, drafter.tree_tokens
        self.last = Draft.empty(torch.device("cpu"))

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self.drafter.start(prompt, cache, chooser)

    def draft(self, context: Context, limit: int) -> Draft:
        self.last = self.drafter.draft(context, limit)
        return self.last


def _branches(draft: Draft) -> list[list[int]]:
    tokens = draft.tokens.tolist()
    parents = draft.parents or range(-1, len(tokens) - 1)
    return [[tokens[at] for at in path_to(node, parents)] for node in range(len(tokens))]


def _run(branches: list[list[int]], text: Sequence[int]) -> int:
    """The most tokens of a text that one of the branches has."""
    return max((len(branch) for branch in branches if list(text[: len(branch)]) == branch), default=0)


def _score(
    open_drafts: Open, earned: dict[int, list[int]], text: Sequence[int], reached: dict[tuple[int, int], list[int]]
) -> None:
    """Add what open drafts have earned, as far as the text tells, and whether as much as each depth; close those."""
    for begin, match, branches in list(open_drafts):
        run, whole = _run(branches, text[begin:]), max(map(len, branches))
        if begin + run < len(text) or run == whole:
            earned.setdefault(match, []).append(run)
            for depth in range(1, whole + 1):
                reached.setdefault((match, depth), []).append(run >= depth)
            open_drafts.remove((begin, match, branches))


def _mean(values: list[int], hope: float = 0) -> float:
    """Of the values and one more."""
    assert len(values) <= 128  # of more, the first ones would fade
    return (sum(values) + hope) / (len(values) + 1)


@pytest.mark.parametrize("kind", ["prompt_lookup", "retrieval"])
def test_who_has_less_accepted_than_those_behind_waits(kind: str) -> None:
    """Every choice on some texts, against the means of all that the texts had told of earlier drafts by then."""
    source, text = random.Random(1), list[int]()
    fields = {"kind": kind, "ngram_min": 2, "ngram_max": 3, "draft_length": 4}
    first = Kept(build_drafter(SpeculativeConfig.from_dict(fields), target_of("llama")))
    second = Kept(Told(text))
    cascade = Cascade([first, second])
    earned: dict[int, list[int]] = {}  # behind matches of each length: what drafts had accepted, taken or not
    taken: list[int] = []  # what the second had accepted
    waits = fallbacks = 0
    for _ in range(6):
        text[:] = source.choices(range(4), k=45)
        text += text[8:30]
        cascade.start(text[:8], None, None)  # type: ignore[arg-type]
        open_drafts: Open = []
        known = 9
        while known < len(text) - 5:
            _score(open_drafts, earned, text[:known], {})
            second.last = Draft.empty(torch.device("cpu"))
            draft = cascade.draft(Context(text[:known], torch.tensor(text[known - 1 : known])), 4)
            match, other = first.last.match, second.last.tokens.shape[0] > 0
            assert (match > 0) == (first.last.tokens.shape[0] > 0)
            if match:
                open_drafts.append((known, match, _branches(first.last)))
            behind = match > 0 and _mean(earned.get(match, []), 8) < _mean(taken, 1)
            if other and (behind or not match):
                assert draft is second.last
            elif match:
                assert draft is first.last
            else:
                assert not draft.tokens.shape[0]
            waits, fallbacks = waits + behind, fallbacks + (behind and not other)
            accepted = _run(_branches(draft), text[known:])
            if draft is second.last:
                taken.append(accepted)
            cascade.observe(Verdict(tuple(draft.tokens.tolist()), accepted, text[known + accepted], torch.tensor([0])))
            known += accepted + 1
    assert waits > 5
    assert fallbacks
    cascade.forget()
    cascade.start(text, None, None)  # type: ignore[arg-type]
    assert cascade.draft(Context(text, torch.tensor(text[-1:])), 4) is first.last  # the order is trusted again


class Mistaken(Member):
    """Looks up what is never said."""

    match = 9

    def draft(self, context: Context, limit: int) -> Draft:
        return Draft(torch.tensor([9]), match=self.match, found=(9,))


def test_what_long_matches_earn_is_known_of_longer_ones() -> None:
    first, second, text = Mistaken(), Kept(Told([0] * 90)), [0] * 90
    cascade = Cascade([first, second])
    cascade.start(text[:4], None, None)  # type: ignore[arg-type]
    known, waited = 4, 0
    while waited < 5:
        draft = cascade.draft(Context(text[:known], torch.tensor([0])), 2)
        accepted = _run(_branches(draft), text[known:])
        waited += draft is second.last and accepted > 0
        cascade.observe(Verdict(tuple(draft.tokens.tolist()), accepted, 0, torch.tensor([0])))
        known += accepted + 1
    first.match, taken = 40, 0
    for end in range(known, known + 5):
        draft = cascade.draft(Context(text[:end], torch.tensor([0])), 2)
        taken += draft.match > 0
        assert (draft.match > 0) == (not second.last.tokens.shape[0])
    assert taken < 5


class ToldForNothing(Told):
    """The same, and who passes it over has lost nothing."""

    def draft(self, context: Context, limit: int) -> Draft:
        said = super().draft(context, limit).tokens.tolist()
        return Draft.of_tree(said, range(-1, len(said) - 1), context.last.device, found=True)


@pytest.mark.parametrize("alone", [True, False])
def test_of_drafts_that_are_found_as_much_is_taken_as_pays(alone: bool) -> None:
    """Every choice on some texts, against how often all that they had told of by then, taken or not, had been right."""
    source, text, costs = random.Random(1), list[int](), {0: 1.0, 1: 1.3, 2: 1.3, 3: 1.8, 4: 2.05}
    fields = {"kind": "prompt_lookup", "ngram_min": 1, "ngram_max": 3, "draft_length": 4}
    first = Kept(build_drafter(SpeculativeConfig.from_dict(fields), target_of("llama")))
    second = Kept(ToldForNothing([] if alone else text))
    cascade = Cascade([first, second], (costs[1], costs[2], costs[3]))  # beyond which they go on straight
    reached: dict[tuple[int, int], list[int]] = {}  # behind matches of each length, 0 by the second: whether each depth was
    tokens = steps = 1.0
    choices = dict.fromkeys(("first", "second", "second before first", "declined", "cut", "whole"), 0)

    def paying(match: int, length: int) -> tuple[int, float]:
        accepted = [0.0]
        for depth in range(1, length + 1):
            accepted.append(accepted[-1] + _mean(reached.get((match, depth), []), 0.9**depth))
        gains = [found - tokens / steps * (costs[size] - 1) for size, found in enumerate(accepted)]
        size = gains.index(max(gains))
        return size, (1 + accepted[size]) / costs[size] if size else 0.0

    for _ in range(8):
        text[:] = source.choices(range(4), k=30)
        text += text[8:20]
        cascade.start(text[:8], None, None)  # type: ignore[arg-type]
        open_drafts: Open = []
        known = 9
        while known < len(text) - 5:
            _score(open_drafts, {}, text[:known], reached)
            first.last = second.last = Draft.empty(torch.device("cpu"))
            draft = cascade.draft(Context(text[:known], torch.tensor(text[known - 1 : known])), 4)
            (length, beside), match = (each.last.tokens.shape[0] for each in (first, second)), first.last.match
            (size, worth), (other, others) = paying(match, length), paying(0, beside)
            if others > worth:
                assert draft.found == second.last.found[:other] == tuple(draft.tokens.tolist())
                choices["second before first" if size else "second"] += 1
            elif size:
                assert draft.found == first.last.found[:size] == tuple(draft.tokens.tolist())
                choices["first"] += 1
                choices["cut" if size < length else "whole"] += 1
            else:
                assert not draft.tokens.shape[0]
                choices["declined"] += length > 0 or beside > 0
            open_drafts += [(known, match, _branches(first.last))] if length else []
            open_drafts += [(known, 0, _branches(second.last))] if beside else []
            accepted = _run(_branches(draft), text[known:])
            cascade.observe(Verdict(tuple(draft.tokens.tolist()), accepted, text[known + accepted], torch.tensor([0])))
            tokens, steps = 0.99 * tokens + accepted + 1, 0.99 * steps + costs[len(draft.tokens)]
            known += accepted + 1
    assert min(choices[which] for which in ("first", "declined", "cut", "whole")) > 5
    assert alone or min(choices["second"], choices["second before first"]) > 5


def test_a_tree_that_does_not_pay_is_declined() -> None:
    target = target_of("llama")
    first = Member()
    first.proposes = False
    drafted = {}
    for cost in (1.0, 50.0):
        cascade = Cascade([first, copy.deepcopy(experienced(target))], (cost,))
        rounds = [decode(target, cascade, prompt, GREEDY, LENGTH).stats.rounds for prompt in PROMPTS * 2]
        drafted[cost] = sum(found.drafted > 0 for each in rounds for found in each)
    assert drafted[50.0] == 0 < drafted[1.0]


def test_who_runs_a_model_does_not_outdo_what_is_looked_up() -> None:
    """However much of its drafts is accepted: its passes are paid for. It drafts where nothing is found."""

    class Dear(Kept, Stopped):
        pass

    text = random.Random(1).choices(range(4), k=300)
    lookup = build_drafter(SpeculativeConfig.from_dict(LOOKUP | {"ngram_max": 2}), target_of("llama"))
    asked = {}
    for kind in (Kept, Dear):
        second = kind(Told(text))
        cascade = Cascade([first := Kept(lookup), second])
        cascade.start(text[:1], None, None)  # type: ignore[arg-type]
        asked[kind] = 0
        for known in range(2, 290):
            second.last = Draft.empty(torch.device("cpu"))
            draft = cascade.draft(Context(text[:known], torch.tensor(text[known - 1 : known])), 4)
            asked[kind] += first.last.match > 0 and draft is second.last
            accepted = _run(_branches(draft), text[known:])
            cascade.observe(Verdict(tuple(draft.tokens.tolist()), accepted, text[known + accepted], torch.tensor([0])))
    assert asked[Kept] > 10
    assert asked[Dear] == 0


def test_of_what_is_looked_up_the_more_promising_is_taken() -> None:
    """Three tokens repeat themselves: the first copies one of them, the second, once it was seen to look up, six."""
    fields = {"kind": "prompt_lookup", "ngram_max": 3}
    first, second = (
        Kept(build_drafter(SpeculativeConfig.from_dict(fields | {"ngram_min": least, "draft_length": length}), toy_target()))
        for least, length in ((2, 1), (1, 6))
    )
    cascade, text, chosen = Cascade([first, second]), [1, 2, 3] * 40, []
    known = 4
    cascade.start(text[:known], None, None)  # type: ignore[arg-type]
    while known < 100:
        second.last = Draft.empty(torch.device("cpu"))
        draft = cascade.draft(Context(text[:known], torch.tensor(text[known - 1 : known])), 6)
        chosen.append((draft is second.last, first.last.tokens.shape[0], second.last.tokens.shape[0]))
        accepted = _run(_branches(draft), text[known:])
        cascade.observe(Verdict(draft.found, accepted, text[known + accepted], torch.tensor([0])))
        known += accepted + 1
    assert chosen[0] == (True, 0, 6)  # of four tokens no two come before
    assert chosen[1] == (False, 1, 6)  # both look up; little is known, and the order is trusted
    assert chosen[-1] == (True, 1, 6)
    turn = [second for second, *_ in chosen[1:]]
    assert turn == sorted(turn)
    cascade.forget()
    cascade.start(text[:9], None, None)  # type: ignore[arg-type]
    assert cascade.draft(Context(text[:9], torch.tensor(text[8:9])), 6) is first.last


class Trees(Member):
    """Drafts the same tree ever again: two branches of two tokens, of which it thinks the first likelier."""

    def draft(self, context: Context, limit: int) -> Draft:
        return Draft.of_tree([1, 2, 3, 4], [-1, 0, -1, 2], context.last.device, found=True, chances=[0.6, 0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    ("costs", "sizes"),
    [
        ((1.0, 1.0, 1.0, 1.0), [4, 4]),
        ((1.05, 1.6, 1.9, 2.2), [1, 1]),  # of one token 0.6 are accepted, of two 1.1, of three 1.4
        ((1.0, 1.0, 1.3, 1.4), [4, 2]),  # half as many of each, once none was
        ((1.8, 1.9, 2.0, 2.1), [4, 4]),  # by then the usual pace is as slow
        ((2.8, 2.9, 3.0, 3.1), [0, 0]),
    ],
)
def test_of_a_tree_as_many_tokens_are_verified_as_pay(costs: tuple[float, ...], sizes: list[int]) -> None:
    """The second time, it is known that the text went elsewhere."""
    silent = Member()
    silent.proposes = False
    cascade, found = Cascade([silent, Trees()], costs), []
    cascade.start([7], None, None)  # type: ignore[arg-type]
    for text in ([7, 7], [7, 7, 7]):
        draft = cascade.draft(Context(text, torch.tensor(text[-1:])), 4)
        found.append(draft.tokens.shape[0])
        assert draft.parents == ((-1, 0, -1, 2)[: found[-1]] if found[-1] > 2 else None)
        cascade.observe(Verdict(draft.found, 0, 7, torch.tensor([7])))
    assert found == sizes


def test_what_was_left_out_of_a_tree_is_learnt_from_too() -> None:
    """The text takes the second branch again and again, of which at first nothing is verified."""
    silent = Member()
    silent.proposes = False
    cascade, text, sizes = Cascade([silent, Trees()], (1.05, 1.6, 1.9, 2.2)), [7], []
    cascade.start(text, None, None)  # type: ignore[arg-type]
    for _ in range(12):
        draft = cascade.draft(Context(text, torch.tensor(text[-1:])), 4)
        sizes.append(draft.tokens.shape[0])
        said = [3, 4, 7]
        cascade.observe(Verdict(draft.found, _run(_branches(draft), said), 7, torch.tensor([7])))
        text += said
    assert sizes[0] == 1
    assert sizes[-1] == 4
    cascade.forget()
    cascade.start(text, None, None)  # type: ignore[arg-type]
    assert cascade.draft(Context(text, torch.tensor(text[-1:])), 4).tokens.shape[0] == 1


def test_the_beginning_of_a_tree_may_be_a_chain() -> None:
    tree = Trees().draft(Context([7], torch.tensor([7])), 4)
    assert tree.first(4) is tree
    for size, parents in ((1, None), (2, None), (3, (-1, 0, -1))):
        cut = tree.first(size)
        assert (cut.tokens.tolist(), cut.parents) == ([1, 2, 3][:size], parents)
        assert (cut.found, cut.chances) == ((1, 2, 3)[:size], (0.6, 0.5, 0.3)[:size])
