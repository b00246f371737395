"""The charts of ``report.html``: plotly figures, which plotly.js draws in the browser.

Each function returns None if there is nothing to draw yet.
"""

from __future__ import annotations

import html
import itertools
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from plotly import graph_objects as go

from layerskip import SkipMask, SpeculativeConfig, config
from layerskip.mask import count_skipped
from searches.report.tables import output_state, trial_requests
from searches.study.finals import Finals
from searches.study.leaderboard import configuration, is_lossless
from searches.tracking.names import PREDICTED

OTHER = "#000000"
"""The colour of methods that are not known here, such as those of a study whose drafter is missing."""
TOKEN, FIRST = "tpot", "ttft"
"""The names of latencies: of a token after the first, and until the first."""
GREY = "#9aa3af"
INK = "#111827"
_DOTTED = {"color": "#4b5563", "width": 1, "dash": "dot"}
_AXIS = {"gridcolor": "#e5e7eb", "zeroline": False, "automargin": True, "linecolor": "#d1d5db"}
_STYLE = {
    "xaxis": _AXIS,
    "yaxis": _AXIS,
    "margin": {"l": 56, "r": 14, "t": 10, "b": 48},
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1f2937"},
    "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "bordercolor": GREY, "font": {"color": "#1f2937"}},
    "hovermode": "closest",
    "showlegend": False,
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
}
_FARTHEST = 1.3  # an interval is drawn up to this multiple of the fastest trial; two prompts may have one without end
_FEW = 12  # trials or layers that each have a tick
_HOVER_COLUMNS = 44  # characters of a line; a narrow screen has no more
_LATENCIES = {TOKEN: "ms per token", FIRST: "ms to the first token"}
_PLAIN = "baseline_"
_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Point:
    """A measured trial.

    Args:
        trial: its number.
        config: the configuration.
        complete: whether it was measured to the end.
        metrics: of its measurement, as :meth:`layerskip.Measurement.to_dict` returns them.
        predicted: the speedup that was predicted before it ran; None without a prediction.
        requests: throughput and latencies that the back end reports; empty for this library's decoder.
    """

    trial: int
    config: SpeculativeConfig
    complete: bool
    metrics: dict[str, Any]
    predicted: float | None
    requests: Mapping[str, float] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """The measured speedup over plain decoding."""
        return float(self.metrics["speedup"])

    @property
    def may_lead(self) -> bool:
        """True if it was measured to the end and kept the output, or is lossy by choice."""
        return self.complete and (is_lossless(self.metrics) or not self.config.lossless)


Value = Callable[[Point], float]


def points(trials: Iterable[FrozenTrial]) -> list[Point]:
    """Return the measured trials; those that were not run are left out."""
    return [
        Point(
            trial=trial.number,
            config=configuration(trial),
            complete=trial.state == TrialState.COMPLETE,
            metrics=trial.user_attrs["measurement"],
            predicted=trial.user_attrs.get(PREDICTED),
            requests=trial_requests(trial),
        )
        for trial in trials
        if "measurement" in trial.user_attrs
    ]


def history(measured: Sequence[Point]) -> go.Figure | None:
    """Return the speedup of each trial in order, with its interval, and the best so far."""
    if not measured:
        return None
    chart = figure("trial", "speedup", plain=1.0)
    _add_trials(chart, measured, _number, bars=_intervals(measured))
    leading = [point for point in measured if point.may_lead]
    best = list(itertools.accumulate(map(_speedup, leading), max))
    _add_line(chart, "best so far", [point.trial for point in leading], best)
    if measured[-1].trial < _FEW:
        chart.update_xaxes(dtick=1)
    return chart


def acceptance(measured: Sequence[Point]) -> go.Figure | None:
    """Return the speedup against the acceptance rate of trials that draft, and the trials that none exceeds in both."""
    drafting = [point for point in measured if point.config.method != "none"]
    if not drafting:
        return None
    chart = figure("acceptance rate", "speedup", plain=1.0)
    _add_trials(chart, drafting, _acceptance_rate)
    _add_front(chart, drafting, _acceptance_rate, more_is_better=True)
    return chart.update_xaxes(range=[-0.03, 1.03])


def memory(measured: Sequence[Point]) -> go.Figure | None:
    """Return the speedup against peak memory, and the trials that none is faster than with less memory."""
    known = [point for point in measured if point.metrics.get("peak_memory_bytes")]
    if not known:
        return None
    chart = figure("peak memory, MiB", "speedup", plain=1.0)
    _add_trials(chart, known, _memory)
    _add_front(chart, known, _memory, more_is_better=False)
    return chart


