"""The charts of ``report.html``, as plain values that plotly draws in the browser.

Each function returns a figure with ``data`` and ``layout``, or None if there is nothing to draw yet.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from searches.report.drawing import (
    FARTHEST,
    FEW,
    INK,
    LINE,
    Figure,
    errors,
    front,
    heat_map,
    layout,
    scatter,
    shortened,
    speedup_intervals,
    with_interval,
    wrapped,
)
from searches.report.trial_points import COLORS, OTHER, Point, skipped_speedups
from searches.study.finals import Finals

_MEBIBYTE = 2**20


def history(measured: Sequence[Point]) -> Figure | None:
    """Return the speedup of each trial in order, with its interval, and the best so far."""
    leading = [point for point in measured if point.may_lead]
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "best so far",
        "hoverinfo": "skip",
        "x": [point.trial for point in leading],
        "y": list(itertools.accumulate((point.speedup for point in leading), max)),
        "line": {"color": INK, "width": 1.5, "shape": "hv"},
    }
    axes = layout("trial", "speedup", hline=1.0)
    if measured and measured[-1].trial < FEW:
        axes["xaxis"]["dtick"] = 1
    numbers = [float(point.trial) for point in measured]
    return scatter(measured, numbers, axes, [line] if leading else [], speedup_intervals(measured))


def acceptance(measured: Sequence[Point]) -> Figure | None:
    """Return the speedup against the acceptance rate of trials that draft, and the trials that none exceeds in both."""
    drafting = [point for point in measured if point.config.kind != "none"]
    rates = [float(point.figures["acceptance_rate"]) for point in drafting]
    axes = layout("acceptance rate", "speedup", hline=1.0)
    axes["xaxis"]["range"] = [-0.03, 1.03]
    return scatter(drafting, rates, axes, front(drafting, rates, more_is_better=True))


def memory(measured: Sequence[Point]) -> Figure | None:
    """Return the speedup against peak memory, and the trials that none is faster than with less memory."""
    known = [point for point in measured if point.figures.get("peak_memory_bytes")]
    sizes = [point.figures["peak_memory_bytes"] / _MEBIBYTE for point in known]
    axes = layout("peak memory, MiB", "speedup", hline=1.0)
    return scatter(known, sizes, axes, front(known, sizes, more_is_better=False))


def predictions(measured: Sequence[Point]) -> Figure | None:
    """Return the measured against the predicted speedup of the trials that were predicted."""
    known = [point for point in measured if point.predicted]
    predicted = [float(point.predicted or 0.0) for point in known]
    axes = layout("predicted speedup", "measured speedup")
    if known:
        ends = [0.95 * min(predicted), 1.05 * max(predicted)]
        axes["shapes"] = [{"type": "line", "layer": "below", "x0": ends[0], "y0": ends[0], "x1": ends[1], "y1": ends[1]}]
        axes["shapes"][0]["line"] = LINE
    return scatter(known, predicted, axes, [], speedup_intervals(known))


def skipped_by_trials(measured: Sequence[Point], layers: int) -> Figure | None:
    """Return the mean speedup of the trials that skipped each sub-layer."""
    means, counts = skipped_speedups(measured, layers)
    if not counts.any():
        return None
    texts = [[f"{count} trial{'s' if count > 1 else ''} skipped it" for count in row] for row in counts]
    return heat_map(means, texts, "mean speedup")


def agreement_of_scans(singles: NDArray[np.float64] | None) -> Figure | None:
    """Return how often the first drafted token is right with one sub-layer skipped, ``[2, layers]``, as scans found it."""
    if singles is None or np.isnan(singles).all():
        return None
    return heat_map(singles, [["scanned"] * len(row) for row in singles], "first drafted token right")


def held_out(finals: Finals | None) -> Figure | None:
    """Return the held-out speedup of each finalist with its interval, and its speedup in the search; fastest at the top."""
    if finals is None or not finals.finalists:
        return None
    count = len(finals.finalists)
    axes = layout("speedup", "", vline=1.0)
    axes["yaxis"] = {"visible": False, "range": [-0.3, count - 0.3], "fixedrange": True}
    axes["margin"]["l"] = 12
    axes["height"] = 90 + 72 * count
    data: list[dict[str, Any]] = []
    axes["annotations"] = []
    farthest = FARTHEST * max(1.0, *(finalist.held_out["speedup"] for finalist in finals.finalists))
    for place, finalist in zip(range(count - 1, -1, -1), finals.finalists, strict=True):
        figures = finalist.held_out
        label = finalist.config.label()
        axes["annotations"].append({
            "xref": "paper", "x": 0.01, "y": place + 0.36, "text": shortened(label, 2), "showarrow": False,
            "xanchor": "left", "align": "left", "bgcolor": "rgba(255,255,255,0.8)",
        })  # fmt: skip
        text = f"{wrapped(label)}<br>held-out {with_interval(figures)}<br>in the search {finalist.search_speedup:.3f}"
        marker = {"color": COLORS.get(finalist.config.kind, OTHER), "size": 10}
        common = {"type": "scatter", "mode": "markers", "y": [place], "text": [text], "hoverinfo": "text"}
        error = errors([figures], farthest)
        data.append(
            common
            | {"name": html.escape(label), "x": [figures["speedup"]], "error_x": error | {"width": 5}, "marker": marker}
        )
        search = {"color": INK, "size": 14, "symbol": "line-ns-open"}
        data.append(common | {"name": "in the search", "x": [finalist.search_speedup], "marker": search})
    return {"data": data, "layout": axes}
