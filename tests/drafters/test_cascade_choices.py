"""Every choice of a cascade with or without costs, against what the text had shown of earlier drafts by then."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from layerskip.config import Costs, SpeculativeConfig
from layerskip.decoding.drafter import Context, Drafter
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import Cascade, PricedCascade
from layerskip.drafters.registry import build_drafter
from tests.drafters.contract import target_of
from tests.drafters.members import LOOKUP, Member, Open, ResultLog, ScriptedMember, Trees, mean, play, run_along, score
from tests.drafters.recorder import branches_of


def _lookup(**fields: object) -> ResultLog:
    return ResultLog(build_drafter(SpeculativeConfig.from_dict(LOOKUP | fields), target_of("llama")))


def _ask_again(cascade: Cascade, text: list[int]) -> object:
    """Returns the draft of a cascade whose evidence was dropped."""
    cascade.reset_state()
    cascade.start(text, None, None)  # type: ignore[arg-type]
    return cascade.draft(Context(text, torch.tensor(text[-1:])), 4)


@pytest.mark.parametrize("method", ["prompt_lookup", "retrieval"])
def test_a_lookup_is_provisional_if_a_later_member_has_more_accepted(method: str) -> None:
    """Every choice on some texts, against means of everything that the texts had shown of earlier drafts."""
    source, text = random.Random(1), list[int]()
    first, second = _lookup(method=method), ResultLog(ScriptedMember(text))
    cascade = Cascade([first, second])
    earned: dict[int, list[int]] = {}  # match length to the accepted tokens of all drafts, taken or not
    taken: list[int] = []  # what the second had accepted
    provisional = fallbacks = 0
    for _ in range(6):
        text[:] = source.choices(range(4), k=45)
        text += text[8:30]
        cascade.start(text[:8], None, None)  # type: ignore[arg-type]
        open_drafts: Open = []
        for known, draft, accepted in play(cascade, (first, second), text, 9, len(text) - 5):
            score(open_drafts, earned, text[:known])
            assert first.last is not None
            match, other = first.last.match_length, second.last is not None and len(second.last.tokens) > 0
            if match:
                open_drafts.append((known, match, branches_of(first.last)))
            outdone = match > 0 and mean(earned.get(match, []), 8) < mean(taken, 1)
            if other and (outdone or not match):
                assert draft is second.last
                taken.append(accepted)
            elif match:
                assert draft is first.last
            else:
                assert not draft.tokens.shape[0]
            provisional, fallbacks = provisional + outdone, fallbacks + (outdone and not other)
    assert provisional > 5
    assert fallbacks
    assert _ask_again(cascade, text) is first.last  # the order is trusted again


def test_a_member_that_runs_a_model_does_not_outdo_a_lookup() -> None:
    """However high its acceptance, its passes cost time. It drafts if the lookup finds nothing."""
    text, asked = random.Random(1).choices(range(4), k=900), {}
    for runs_model in (False, True):
        second = ResultLog(ScriptedMember(text))
        second.runs_model = runs_model
        cascade = Cascade([first := _lookup(prompt_lookup_max=2), second])
        cascade.start(text[:1], None, None)  # type: ignore[arg-type]
        rounds = play(cascade, (first, second), text, 2, 890)
        asked[runs_model] = sum(first.last.match_length > 0 and draft is second.last for _, draft, _ in rounds)
    assert asked[False] > 10
    assert asked[True] == 0


def test_the_more_promising_of_two_lookups_is_taken() -> None:
    """Three tokens repeat. The first member copies one of them; the second, once it has made a lookup draft, copies six."""
    first = _lookup(num_speculative_tokens=1)
    second = _lookup(num_speculative_tokens=6, prompt_lookup_min=1)
    cascade, text = Cascade([first, second]), [1, 2, 3] * 40
    cascade.start(text[:4], None, None)  # type: ignore[arg-type]
    chosen = [draft is second.last for _, draft, _ in play(cascade, (first, second), text, 4, 100, limit=6)]
    assert chosen[0]  # of four tokens no two come before
    assert not chosen[1]  # both look up; little is known, and the order is trusted
    assert chosen[-1]
    assert chosen[1:] == sorted(chosen[1:])
    assert _ask_again(cascade, text[:9]) is first.last


SILENT = Member(proposes=False)
SILENT.lookup = True


def _asked(cascade: PricedCascade, members: Sequence[ResultLog], begin: int, end: int) -> list[list[int]]:
    """Returns at which lengths of a text of zeros each member was asked."""
    asked: list[list[int]] = [[] for _ in members]
    for known, *_ in play(cascade, members, [0] * (end + 9), begin, end):
        for member, places in zip(members, asked, strict=True):
            places += [known] if member.last is not None else []
    return asked


def _started(members: Sequence[Drafter], *costs: Costs, context: int = 1) -> PricedCascade:
    """Returns a cascade at the beginning of a text."""
    cascade = PricedCascade(members, *costs)
    cascade.start([0] * context, None, None)  # type: ignore[arg-type]
    return cascade


def test_a_long_declined_member_is_asked_again_and_taken_once_it_pays() -> None:
    second = ResultLog(script := ScriptedMember([0] * 3000))
    script.hit_rate = 0.0
    cascade = _started([SILENT, second], (1.1, 1.2), (0.0, 0.3))
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


@pytest.mark.parametrize(
    ("costs", "single_pass", "pays"),
    [
        ((0.0, 0.95), False, True),
        ((0.0, 1.0), False, False),
        ((0.0, 2.5), False, False),
        ((0.0, 2.5), True, True),
        (((1, (0.0, 2.5)), (200, (0.0, 0.1))), False, True),  # in longer texts
    ],
)
def test_a_member_that_can_never_pay_is_never_asked(costs: Costs, single_pass: bool, pays: bool) -> None:
    """Each token of a chain costs a step then, however right it is. A tree drafted in one pass costs one step only."""
    second = ResultLog(ScriptedMember([0] * 3000))
    second.single_pass = single_pass
    (asked,) = _asked(_started([SILENT, second], (1.0, 1.0), costs), [second], 1, 600)
    assert bool(asked) == pays


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
    cascade, found = _started([SILENT, Trees()], costs), []
    for text in ([7, 7], [7, 7, 7]):
        draft = cascade.draft(Context(text, torch.tensor(text[-1:])), 4)
        found.append(draft.tokens.shape[0])
        assert draft.parents == ((-1, 0, -1, 2)[: found[-1]] if found[-1] > 2 else None)
        cascade.observe(Verdict(draft.lookup_tokens, 0, 7, torch.tensor([7])))
    assert found == sizes


@pytest.mark.parametrize(("context", "size"), [(1, 4), (150, 1), (300, 0)])
def test_costs_are_those_at_the_context_of_the_text(context: int, size: int) -> None:
    """Between two contexts half of each counts, and outside of them the nearest."""
    costs = (100, (1.0, 1.0, 1.0, 1.0)), (200, (2.0, 4.4, 5.0, 5.6))
    cascade = _started([SILENT, Trees()], costs, context=context)
    assert cascade.draft(Context([0] * context, torch.tensor([0])), 4).tokens.shape[0] == size


def test_tokens_cut_from_a_tree_are_scored_too() -> None:
    """The text takes the second branch again and again, of which nothing is verified at first."""
    cascade, text, sizes = _started([SILENT, Trees()], (1.05, 1.6, 1.9, 2.2)), [7], []
    for _ in range(12):
        draft = cascade.draft(Context(text, torch.tensor(text[-1:])), 4)
        sizes.append(draft.tokens.shape[0])
        following = [3, 4, 7]
        cascade.observe(Verdict(draft.lookup_tokens, run_along(branches_of(draft), following), 7, torch.tensor([7])))
        text += following
    assert (sizes[0], sizes[-1]) == (1, 4)