def predictions(measured: Sequence[Point]) -> go.Figure | None:
    """Return the measured against the predicted speedup of the trials that were predicted."""
    known = [point for point in measured if point.predicted]
    if not known:
        return None
    chart = figure("predicted speedup", "measured speedup")
    _add_trials(chart, known, _predicted, bars=_intervals(known))
    low, high = 0.95 * min(map(_predicted, known)), 1.05 * max(map(_predicted, known))
    return chart.add_shape(type="line", layer="below", x0=low, y0=low, x1=high, y1=high, line=_DOTTED)


def throughput(measured: Sequence[Point], latency: str, level: str = "") -> go.Figure | None:
    """Return the tokens per second of the engine against a latency, and the trials that no other one exceeds in both.

    A bar leads from the median to the 95th percentile. A star is plain decoding, the median of trials.

    Args:
        measured: the trials.
        latency: ``TOKEN`` or ``FIRST``.
        level: one of :func:`~searches.report.tables.levels`.
    """
    under = [replace(point, requests=_under(point.requests, level)) for point in measured]
    known = [point for point in under if {"throughput", f"{latency}_p50"} <= point.requests.keys()]
    if not known:
        return None

    def median(point: Point) -> float:
        return _milliseconds(point.requests, latency)

    def tails(chosen: Sequence[Point]) -> dict[str, Any]:
        ends = [_milliseconds(point.requests, latency, 95) - median(point) for point in chosen]
        return {"error_x": {"symmetric": False, "array": ends, "arrayminus": [0.0] * len(ends)}}

    chart = figure(_LATENCIES[latency], "tokens/s of the engine")
    _add_trials(
        chart, known, median, _throughput, tails, lambda point: f"{describe(point)}<br>{_request_lines(point.requests)}"
    )
    _add_front(chart, known, median, more_is_better=False, y=_throughput)
    plain = [
        {name.removeprefix(_PLAIN): value for name, value in point.requests.items() if name.startswith(_PLAIN)}
        for point in known
        if {f"{_PLAIN}throughput", f"{_PLAIN}{latency}_p50"} <= point.requests.keys()
    ]
    if plain:  # trials were compared with plain decoding under the load
        shown = {name: statistics.median(one[name] for one in plain if name in one) for name in plain[0]}
        chart.add_scatter(
            mode="markers",
            name="plain decoding",
            x=[_milliseconds(shown, latency)],
            y=[shown["throughput"]],
            text=[f"<b>plain decoding</b>, median of trials<br>{_request_lines(shown)}"],
            hoverinfo="text",
            marker={"color": INK, "size": 13, "symbol": "star-open"},
        )
    return chart


def skipped_by_trials(measured: Sequence[Point], layers: int) -> go.Figure | None:
    """Return the mean speedup of the trials that skipped each sub-layer."""
    means, counts = skipped_speedups(measured, layers)
    if not counts.any():
        return None
    texts = [[f"{count} trial{'s' if count > 1 else ''} skipped it" for count in row] for row in counts]
    return _heat_map(means, texts, "mean speedup")


