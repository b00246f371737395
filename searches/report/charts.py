"""The charts of ``report.html``, as plain values that plotly draws in the browser.

Each function returns a figure with ``data`` and ``layout``, or None if there is nothing to draw yet.
"""

from __future__ import annotations

import html
import itertools
import math
import textwrap
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from searches.report.study_report import output_state
from searches.report.trial_points import COLORS, OTHER, Point, skipped_speedups
from searches.study.finals import Finals

Figure = dict[str, Any]

_GREY = "#9aa3af"
_LINE = {"color": "#4b5563", "width": 1, "dash": "dot"}
_FARTHEST = 1.3  # an interval is drawn up to this multiple of the fastest trial; two prompts may have one without end
_FEW = 12  # trials or layers that each have a tick
_HOVER_COLUMNS = 44  # characters of a line; a narrow screen has no more
_MEBIBYTE = 2**20


def history(measured: Sequence[Point]) -> Figure | None:
    """Return the speedup of each trial in order, with its interval, and the best so far."""
    leading = [point for point in measured if point.may_lead]
    best = list(itertools.accumulate((point.speedup for point in leading), max))
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "best so far",
        "hoverinfo": "skip",
        "x": [point.trial for point in leading],
        "y": best,
        "line": {"color": "#111827", "width": 1.5, "shape": "hv"},
    }
    axes = layout("trial", "speedup", hline=1.0)
    if measured and measured[-1].trial < _FEW:
        axes["xaxis"]["dtick"] = 1
    return _scatter(measured, [float(point.trial) for point in measured], axes, [line] if leading else [])


def acceptance(measured: Sequence[Point]) -> Figure | None:
    """Return the speedup against the acceptance rate of trials that draft, and the trials that none exceeds in both."""
    drafting = [point for point in measured if point.config.kind != "none"]
    rates = [float(point.figures["acceptance_rate"]) for point in drafting]
    axes = layout("acceptance rate", "speedup", hline=1.0)
    axes["xaxis"]["range"] = [-0.03, 1.03]
    return _scatter(drafting, rates, axes, _front(drafting, rates, more_is_better=True), intervals=False)


def memory(measured: Sequence[Point]) -> Figure | None:
    """Return the speedup against peak memory, and the trials that none is faster than with less memory."""
    known = [point for point in measured if point.figures.get("peak_memory_bytes")]
    sizes = [point.figures["peak_memory_bytes"] / _MEBIBYTE for point in known]
    axes = layout("peak memory, MiB", "speedup", hline=1.0)
    return _scatter(known, sizes, axes, _front(known, sizes, more_is_better=False), intervals=False)


def predictions(measured: Sequence[Point]) -> Figure | None:
    """Return the measured against the predicted speedup of the trials that were predicted."""
    known = [point for point in measured if point.predicted]
    predicted = [float(point.predicted or 0.0) for point in known]
    axes = layout("predicted speedup", "measured speedup")
    if known:
        ends = [0.95 * min(predicted), 1.05 * max(predicted)]
        axes["shapes"] = [{"type": "line", "layer": "below", "x0": ends[0], "y0": ends[0], "x1": ends[1], "y1": ends[1]}]
        axes["shapes"][0]["line"] = _LINE
    return _scatter(known, predicted, axes, [])


def skipped_by_trials(measured: Sequence[Point], layers: int) -> Figure | None:
    """Return the mean speedup of the trials that skipped each sub-layer."""
    means, counts = skipped_speedups(measured, layers)
    if not counts.any():
        return None
    texts = [[f"{count} trial{'s' if count > 1 else ''} skipped it" for count in row] for row in counts]
    return _heat_map(means, texts, "mean speedup")


def agreement_of_scans(singles: NDArray[np.float64] | None) -> Figure | None:
    """Return how often the first drafted token is right with one sub-layer skipped, ``[2, layers]``, as scans found it."""
    if singles is None or np.isnan(singles).all():
        return None
    return _heat_map(singles, [["scanned"] * len(row) for row in singles], "first drafted token right")


