"""Sampling: the distributions of transformers' logits processors, and draws that follow them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from layerskip.decoding.sampling import Chooser, Sampling, SamplingError, draw
from tests.chi_square import assert_follows
from tests.reference import processed_probs, processed_scores

V = 17
CPU = torch.device("cpu")

GRID = [
    Sampling(temperature, top_k, top_p, min_p, penalty)
    for temperature, top_k, top_p, min_p, penalty in itertools.product(
        (0.3, 1.0, 1.7), (0, 1, 5, V, 50), (1.0, 0.9, 0.4, 1e-9), (0.0, 0.05, 1.0), (1.0, 1.4, 0.7)
    )
]
PENALTIES = (1.3, 3.0, 0.5)

REFUSED: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", None), ("temperature", True), ("top_k", 2.5),
    ("top_k", float("inf")), ("top_p", 0.0), ("min_p", 1.5), ("repetition_penalty", 0.0),
]  # fmt: skip


def _logits(rows: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * spread


def _prefixes(rows: int) -> list[list[int]]:
    return [[(3 * row + step * step) % V for step in range(row + 2)] for row in range(rows)]


def _seen(prefixes: list[list[int]]) -> Tensor:
    return torch.stack([torch.isin(torch.arange(V), torch.tensor(prefix)) for prefix in prefixes])


@pytest.mark.parametrize("ties", [False, True])
def test_distributions_equal_those_of_transformers(ties: bool) -> None:
    """Ties are of bfloat16, which holds these values exactly."""
    logits = _logits(6).mul(2).round().div(2) if ties else _logits(6)
    prefixes = _prefixes(6)
    for sampling in GRID:
        expected = torch.stack([processed_probs(p, row, sampling) for p, row in zip(prefixes, logits, strict=True)])
        found = sampling.distribution(logits.bfloat16() if ties else logits, _seen(prefixes))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=lambda text, s=sampling: f"{s}: {text}")


def test_extreme_settings_give_their_limits() -> None:
    logits, seen = _logits(6, spread=20.0), _seen(_prefixes(6))
    for penalty in (5e-324, 1e300):
        found = Sampling(0.7, repetition_penalty=penalty).distribution(logits, seen)
        torch.testing.assert_close(found.sum(-1), torch.ones(6))
    logits[:, 4] = -float("inf")  # a token that may not be chosen
    for temperature in (5e-324, 1e-38):
        coldest = torch.nn.functional.one_hot(Sampling().distribution(logits), V).float()
        assert torch.equal(Sampling(temperature, top_p=0.9).distribution(logits), coldest)
    for temperature in (1e39, 1.7e308):
        hottest = torch.isfinite(logits) / (V - 1)
        torch.testing.assert_close(Sampling(temperature, min_p=0.05).distribution(logits), hottest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("fed", [1, 3])
def test_each_row_is_penalised_for_its_own_prefix(temperature: float, penalty: float, fed: int) -> None:
    """A block may have more tokens than there are logits; its first tokens then belong to every row's prefix."""
    sampling, rows = Sampling(temperature, repetition_penalty=penalty), 4
    sequence, block = [3, 5, 3, 9], torch.tensor([9, 4, 11, 5, 0, 16][: rows + fed - 1])
    chooser = Chooser(sampling, V, CPU)
    chooser.observe(sequence[:2])
    chooser.observe(sequence[2:])
    for seed in range(10):
        logits = _logits(rows, seed, spread=1.0)
        found = chooser.distribution(logits, block)
        for row in range(rows):
            prefix = [*sequence, *block[: fed + row].tolist()]
            if temperature == 0.0:
                assert int(found[row]) == int(processed_scores(prefix, logits[row], sampling).argmax())
            else:
                expected = processed_probs(prefix, logits[row], sampling)
                torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [7.0, 0.0, 2.0, 1e-3, 0.0, 1.0], [1e-30, 3e-30, 0.0], [4.0]])
def test_draws_follow_their_weights(weights: list[float]) -> None:
    rows = torch.tensor(weights).repeat(20_000, 1)
    draws = draw(rows, torch.Generator().manual_seed(1)).tolist()
    assert_follows(draws, {token: weight / sum(weights) for token, weight in enumerate(weights)})


def test_an_arrival_time_of_zero_cannot_draw_a_weight_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda times, **_: times.zero_())
    assert draw(torch.tensor([[0.0, 1e-20, 0.0], [0.0, 0.0, 1.0]])).tolist() == [1, 2]


def test_choosing_draws_from_rows_and_keeps_one_hot_tokens() -> None:
    probs = torch.tensor([0.25, 0.0, 0.75])
    chooser = Chooser(Sampling(1.0), 3, CPU, seed=3)
    assert_follows(chooser.choose(probs.repeat(5000, 1)).tolist(), dict(enumerate(probs.tolist())))
    assert chooser.choose(torch.tensor([2, 0, 1])).tolist() == [2, 0, 1]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=str)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    for build in (lambda fields: Sampling(**fields), Sampling.from_dict):
        with pytest.raises(SamplingError, match=f"^{name}: "):
            build({name: value})


def test_unknown_fields_are_refused_by_name() -> None:
    with pytest.raises(SamplingError, match="^typical_p: "):
        Sampling.from_dict({"temperature": 1.0, "typical_p": 0.9})


def test_a_penalty_without_the_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="^seen: "):
        Sampling(1.0, repetition_penalty=1.2).distribution(_logits(1))
