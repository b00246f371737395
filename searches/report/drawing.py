"""The parts that the charts of ``report.html`` share, as plain values that plotly draws in the browser."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from searches.report.study_report import output_state
from searches.report.trial_points import COLORS, OTHER, Point

Figure = dict[str, Any]

GREY = "#9aa3af"
INK = "#111827"
LINE = {"color": "#4b5563", "width": 1, "dash": "dot"}
FARTHEST = 1.3  # an interval is drawn up to this multiple of the fastest trial; two prompts may have one without end
FEW = 12  # trials or layers that each have a tick
HOVER_COLUMNS = 44  # characters of a line; a narrow screen has no more


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
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "bordercolor": GREY, "font": {"color": "#1f2937"}},
        "hovermode": "closest",
        "showlegend": False,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "shapes": [shape | {"line": LINE} for shape in shapes],
    }


def describe(point: Point) -> str:
    """Return the text that is shown for a trial under the pointer."""
    figures = point.figures
    lines = [
        f"<b>trial {point.trial}</b>{'' if point.complete else ', stopped early'}",
        wrapped(point.config.label()),
        f"speedup {with_interval(figures)}",
        f"{figures['tokens_per_second']:.1f} tokens/s, acceptance {figures['acceptance_rate']:.2f}",
        *([f"predicted {point.predicted:.3f}"] if point.predicted else []),
        f"output {output_state(point.config, figures)}",
    ]
    return "<br>".join(lines)


def speedup(point: Point) -> float:
    """Return the speedup of a trial, the value that most charts draw upwards."""
    return point.speedup


def speedup_intervals(measured: Sequence[Point]) -> Callable[[Sequence[Point]], dict[str, Any]]:
    """Return a function that returns the vertical bars of some of the trials: the intervals of their speedups."""
    farthest = FARTHEST * max([1.0, *(point.speedup for point in measured)])
    return lambda chosen: {"error_y": errors([point.figures for point in chosen], farthest)}


def scatter(
    measured: Sequence[Point],
    x: Sequence[float],
    axes: dict[str, Any],
    further: list[dict[str, Any]],
    bars: Callable[[Sequence[Point]], dict[str, Any]] = lambda chosen: {},
    y: Callable[[Point], float] = speedup,
    text: Callable[[Point], str] = describe,
) -> Figure | None:
    """Return a value of trials against ``x``, a trace for each drafter and way to end.

    Args:
        measured: the trials.
        x: of each trial.
        axes: the layout.
        further: traces that lie above them.
        bars: returns the bars of some of the trials, by ``error_x`` or ``error_y``.
        y: returns the value of a trial.
        text: returns what is shown under the pointer.
    """
    if not measured:
        return None
    traces = []
    for group in sorted({_group(point) for point in measured}):
        chosen = [(at, point) for at, point in zip(x, measured, strict=True) if _group(point) == group]
        kind, complete = group
        color = COLORS.get(kind, OTHER)
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "markers",
            "name": f"{html.escape(kind.replace('_', ' '))}{'' if complete else ', stopped early'}",
            "x": [at for at, _ in chosen],
            "y": [y(point) for _, point in chosen],
            "marker": {"color": color, "opacity": 0.85, "size": 8, "symbol": "circle" if complete else "x-thin-open"},
            "text": [text(point) for _, point in chosen],
            "hoverinfo": "text",
        }
        for axis, bar in bars([point for _, point in chosen]).items():
            trace[axis] = bar | {"width": 2, "thickness": 1, "color": f"{color}80"}
        traces.append(trace)
    return {"data": [*traces, *further], "layout": axes}


def _group(point: Point) -> tuple[str, bool]:
    return point.config.kind, point.complete


def front(
    measured: Sequence[Point], x: Sequence[float], more_is_better: bool, y: Callable[[Point], float] = speedup
) -> list[dict[str, Any]]:
    """Return the Pareto front of the trials that may lead, as a line: no other is better in both ``x`` and ``y``."""
    leading = [(at, y(point)) for at, point in zip(x, measured, strict=True) if point.may_lead]
    best: list[tuple[float, float]] = []
    for at, value in sorted(leading, key=lambda pair: (-pair[0] if more_is_better else pair[0], -pair[1])):
        if not best or value > best[-1][1]:
            best.append((at, value))
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "Pareto front",
        "hoverinfo": "skip",
        "line": {"color": INK, "width": 1.5, "dash": "dash", "shape": "hv"},
        "x": [at for at, _ in best],
        "y": [value for _, value in best],
    }
    return [line] if best else []


def heat_map(cells: NDArray[np.float64], texts: list[list[str]], name: str) -> Figure:
    """Return a map of a value for each sub-layer, ``[2, layers]``; unknown cells stay empty."""
    axes = layout("layer", "")
    axes["plot_bgcolor"] = "#e5e7eb"
    common = {"showgrid": False, "zeroline": False, "automargin": True}
    axes["xaxis"] = common | ({"dtick": 1} if cells.shape[1] <= FEW else {"nticks": 12})
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


def errors(measured: Sequence[dict[str, Any]], farthest: float) -> dict[str, Any]:
    """Return the lengths of intervals on both sides of the speedups, cut at ``farthest``."""
    speedups = [figures["speedup"] for figures in measured]
    highs = [
        min(figures["speedup_high"], max(farthest, speedup)) for figures, speedup in zip(measured, speedups, strict=True)
    ]
    lows = [max(figures["speedup_low"], 0.0) for figures in measured]
    up, down = ([abs(end - speedup) for end, speedup in zip(ends, speedups, strict=True)] for ends in (highs, lows))
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down}


def with_interval(figures: dict[str, Any]) -> str:
    low, high = figures["speedup_low"], figures["speedup_high"]
    return f"{figures['speedup']:.3f} ({low:.2f} to {high:.2f})"


def wrapped(text: str) -> str:
    """Return a text in short lines, as plotly shows it; its own markup is shown as it is written."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(text, HOVER_COLUMNS))


def shortened(text: str, lines: int = 1) -> str:
    """Return the beginning of a text that fits into so many lines, as plotly shows it."""
    return "<br>".join(map(html.escape, textwrap.wrap(text, HOVER_COLUMNS, max_lines=lines, placeholder="…")))


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
