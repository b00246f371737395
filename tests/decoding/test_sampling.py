"""Sampling: the distributions of transformers' logits processors, and draws that follow them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from layerskip.decoding.sampling import Chooser, Sampling, SamplingError, draw
from tests.chi_square import assert_follows
from tests.processors import processed_probs, processed_scores

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
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "1"),
    ("temperature", None), ("temperature", True), ("top_k", -1), ("top_k", 2.5), ("top_k", float("nan")),
    ("top_k", float("inf")), ("top_p", 0.0), ("top_p", 1.01), ("top_p", -1), ("min_p", -0.01), ("min_p", 1.5),
    ("repetition_penalty", 0.0), ("repetition_penalty", -2.0), ("repetition_penalty", float("inf")),
]  # fmt: skip


def _logits(rows: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * spread


def _prefixes(rows: int) -> list[list[int]]:
    return [[(3 * row + step * step) % V for step in range(row + 2)] for row in range(rows)]


def _seen(prefixes: list[list[int]]) -> Tensor:
    return torch.stack([torch.isin(torch.arange(V), torch.tensor(prefix)) for prefix in prefixes])


@pytest.mark.parametrize("ties", [False, True])
def test_distributions_equal_those_of_transformers(ties: bool) -> None:
    logits = _logits(6).mul(2).round().div(2) if ties else _logits(6)
    prefixes = _prefixes(6)
    for sampling in GRID:
        expected = torch.stack([processed_probs(p, row, sampling) for p, row in zip(prefixes, logits, strict=True)])
        found = sampling.distribution(logits, _seen(prefixes))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=lambda text, s=sampling: f"{s}: {text}")


def test_half_precision_logits_are_warped_in_float32() -> None:
    logits, sampling = _logits(3).bfloat16(), Sampling(0.7, top_p=0.9)
    expected = torch.stack([processed_probs([1], row, sampling) for row in logits])
    found = sampling.distribution(logits)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.05}, {"repetition_penalty": 1.4}], ids=str
)
def test_extreme_temperatures_give_their_limits(filters: dict[str, Any]) -> None:
    logits, prefixes = _logits(6, spread=20.0), _prefixes(6)
    logits[:, 4] = -float("inf")  # a token that may not be chosen
    seen = _seen(prefixes)
    coldest = Sampling(0.0, **filters).distribution(logits, seen)
    for temperature in (5e-324, 1e-45, 1e-38, 1e-30):
        found = Sampling(temperature, **filters).distribution(logits, seen)
        assert torch.equal(found, torch.nn.functional.one_hot(coldest, V).float())
    for temperature in (1e30, 1e38, 1e39, 1.7e308):
        found = Sampling(temperature, **filters).distribution(logits, seen)
        kept = found > 0
        assert not kept[:, 4].any()
        torch.testing.assert_close(found, kept / kept.sum(-1, keepdim=True), rtol=1e-6, atol=0)
        if not filters.keys() & {"top_k", "top_p"}:
            assert kept.sum(-1).tolist() == [V - 1] * 6


@pytest.mark.parametrize("penalty", [5e-324, 1e-46, 1e-38, 1e38, 1e300])
def test_extreme_penalties_give_distributions(penalty: float) -> None:
    logits, prefixes = _logits(6, spread=20.0), _prefixes(6)
    found = Sampling(0.7, repetition_penalty=penalty).distribution(logits, _seen(prefixes))
    torch.testing.assert_close(found.sum(-1), torch.ones(6))
    for row, prefix, raw in zip(found, prefixes, logits, strict=True):
        likeliest = int(row.argmax())
        if penalty < 1 and raw[prefix].max() > 0:
            assert likeliest in prefix
        if penalty > 1 and set(range(V)) - {*prefix}:
            assert raw[prefix].max() > 0 or likeliest not in prefix


@pytest.mark.parametrize("penalty", [1.0, *PENALTIES])
def test_greedy_takes_the_most_likely_token_after_the_penalty(penalty: float) -> None:
    logits, prefixes = _logits(40, spread=1.0), _prefixes(40)
    # Filters must not matter to greedy decoding.
    sampling = Sampling(0.0, top_k=3, top_p=0.5, min_p=0.2, repetition_penalty=penalty)
    expected = [int(processed_scores(p, row, sampling).argmax()) for p, row in zip(prefixes, logits, strict=True)]
    found = sampling.distribution(logits, _seen(prefixes))
    assert found.dtype == torch.int64
    assert found.tolist() == expected
    assert (expected == logits.argmax(-1).tolist()) == (penalty == 1.0)


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