def held_out(finals: Finals | None) -> Figure | None:
    """Return the held-out speedup of each finalist with its interval, and its speedup in the search; fastest at the top."""
    if finals is None or not finals.finalists:
        return None
    count = len(finals.finalists)
    axes = layout("speedup", "", vline=1.0)
    axes["yaxis"] = {"visible": False, "range": [-0.4, count - 0.2], "fixedrange": True}
    axes["margin"]["l"] = 12
    axes["height"] = 90 + 56 * count
    data: list[dict[str, Any]] = []
    axes["annotations"] = []
    farthest = _FARTHEST * max(1.0, *(finalist.held_out["speedup"] for finalist in finals.finalists))
    for place, finalist in zip(range(count - 1, -1, -1), finals.finalists, strict=True):
        figures = finalist.held_out
        label = finalist.config.label()
        name = label if len(label) <= _HOVER_COLUMNS else f"{label[: _HOVER_COLUMNS - 1]}…"
        axes["annotations"].append({
            "xref": "paper", "x": 0.01, "y": place + 0.3, "text": html.escape(name), "showarrow": False,
            "xanchor": "left", "bgcolor": "rgba(255,255,255,0.8)",
        })  # fmt: skip
        text = f"{wrapped(label)}<br>held-out {_with_interval(figures)}<br>in the search {finalist.search_speedup:.3f}"
        marker = {"color": COLORS.get(finalist.config.kind, OTHER), "size": 10}
        common = {"type": "scatter", "mode": "markers", "y": [place], "text": [text], "hoverinfo": "text"}
        error = _errors([figures], farthest)
        data.append(
            common
            | {"name": html.escape(label), "x": [figures["speedup"]], "error_x": error | {"width": 5}, "marker": marker}
        )
        search = {"color": "#111827", "size": 14, "symbol": "line-ns-open"}
        data.append(common | {"name": "in the search", "x": [finalist.search_speedup], "marker": search})
    return {"data": data, "layout": axes}


def layout(x: str, y: str, hline: float | None = None, vline: float | None = None) -> dict[str, Any]:
    """Return a layout with titled axes and, if given, a line at a value that is plain decoding's."""
    axis = {"gridcolor": "#e5e7eb", "zeroline": False, "automargin": True, "linecolor": "#d1d5db"}
    shapes: list[dict[str, Any]] = []
    if hline is not None:
        shapes.append({"type": "line", "layer": "below", "xref": "paper", "x0": 0, "x1": 1, "y0": hline, "y1": hline})
    if vline is not None:
        shapes.append({"type": "line", "layer": "below", "yref": "paper", "y0": 0, "y1": 1, "x0": vline, "x1": vline})
    return {
        "xaxis": axis | {"title": {"text": x}},
        "yaxis": axis | {"title": {"text": y}},
        "margin": {"l": 56, "r": 14, "t": 10, "b": 48},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1f2937"},
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "bordercolor": _GREY, "font": {"color": "#1f2937"}},
        "hovermode": "closest",
        "showlegend": False,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "shapes": [shape | {"line": _LINE} for shape in shapes],
    }


def describe(point: Point) -> str:
    """Return the text that is shown for a trial under the pointer."""
    figures = point.figures
    lines = [
        f"<b>trial {point.trial}</b>{'' if point.complete else ', stopped early'}",
        wrapped(point.config.label()),
        f"speedup {_with_interval(figures)}",
        f"{figures['tokens_per_second']:.1f} tokens/s, acceptance {figures['acceptance_rate']:.2f}",
        *([f"predicted {point.predicted:.3f}"] if point.predicted else []),
        f"output {output_state(point.config, figures)}",
    ]
    return "<br>".join(lines)


