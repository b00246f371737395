"""Test of the agreement of EAGLE heads against decoding from every position."""

from __future__ import annotations

import pytest
import torch

from layerskip.config import StopRule
from layerskip.decoding.decode import decode
from layerskip.drafters.eagle import Eagle
from layerskip.heads.readout import Readout
from layerskip.texts.continuations import Continuation
from searches.bridges.program import first_token_agreement
from tests.drafters.contract import GREEDY, PROMPTS, target_of
from tests.drafters.heads import eagle_head

NEW = 16


@pytest.mark.parametrize("left_out", [None, 4])
def test_agreement_of_a_head_is_the_acceptance_of_decoding(left_out: int | None) -> None:
    """The head drafts its own tokens and those of the text so far."""
    target = target_of("llama")
    head = eagle_head("llama", False, None if left_out is None else target.vocabulary - left_out)

    def drafter() -> Eagle:
        return Eagle(head, target.model.get_input_embeddings(), Readout(target, head.tokens), 1, StopRule())

    continuations, accepted = [], []
    for place, prompt in enumerate(PROMPTS):
        tokens = decode(target, drafter(), prompt, GREEDY, NEW).tokens
        continuations.append(Continuation(str(place), "own", tuple(prompt), tuple(tokens), NEW))
        for start in range(continuations[-1].starts):
            if continuations[-1].limit(start) > 0:
                found = decode(target, drafter(), [*prompt, *tokens[:start]], GREEDY, 3)
                accepted.append(found.stats.rounds[0].accepted)
    assert 0 < sum(accepted) < len(accepted)
    with torch.inference_mode():
        assert first_token_agreement(head, target, continuations) == pytest.approx(sum(accepted) / len(accepted))
