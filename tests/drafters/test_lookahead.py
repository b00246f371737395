"""Lookahead decoding: the contract, and the pool against the target's tokens after each guess."""

from __future__ import annotations

import pytest
import torch

from layerskip.decoding.drafter import VerifyOutput
from layerskip.decoding.verify import Verdict
from layerskip.drafters.lookahead import Lookahead
from tests.drafters.contract import contract
from tests.drafters.recorder import branches_of, proposed, started

# It learns from the target's logits, within a prompt.
TestLookahead = contract(lambda target: Lookahead(2, 3, 2), trees=True, history_dependent=True, samples_by_default=False)


def _branches(drafter: Lookahead, tokens: list[int], limit: int) -> list[tuple[int, ...]]:
    return branches_of(proposed(drafter, tokens, limit))


def _observe(drafter: Lookahead, output: VerifyOutput) -> None:
    for late in drafter.observe_logits(output):
        late.receive(Verdict(tuple(output.block.tolist()[1:]), 0, 0, output.block[:1]), late.values.tolist())


def _pass_output(drafter: Lookahead, tokens: list[int], follows: dict[int, int]) -> VerifyOutput:
    """The output of a target that has a fixed next token for each token."""
    block = torch.cat((torch.tensor(tokens[-1:]), proposed(drafter, tokens, 99).tokens))
    return VerifyOutput(
        block, torch.nn.functional.one_hot(torch.tensor([follows[int(token)] for token in block]), 40).float()
    )


def test_columns_of_the_window_become_ngrams() -> None:
    drafter, context = started(Lookahead(2, 3, 2), 10, 11, 12, 13), [10, 11, 12, 13, 30]
    follows = {token: token + 1 for token in range(39)}
    # No n-gram begins with 30: the window alone, a chain of guesses from the prompt.
    assert _branches(drafter, context, 99) == [(10,), (10, 11), (10, 11, 12)]
    _observe(drafter, _pass_output(drafter, context, follows))
    rows = [(10,), (10, 11), (10, 11, 12), (10, 11), (10, 11, 12), (10, 11, 12, 13)]
    assert _branches(drafter, context, 99) == rows
    _observe(drafter, _pass_output(drafter, context, {token: token + 20 for token in range(13)} | {13: 33, 30: 0}))
    # The guesses 10, 11, 12; then the target's tokens after each of them, and after those.
    ngrams = {token: _branches(drafter, [token], 2) for token in (10, 11, 12, 13)}
    assert ngrams == {10: [(11,), (11, 31), (11, 12)], 11: [(12,), (12, 32), (12, 13)], 12: [(13,), (13, 33)], 13: []}


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_a_window_is_left_out_only_while_it_exceeds_the_limit(limit: int) -> None:
    drafter, context = started(Lookahead(2, 3, 2), 1, 2, 3, 1, 2), [1, 2, 3, 1, 2]
    branches = _branches(drafter, context, limit)
    assert ((1, 2, 3) in branches) == (limit >= 3)
    assert (3,) in branches and all(len(branch) <= limit for branch in branches)
    assert (1, 2, 3) in _branches(drafter, context, 99)


@pytest.mark.parametrize("verified", [(), (10,), (20, 21, 22)])
def test_a_pass_that_verified_another_draft_teaches_nothing(verified: tuple[int, ...]) -> None:
    """Drafts shorter than its own, and one of the same length."""
    drafter, context = started(Lookahead(2, 3, 2), 10, 11, 12, 13), [10, 11, 12, 13, 30]
    window = _branches(drafter, context, 99)
    block = torch.tensor([30, *verified])
    _observe(drafter, VerifyOutput(block, torch.nn.functional.one_hot(block, 40).float()))
    assert _branches(drafter, context, 99) == window
