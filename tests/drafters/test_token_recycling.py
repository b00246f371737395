"""Drafting from recycled tokens: the contract, what is stored of a pass, and how a tree grows from it."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from layerskip.config import SpeculativeConfig
from layerskip.decoding.decode import Stops, decode
from layerskip.decoding.drafter import Drafter, VerifyOutput
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.verify import Verdict
from layerskip.drafters.registry import build_drafter
from layerskip.drafters.token_recycling import TokenRecycling
from layerskip.models.target import Target
from tests.drafters.contract import LENGTH, PROMPTS, contract
from tests.drafters.recorder import proposed


def _fresh(target: Target) -> Drafter:
    fields = {"method": "token_recycling", "tree_tokens": 6, "top_k": 2, "min_token_prob": 0.0}
    return build_drafter(SpeculativeConfig.from_dict(fields), target)


@functools.cache
def experienced_drafter(target: Target) -> Drafter:
    drafter = _fresh(target)
    for prompt in PROMPTS:
        known = [token % target.vocabulary for token in prompt]
        decode(target, drafter, known, Sampling(), LENGTH, stops=Stops(frozenset()))
    return drafter


# It has decoded before, so that it has something to draft.
TestTokenRecycling = contract(
    lambda target: copy.deepcopy(experienced_drafter(target)), trees=True, history_dependent=True, keeps_state=True
)


def _taught(tree_tokens: int = 9, minimum: float = 0.0) -> TokenRecycling:
    """Its table has the successors 1 (0.6) and 2 (0.4) of 0, 2 (1.0) of 1, and 0 (0.9) and 1 (0.1) of 2."""
    drafter = TokenRecycling(3, tree_tokens, 2, minimum)
    probs = torch.tensor([[0.0, 0.6, 0.4], [0.0, 0.0, 1.0], [0.9, 0.1, 0.0]])
    block = torch.tensor([0, 1, 2])
    (late,) = drafter.observe_logits(VerifyOutput(block, probs.log()))
    late.receive(Verdict((1, 2), 0, 0, block[:1]), late.values.tolist())
    return drafter


@pytest.mark.parametrize(
    ("size", "minimum", "depth", "tokens", "parents", "chances"),
    [
        # Branches by probability: 1 (0.6), then 1-2 (0.6), 1-2-0 (0.54), 2 (0.4), 2-0 (0.36), ...
        (5, 0.0, 3, [1, 2, 0, 2, 0], [-1, 0, 1, -1, 3], [0.6, 0.6, 0.54, 0.4, 0.36]),
        (9, 0.5, 3, [1, 2, 0], [-1, 0, 1], [0.6, 0.6, 0.54]),
        (9, 0.3, 1, [1, 2], [-1, -1], [0.6, 0.4]),
        (1, 0.0, 3, [1], [-1], [0.6]),
    ],
)
def test_the_likeliest_branch_grows_first(
    size: int, minimum: float, depth: int, tokens: list[int], parents: list[int], chances: list[float]
) -> None:
    draft = proposed(_taught(size, minimum), [0], depth)
    assert (list(draft.lookup_tokens), list(draft.path_probs)) == (tokens, pytest.approx(chances))
    assert [*draft.known_parents] == parents


def test_an_unseen_token_gives_an_empty_tree() -> None:
    assert not proposed(_taught(), [7], 3).lookup_tokens
