"""Charts of a study on an engine: its throughput against the latencies of requests, as the back end reports them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from searches.report.drawing import INK, Figure, describe, front, layout, scatter
from searches.report.trial_points import Point

TOKEN, FIRST = "tpot", "ttft"
"""The names of latencies: of a token after the first, and until the first."""
_TITLES = {TOKEN: "ms per token", FIRST: "ms to the first token"}
_BASELINE = "baseline_"
_RATE = "throughput"


def throughput(measured: Sequence[Point], latency: str, level: str = "") -> Figure | None:
    """Return the tokens per second of the engine against a latency, and the trials that no other one exceeds in both.

    A bar leads from the median to the 95th percentile. A star is plain decoding under the same load, the median of trials.

    Args:
        measured: the trials.
        latency: ``TOKEN`` or ``FIRST``.
        level: one of :func:`~searches.report.load_report.levels`.
    """
    under = [replace(point, load=_under(point.load, level)) for point in measured]
    known = [point for point in under if {_RATE, f"{latency}_p50"} <= point.load.keys()]
    medians = [_milliseconds(point.load, latency) for point in known]
    further = front(known, medians, more_is_better=False, y=_throughput) + _plain(known, latency)

    def tails(chosen: Sequence[Point]) -> dict[str, Any]:
        ends = [_milliseconds(point.load, latency, 95) - _milliseconds(point.load, latency) for point in chosen]
        return {"error_x": {"type": "data", "symmetric": False, "array": ends, "arrayminus": [0.0] * len(ends)}}

    axes = layout(_TITLES[latency], "tokens/s of the engine")
    return scatter(known, medians, axes, further, tails, _throughput, _describe)


def _plain(known: Sequence[Point], latency: str) -> list[dict[str, Any]]:
    """Return the marker of plain decoding; nothing if no trial was compared with it under the load."""
    needed = {f"{_BASELINE}throughput", f"{_BASELINE}{latency}_p50"}
    loads = [
        {name.removeprefix(_BASELINE): value for name, value in point.load.items() if name.startswith(_BASELINE)}
        for point in known
        if needed <= point.load.keys()
    ]
    if not loads:
        return []
    shown = {name: statistics.median(load[name] for load in loads if name in load) for name in loads[0]}
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "plain decoding",
            "x": [_milliseconds(shown, latency)],
            "y": [shown["throughput"]],
            "text": [f"<b>plain decoding</b>, median of trials<br>{_load_lines(shown)}"],
            "hoverinfo": "text",
            "marker": {"color": INK, "size": 13, "symbol": "star-open"},
        }
    ]


def _under(load: Mapping[str, float], level: str) -> dict[str, float]:
    """Return the figures under a number of requests in flight, without the end of their names."""
    return {name.removesuffix(level): value for name, value in load.items() if name.endswith(level)}


def _throughput(point: Point) -> float:
    return float(point.load["throughput"])


def _milliseconds(load: Mapping[str, float], latency: str, percent: int = 50) -> float:
    """Return a percentile of a latency; the median if no other is known."""
    return 1000.0 * load.get(f"{latency}_p{percent}", load[f"{latency}_p50"])


def _describe(point: Point) -> str:
    return f"{describe(point)}<br>{_load_lines(point.load)}"


def _load_lines(load: Mapping[str, float]) -> str:
    """Return throughput and latencies in lines of their own."""
    lines = [f"{load['throughput']:.1f} tokens/s of the engine"]
    for latency, title in _TITLES.items():
        if f"{latency}_p50" in load:
            lines.append(f"{title}: {_milliseconds(load, latency):.1f}, 95 % below {_milliseconds(load, latency, 95):.1f}")
    return "<br>".join(lines)
