"""Tests of the finals between empty and bridged skips, on a bench with known speedups."""

from __future__ import annotations

from typing import Any

import pytest

from layerskip import SpeculativeConfig
from searches.bridges.finals import BridgeFinals, choose_finalists, measure_finalists
from searches.study.finals import Finals
from searches.study.objective import MeasureSettings
from tests.searches.known import PROMPTS, Known


def _point(mask: str, predicted: float, bridge: str = "empty", helps: bool = True) -> dict[str, Any]:
    fields: dict[str, Any] = {"method": "layer_skip", "mask": mask, "num_speculative_tokens": 2}
    fields |= {} if bridge == "empty" else {"bridge": f"/somewhere/{mask}-{bridge}"}
    return {"mask": mask, "bridge": bridge, "predicted": predicted, "fit": {"helps": helps}, "config": fields}


POINTS = [
    _point("mlp:3", 1.02),
    _point("layers:1-2", 0.9),
    _point("layers:1-2", 1.1, "linear"),
    _point("layers:1-2", 1.2, "trained"),
    _point("layers:1-3", 1.5, "mean", helps=False),
]


def _measured(speedups: dict[str, float], drift: bool = False) -> BridgeFinals:
    finalists = choose_finalists(POINTS, 2)
    configs = {name: SpeculativeConfig.from_dict(point["config"]) for name, point in finalists.items()}
    slowdown = (lambda call: 1.0 + 0.5 * (call % 2)) if drift else (lambda call: 1.0)
    bench = Known({configs[name]: speedup for name, speedup in speedups.items()}, slowdown)
    calls: list[int] = []
    finals = measure_finalists(
        finalists, {}, bench, PROMPTS, MeasureSettings(held_out_repeats=1), 0, None, lambda: calls.append(1)
    )
    assert len(calls) == len(finals.rows) == len(PROMPTS)
    return finals


def test_the_finalists_are_those_with_the_highest_predictions() -> None:
    chosen = {name: (point["mask"], point["bridge"]) for name, point in choose_finalists(POINTS, 2).items()}
    assert chosen == {
        "empty 1": ("mlp:3", "empty"),
        "empty 2": ("layers:1-2", "empty"),
        "bridged 1": ("layers:1-2", "trained"),
        "bridged 2": ("layers:1-2", "linear"),
    }


@pytest.mark.parametrize(
    ("speedups", "winner"),
    [
        ({"bridged 1": 1.1, "bridged 2": 1.3}, "bridged 2"),  # the measurement decides, not the prediction
        ({"empty 1": 1.2, "bridged 1": 1.1}, "empty 1"),
        ({"bridged 1": 0.9, "bridged 2": 0.95, "empty 1": 0.99}, None),
        ({}, None),
    ],
)
def test_plain_decoding_wins_where_nothing_is_surely_faster(speedups: dict[str, float], winner: str | None) -> None:
    finals = _measured(speedups)
    assert finals.finals.winner.config == (SpeculativeConfig() if winner is None else finals.configs[winner])
    measured = finals.measured()
    assert {name: entry["speedup"] for name, entry in measured.items()} == pytest.approx(
        {name: speedups.get(name, 1.0) for name in finals.configs}
    )
    assert measured["bridged 1"]["config"]["bridge"] == "layers:1-2-trained"  # without the folder
    for name, entry in measured.items():  # ten tokens per second, after 0.1 s of prefill
        assert entry["plain_tokens_per_second"] == pytest.approx(10)
        assert entry["tokens_per_second"] == pytest.approx(10 * speedups.get(name, 1.0))
        assert entry["prefill_seconds"] == entry["plain_prefill_seconds"] == pytest.approx(0.1)


def test_bridged_skips_are_compared_with_the_fastest_empty_skip_in_pairs() -> None:
    """Drift of the machine cancels in pairs, so the interval of the ratio is narrow."""
    ratios = _measured({"empty 2": 1.1, "bridged 1": 1.32, "bridged 2": 0.99}, drift=True).over_empty()
    assert ratios is not None
    assert ratios.pop("empty") == "empty 2"
    assert {name: entry["ratio"] for name, entry in ratios.items()} == pytest.approx({"bridged 1": 1.2, "bridged 2": 0.9})
    assert all(entry[side] == pytest.approx(entry["ratio"]) for entry in ratios.values() for side in ("low", "high"))
    assert BridgeFinals({"bridged 1": SpeculativeConfig()}, {}, Finals((), {}, 0.0), []).over_empty() is None
