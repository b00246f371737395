"""Every choice of a cascade without costs, against what the text had shown of earlier drafts by then."""

from __future__ import annotations

import random

import pytest
import torch

from layerskip.config import SpeculativeConfig
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import Cascade
from layerskip.drafters.registry import build_drafter
from tests.drafters.contract import target_of, toy_target
from tests.drafters.members import LOOKUP, Open, ResultLog, ScriptedMember, mean, run_along, score
from tests.drafters.recorder import branches_of


@pytest.mark.parametrize("method", ["prompt_lookup", "retrieval"])
def test_a_lookup_is_provisional_if_a_later_member_has_more_accepted(method: str) -> None:
    """Every choice on some texts, against means of everything that the texts had shown of earlier drafts."""
    source, text = random.Random(1), list[int]()
    fields = {"method": method, "prompt_lookup_min": 2, "prompt_lookup_max": 3, "num_speculative_tokens": 4}
    first = ResultLog(build_drafter(SpeculativeConfig.from_dict(fields), target_of("llama")))
    second = ResultLog(ScriptedMember(text))
    cascade = Cascade([first, second])
    earned: dict[int, list[int]] = {}  # match length to the accepted tokens of all drafts, taken or not
    taken: list[int] = []  # what the second had accepted
    provisional = fallbacks = 0
    for _ in range(6):
        text[:] = source.choices(range(4), k=45)
        text += text[8:30]
        cascade.start(text[:8], None, None)  # type: ignore[arg-type]
        open_drafts: Open = []
        known = 9
        while known < len(text) - 5:
            score(open_drafts, earned, text[:known])
            second.last = Draft.empty(torch.device("cpu"))
            draft = cascade.draft(Context(text[:known], torch.tensor(text[known - 1 : known])), 4)
            match, other = first.last.match_length, second.last.tokens.shape[0] > 0
            assert (match > 0) == (first.last.tokens.shape[0] > 0)
            if match:
                open_drafts.append((known, match, branches_of(first.last)))
            outdone = match > 0 and mean(earned.get(match, []), 8) < mean(taken, 1)
            if other and (outdone or not match):
                assert draft is second.last
            elif match:
                assert draft is first.last
            else:
                assert not draft.tokens.shape[0]
            provisional, fallbacks = provisional + outdone, fallbacks + (outdone and not other)
            accepted = run_along(branches_of(draft), text[known:])
            if draft is second.last:
                taken.append(accepted)
            cascade.observe(Verdict(tuple(draft.tokens.tolist()), accepted, text[known + accepted], torch.tensor([0])))
            known += accepted + 1
    assert provisional > 5
    assert fallbacks
    cascade.reset_state()
    cascade.start(text, None, None)  # type: ignore[arg-type]
    assert cascade.draft(Context(text, torch.tensor(text[-1:])), 4) is first.last  # the order is trusted again


def test_a_member_that_runs_a_model_does_not_outdo_a_lookup() -> None:
    """However high its acceptance, its passes cost time. It drafts if the lookup finds nothing."""

    class RunsModel(ResultLog):
        runs_model = True

    text = random.Random(1).choices(range(4), k=300)
    lookup = build_drafter(SpeculativeConfig.from_dict(LOOKUP | {"prompt_lookup_max": 2}), target_of("llama"))
    asked = {}
    for method in (ResultLog, RunsModel):
        second = method(ScriptedMember(text))
        cascade = Cascade([first := ResultLog(lookup), second])
        cascade.start(text[:1], None, None)  # type: ignore[arg-type]
        asked[method] = 0
        for known in range(2, 290):
            second.last = Draft.empty(torch.device("cpu"))
            draft = cascade.draft(Context(text[:known], torch.tensor(text[known - 1 : known])), 4)
            asked[method] += first.last.match_length > 0 and draft is second.last
            accepted = run_along(branches_of(draft), text[known:])
            cascade.observe(Verdict(tuple(draft.tokens.tolist()), accepted, text[known + accepted], torch.tensor([0])))
    assert asked[ResultLog] > 10
    assert asked[RunsModel] == 0


def test_the_more_promising_of_two_lookups_is_taken() -> None:
    """Three tokens repeat. The first member copies one of them; the second, once it has made a lookup draft, copies six."""
    fields = {"method": "prompt_lookup", "prompt_lookup_max": 3}
    first, second = (
        ResultLog(
            build_drafter(
                SpeculativeConfig.from_dict(fields | {"prompt_lookup_min": minimum, "num_speculative_tokens": length}),
                toy_target(),
            )
        )
        for minimum, length in ((2, 1), (1, 6))
    )
    cascade, text, chosen = Cascade([first, second]), [1, 2, 3] * 40, []
    known = 4
    cascade.start(text[:known], None, None)  # type: ignore[arg-type]
    while known < 100:
        second.last = Draft.empty(torch.device("cpu"))
        draft = cascade.draft(Context(text[:known], torch.tensor(text[known - 1 : known])), 6)
        chosen.append((draft is second.last, first.last.tokens.shape[0], second.last.tokens.shape[0]))
        accepted = run_along(branches_of(draft), text[known:])
        cascade.observe(Verdict(draft.lookup_tokens, accepted, text[known + accepted], torch.tensor([0])))
        known += accepted + 1
    assert chosen[0] == (True, 0, 6)  # of four tokens no two come before
    assert chosen[1] == (False, 1, 6)  # both look up; little is known, and the order is trusted
    assert chosen[-1] == (True, 1, 6)
    turn = [second for second, *_ in chosen[1:]]
    assert turn == sorted(turn)
    cascade.reset_state()
    cascade.start(text[:9], None, None)  # type: ignore[arg-type]
    assert cascade.draft(Context(text[:9], torch.tensor(text[8:9])), 6) is first.last