def _scatter(
    measured: Sequence[Point],
    x: Sequence[float],
    axes: dict[str, Any],
    further: list[dict[str, Any]],
    intervals: bool = True,
) -> Figure | None:
    """Return the speedup of trials against ``x``, a trace for each drafter and way to end; further traces lie above them."""
    if not measured:
        return None
    farthest = _FARTHEST * max(1.0, *(point.speedup for point in measured))
    traces = []
    for kind, complete in sorted({(point.config.kind, point.complete) for point in measured}):
        chosen = [(at, p) for at, p in zip(x, measured, strict=True) if (p.config.kind, p.complete) == (kind, complete)]
        color = COLORS.get(kind, OTHER)
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "markers",
            "name": f"{html.escape(kind.replace('_', ' '))}{'' if complete else ', stopped early'}",
            "x": [at for at, _ in chosen],
            "y": [point.speedup for _, point in chosen],
            "marker": {"color": color, "opacity": 0.85, "size": 8, "symbol": "circle" if complete else "x-thin-open"},
            "text": [describe(point) for _, point in chosen],
            "hoverinfo": "text",
        }
        if intervals:
            error = _errors([point.figures for _, point in chosen], farthest)
            trace["error_y"] = error | {"width": 2, "thickness": 1, "color": f"{color}80"}
        traces.append(trace)
    return {"data": [*traces, *further], "layout": axes}


def _front(measured: Sequence[Point], x: Sequence[float], more_is_better: bool) -> list[dict[str, Any]]:
    """Return the Pareto front of the trials that may lead, as a line: no other is better in both ``x`` and speedup."""
    pairs = [(at, point.speedup) for at, point in zip(x, measured, strict=True) if point.may_lead]
    front: list[tuple[float, float]] = []
    for at, speedup in sorted(pairs, key=lambda pair: (-pair[0] if more_is_better else pair[0], -pair[1])):
        if not front or speedup > front[-1][1]:
            front.append((at, speedup))
    if not front:
        return []
    line = {"color": "#111827", "width": 1.5, "dash": "dash", "shape": "hv"}
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "Pareto front",
            "hoverinfo": "skip",
            "line": line,
            "x": [at for at, _ in front],
            "y": [speedup for _, speedup in front],
        }
    ]


def _heat_map(cells: NDArray[np.float64], texts: list[list[str]], name: str) -> Figure:
    """Return a map of a value for each sub-layer, ``[2, layers]``; unknown cells stay empty."""
    axes = layout("layer", "")
    axes["plot_bgcolor"] = "#e5e7eb"
    common = {"showgrid": False, "zeroline": False, "automargin": True}
    axes["xaxis"] = common | ({"dtick": 1} if cells.shape[1] <= _FEW else {"nticks": 12})
    axes["yaxis"] = common | {"fixedrange": True, "autorange": "reversed"}
    bar = {"orientation": "h", "thickness": 10, "y": 1.02, "yanchor": "bottom", "title": {"text": name, "side": "top"}}
    trace = {
        "type": "heatmap",
        "z": cells.tolist(),
        "text": texts,
        "y": ["attention", "MLP"],
        "colorscale": "Viridis",
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "colorbar": bar,
        "hovertemplate": f"layer %{{x}}, %{{y}}<br>{name} %{{z:.3f}}<br>%{{text}}<extra></extra>",
    }
    return {"data": [trace], "layout": axes}


def _errors(measured: Sequence[dict[str, Any]], farthest: float) -> dict[str, Any]:
    """Return the lengths of intervals on both sides of the speedups, cut at ``farthest``."""
    speedups = [figures["speedup"] for figures in measured]
    highs = [
        min(figures["speedup_high"], max(farthest, speedup)) for figures, speedup in zip(measured, speedups, strict=True)
    ]
    lows = [max(figures["speedup_low"], 0.0) for figures in measured]
    up, down = ([abs(end - speedup) for end, speedup in zip(ends, speedups, strict=True)] for ends in (highs, lows))
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down}


def _with_interval(figures: dict[str, Any]) -> str:
    low, high = figures["speedup_low"], figures["speedup_high"]
    return f"{figures['speedup']:.3f} ({low:.2f} to {high:.2f})"


def wrapped(text: str) -> str:
    """Return a text in short lines, as plotly shows it; its own markup is shown as it is written."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(text, _HOVER_COLUMNS))


def finite(value: Any) -> Any:
    """Return plain values in which None replaces NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def kinds(found: Set[str]) -> list[str]:
    """Return kinds of drafters in the order of the colours."""
    return [kind for kind in COLORS if kind in found] + sorted(found - COLORS.keys())