def skipped_speedups(measured: Sequence[Point], layers: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the mean speedup of the trials that skipped each sub-layer, and their number.

    Args:
        measured: the trials; those with another drafter than layer skipping are left out.
        layers: the number of decoder layers of the target.

    Returns:
        Both ``[2, layers]``, attention first. The mean is NaN where no trial skipped the sub-layer.
    """
    total, count = np.zeros((2, layers)), np.zeros((2, layers), dtype=np.int64)
    for point in measured:
        if point.config.method == "layer_skip" and sum(count_skipped(point.config.mask)) > 0:
            mask = SkipMask.parse(point.config.mask, layers)
            skipped = np.array([mask.attention, mask.mlp])
            total[skipped] += point.speedup
            count[skipped] += 1
    return np.divide(total, count, out=np.full((2, layers), np.nan), where=count > 0), count


def agreement_of_scans(singles: NDArray[np.float64] | None) -> go.Figure | None:
    """Return how often the first drafted token is right with one sub-layer skipped, ``[2, layers]``, as scans found it."""
    if singles is None or np.isnan(singles).all():
        return None
    return _heat_map(singles, [["scanned"] * len(row) for row in singles], "first drafted token right")


def held_out(finals: Finals | None) -> go.Figure | None:
    """Return the held-out speedup of each finalist with its interval, and its speedup in the search; fastest at the top."""
    if finals is None or not finals.finalists:
        return None
    count = len(finals.finalists)
    chart = figure("speedup", "").add_vline(x=1.0, line=_DOTTED, layer="below")
    chart.update_yaxes(visible=False, range=[-0.3, count - 0.3], fixedrange=True)
    chart.update_layout(margin_l=12, height=90 + 72 * count)
    farthest = _FARTHEST * max(1.0, *(finalist.held_out["speedup"] for finalist in finals.finalists))
    for place, finalist in zip(range(count - 1, -1, -1), finals.finalists, strict=True):
        metrics, label = finalist.held_out, finalist.config.label()
        note = {"text": shortened(label, 2), "showarrow": False, "align": "left", "bgcolor": "rgba(255,255,255,0.8)"}
        chart.add_annotation(xref="paper", x=0.01, xanchor="left", y=place + 0.36, **note)
        text = f"{wrapped(label)}<br>held-out {_with_interval(metrics)}<br>in the search {finalist.search_speedup:.3f}"
        shown = {"mode": "markers", "y": [place], "text": [text], "hoverinfo": "text"}
        chart.add_scatter(
            name=html.escape(label),
            x=[metrics["speedup"]],
            error_x=_errors([metrics], farthest) | {"width": 5},
            marker={"color": color_of(finalist.config.method), "size": 10},
            **shown,
        )
        search = {"color": INK, "size": 14, "symbol": "line-ns-open"}
        chart.add_scatter(name="in the search", x=[finalist.search_speedup], marker=search, **shown)
    return chart


def figure(x: str, y: str, plain: float | None = None) -> go.Figure:
    """Return a figure in the style of the page, with titled axes and, if given, a line at the speedup of plain decoding."""
    titles = {"xaxis": {"title": {"text": x or None}}, "yaxis": {"title": {"text": y or None}}}
    chart = go.Figure(layout={"template": {"layout": _STYLE}, **titles})
    return chart if plain is None else chart.add_hline(y=plain, line=_DOTTED, layer="below")


def _number(point: Point) -> float:
    return point.trial


def _speedup(point: Point) -> float:
    return point.speedup


def _acceptance_rate(point: Point) -> float:
    return float(point.metrics["acceptance_rate"])


def _memory(point: Point) -> float:
    return float(point.metrics["peak_memory_bytes"]) / _MEBIBYTE


def _predicted(point: Point) -> float:
    return float(point.predicted or 0.0)


def _throughput(point: Point) -> float:
    return float(point.requests["throughput"])


def describe(point: Point) -> str:
    """Return the text that is shown for a trial under the pointer."""
    metrics = point.metrics
    lines = [
        f"<b>trial {point.trial}</b>{'' if point.complete else ', stopped early'}",
        wrapped(point.config.label()),
        f"speedup {_with_interval(metrics)}",
        f"{metrics['tokens_per_second']:.1f} tokens/s, acceptance {metrics['acceptance_rate']:.2f}",
        *([f"predicted {point.predicted:.3f}"] if point.predicted else []),
        f"output {output_state(point.config, metrics)}",
    ]
    return "<br>".join(lines)


def _add_trials(
    chart: go.Figure,
    measured: Sequence[Point],
    x: Value,
    y: Value = _speedup,
    bars: Callable[[Sequence[Point]], dict[str, Any]] = lambda chosen: {},
    text: Callable[[Point], str] = describe,
) -> None:
    """Add trials, a trace for each drafter and way to end.

    Args:
        chart: takes them.
        measured: the trials.
        x: returns the value of a trial on the horizontal axis.
        y: returns that on the vertical axis.
        bars: returns the bars of some of the trials, by ``error_x`` or ``error_y``.
        text: returns what is shown under the pointer.
    """
    for method, complete in sorted({(point.config.method, point.complete) for point in measured}):
        chosen = [point for point in measured if (point.config.method, point.complete) == (method, complete)]
        color = color_of(method)
        style = {"width": 2, "thickness": 1, "color": f"{color}80"}
        chart.add_scatter(
            mode="markers",
            name=f"{html.escape(method.replace('_', ' '))}{'' if complete else ', stopped early'}",
            x=[x(point) for point in chosen],
            y=[y(point) for point in chosen],
            marker={"color": color, "opacity": 0.85, "size": 8, "symbol": "circle" if complete else "x-thin-open"},
            text=[text(point) for point in chosen],
            hoverinfo="text",
            **{axis: bar | style for axis, bar in bars(chosen).items()},
        )


def _add_front(chart: go.Figure, measured: Sequence[Point], x: Value, more_is_better: bool, y: Value = _speedup) -> None:
    """Add the Pareto front of the trials that may lead, as a line: no other is better in both ``x`` and ``y``."""
    leading = [(x(point), y(point)) for point in measured if point.may_lead]
    best: list[tuple[float, float]] = []
    for at, value in sorted(leading, key=lambda pair: (-pair[0] if more_is_better else pair[0], -pair[1])):
        if not best or value > best[-1][1]:
            best.append((at, value))
    _add_line(chart, "Pareto front", [at for at, _ in best], [value for _, value in best], dash="dash")


def _add_line(chart: go.Figure, name: str, x: Sequence[float], y: Sequence[float], dash: str = "solid") -> None:
    """Add a line in steps, unless it has no points."""
    if x:
        line = {"color": INK, "width": 1.5, "shape": "hv", "dash": dash}
        chart.add_scatter(mode="lines", name=name, x=x, y=y, line=line, hoverinfo="skip")


def _intervals(measured: Sequence[Point]) -> Callable[[Sequence[Point]], dict[str, Any]]:
    """Return a function that returns the vertical bars of some of the trials: the intervals of their speedups."""
    farthest = _FARTHEST * max(1.0, *map(_speedup, measured))
    return lambda chosen: {"error_y": _errors([point.metrics for point in chosen], farthest)}


def _errors(measured: Sequence[Mapping[str, float]], farthest: float) -> dict[str, Any]:
    """Return the lengths of intervals on both sides of the speedups, cut at ``farthest``."""
    up = [min(each["speedup_high"], max(farthest, each["speedup"])) - each["speedup"] for each in measured]
    down = [each["speedup"] - max(each["speedup_low"], 0.0) for each in measured]
    return {"symmetric": False, "array": [abs(length) for length in up], "arrayminus": [abs(length) for length in down]}


def _heat_map(cells: NDArray[np.float64], texts: list[list[str]], name: str) -> go.Figure:
    """Return a map of a value for each sub-layer, ``[2, layers]``; unknown cells stay empty."""
    chart = figure("", "").add_heatmap(
        z=cells.tolist(),
        text=texts,
        y=["attention", "MLP"],
        colorscale="Viridis",
        xgap=1,
        ygap=1,
        hoverongaps=False,
        colorbar={
            "orientation": "h",
            "thickness": 10,
            "y": 1.02,
            "yanchor": "bottom",
            "title": {"text": name, "side": "top"},
        },
        hovertemplate=f"layer %{{x}}, %{{y}}<br>{name} %{{z:.3f}}<br>%{{text}}<extra></extra>",
    )
    chart.update_xaxes(showgrid=False, **({"dtick": 1} if cells.shape[1] <= _FEW else {"nticks": 12}))
    chart.update_yaxes(showgrid=False, fixedrange=True, autorange="reversed")
    return chart.update_layout(plot_bgcolor="#e5e7eb")


def _under(requests: Mapping[str, float], level: str) -> dict[str, float]:
    """Return the figures under a number of requests in flight, without the end of their names."""
    return {name.removesuffix(level): value for name, value in requests.items() if name.endswith(level)}


def _milliseconds(requests: Mapping[str, float], latency: str, percent: int = 50) -> float:
    """Return a percentile of a latency; the median if no other is known."""
    return 1000.0 * requests.get(f"{latency}_p{percent}", requests[f"{latency}_p50"])


def _request_lines(requests: Mapping[str, float]) -> str:
    """Return throughput and latencies in lines of their own."""
    lines = [f"{requests['throughput']:.1f} tokens/s of the engine"]
    for latency, title in _LATENCIES.items():
        if f"{latency}_p50" in requests:
            lines.append(
                f"{title}: {_milliseconds(requests, latency):.1f}, 95 % below {_milliseconds(requests, latency, 95):.1f}"
            )
    return "<br>".join(lines)


def _with_interval(metrics: Mapping[str, float]) -> str:
    return f"{metrics['speedup']:.3f} ({metrics['speedup_low']:.2f} to {metrics['speedup_high']:.2f})"


def wrapped(text: str) -> str:
    """Return a text in short lines, as plotly shows it; its own markup is shown as it is written."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(text, _HOVER_COLUMNS))


def shortened(text: str, lines: int = 1) -> str:
    """Return the beginning of a text that fits into so many lines, as plotly shows it."""
    return "<br>".join(map(html.escape, textwrap.wrap(text, _HOVER_COLUMNS, max_lines=lines, placeholder="…")))


def color_of(method: str) -> str:
    """Return the declared colour of a method."""
    known = config.methods()
    return known[method].color if method in known else OTHER


def methods(found: Set[str]) -> list[str]:
    """Return methods in the order of their ranks, unknown ones last."""
    known = config.methods()
    return [method for method in known if method in found] + sorted(found - known.keys())
