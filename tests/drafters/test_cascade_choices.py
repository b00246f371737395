"""Every choice of a cascade without costs, against what the text had shown of earlier drafts by then."""

from __future__ import annotations

import random

import pytest
import torch

from layerskip.config import SpeculativeConfig
from layerskip.decoding.drafter import Context
from layerskip.drafters.cascade import Cascade
from layerskip.drafters.registry import build_drafter
from tests.drafters.contract import target_of
from tests.drafters.members import LOOKUP, Open, ResultLog, ScriptedMember, mean, play, score
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
