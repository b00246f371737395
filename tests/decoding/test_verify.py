"""The rule of acceptance against its distribution, enumerated for a vocabulary of 3 and a draft of 2."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from layerskip.decoding.draft import Draft
from layerskip.decoding.verify import Verdict, verify
from tests.chi_square import assert_follows

V, K = 3, 2
ONE_BELOW = 1.0 - 2.0**-24  # the largest float32 under 1, hence the largest that torch.rand gives
Outcome = tuple[tuple[int, ...], int, int]  # drafted, accepted, next token


def _row(generator: torch.Generator, zeros: int) -> Tensor:
    row = torch.rand(V, generator=generator).add(0.05)
    row[torch.randperm(V, generator=generator)[:zeros]] = 0.0
    return row / row.sum()


def _case(seed: int) -> tuple[Tensor, Tensor]:
    """Returns p and q: with zeros in either, one-hot rows, and rows of q that equal those of p."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.stack([_row(generator, (seed // 2) % V) for _ in range(K + 1)])
    q = torch.stack([_row(generator, (seed // 3) % V) for _ in range(K)])
    if seed % 4 == 1:
        q[seed % K] = p[seed % K]
    if seed % 4 == 3:
        q = p[:K].clone()
    return p, q


def _law(p: list[list[float]], q: list[list[float]]) -> dict[Outcome, float]:
    """Algorithm 1 of arXiv 2211.17192, enumerated: accept with min(1, p / q), else draw from max(0, p - q)."""
    law: dict[Outcome, float] = defaultdict(float)
    for drafted in itertools.product(range(V), repeat=K):
        reached = math.prod(q[i][x] for i, x in enumerate(drafted))
        if reached == 0.0:
            continue
        for i, x in enumerate(drafted):
            accept = min(1.0, p[i][x] / q[i][x])
            residual = [max(0.0, p[i][y] - q[i][y]) for y in range(V)]
            for y in range(V):
                if accept < 1.0:
                    law[drafted, i, y] += reached * (1.0 - accept) * residual[y] / sum(residual)
            reached *= accept
        for y in range(V):
            law[drafted, K, y] += reached * p[K][y]
    return {outcome: probability for outcome, probability in law.items() if probability > 0.0}


def _simulate(p: Tensor, q: Tensor, deterministic: bool, times: int) -> list[Verdict]:
    generator = torch.Generator().manual_seed(0)
    # multinomial rather than our own draw, so that the drafts do not depend on the code under test.
    drafts = torch.stack([row.multinomial(times, True, generator=generator) for row in q], dim=1)
    probs = None if deterministic else q
    return [verify(Draft(tokens, probs=probs), p, generator) for tokens in drafts]


def _outcomes(verdicts: list[Verdict]) -> list[Outcome]:
    return [(verdict.drafted, verdict.accepted, verdict.next_token) for verdict in verdicts]


def _check_committed(verdicts: list[Verdict], p: list[list[float]]) -> None:
    """Check the lossless property: after any accepted tokens, the next one follows the target's own row."""
    committed = [(*verdict.drafted[: verdict.accepted], verdict.next_token) for verdict in verdicts]
    for position in range(K + 1):
        tokens = [tokens[position] for tokens in committed if len(tokens) > position]
        if tokens:
            assert_follows(tokens, dict(enumerate(p[position])))


@pytest.mark.parametrize("seed", range(12))
def test_outcomes_follow_the_enumerated_law(seed: int) -> None:
    p, q = _case(seed)
    verdicts = _simulate(p, q, deterministic=False, times=2500)
    assert_follows(_outcomes(verdicts), _law(p.double().tolist(), q.double().tolist()))
    _check_committed(verdicts, p.tolist())


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("drafted", [(0, 0), (0, 2), (2, 1)])
def test_a_deterministic_draft_equals_one_hot_rows(drafted: tuple[int, ...], deterministic: bool) -> None:
    p, _ = _case(4)
    q = torch.nn.functional.one_hot(torch.tensor(drafted), V).float()
    verdicts = _simulate(p, q, deterministic, times=2500)
    assert_follows(_outcomes(verdicts), _law(p.double().tolist(), q.double().tolist()))
    _check_committed(verdicts, p.tolist())


@pytest.mark.parametrize("rows", [False, True], ids=["tokens", "one-hot rows"])
def test_greedy_verification_compares_tokens(rows: bool) -> None:
    for target in itertools.product(range(V), repeat=K + 1):
        probs = torch.nn.functional.one_hot(torch.tensor(target), V).float() if rows else torch.tensor(target)
        for drafted in itertools.product(range(V), repeat=K):
            agreed = next((i for i in range(K) if drafted[i] != target[i]), K)
            verdict = verify(Draft(torch.tensor(drafted)), probs)
            assert _outcomes([verdict]) == [(drafted, agreed, target[agreed])]
            assert verdict.last.tolist() == [verdict.next_token]


@pytest.mark.parametrize("uniform", [0.0, ONE_BELOW])
def test_a_token_of_target_probability_zero_is_never_accepted(monkeypatch: pytest.MonkeyPatch, uniform: float) -> None:
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.full((size,), uniform))
    p = torch.tensor([[0.0, 0.5, 0.5]] * (K + 1))
    for q in (torch.tensor([[1.0, 0.0, 0.0]] * K), torch.tensor([[1e-30, 0.5, 0.5]] * K), None):
        verdict = verify(Draft(torch.zeros(K, dtype=torch.int64), probs=q), p)
        assert (verdict.accepted, verdict.next_token != 0) == (0, True)


def test_a_residual_that_rounds_to_nothing_draws_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """q is p rounded upwards: a rejection is all but impossible, and leaves nothing where p exceeds q."""
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.full((size,), ONE_BELOW))
    p = torch.tensor([0.5, 0.25, 0.25])
    q = p * (1.0 + 2.0**-22)
    draft, generator = Draft(torch.tensor([1]), probs=q[None]), torch.Generator().manual_seed(0)
    verdicts = [verify(draft, p.repeat(2, 1), generator) for _ in range(2000)]
    assert {verdict.accepted for verdict in verdicts} == {0}
    assert_follows([verdict.next_token for verdict in verdicts], dict(enumerate(p.tolist())))
