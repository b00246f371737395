"""The charts of ``report.html``: plotly figures, which plotly.js draws in the browser.

Each function returns None if there is nothing to draw yet. The timeline has one lane for each worker, with hours in which
nothing ran cut out.
"""

from __future__ import annotations

import html
import itertools
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from plotly import graph_objects as go

from layerskip import SkipMask, SpeculativeConfig, config
from layerskip.mask import count_skipped
from searches.report.tables import output_state, pareto_front, trial_requests
from searches.study.finals import Finals
from searches.study.leaderboard import FINISHED, configuration, is_lossless
from searches.study.study import DUPLICATE_OF
from searches.tracking.names import ENGINE_FAILED, PREDICTED, RETRY_OF, WORKER

OTHER = "#000000"
"""The colour of methods that are not known here, such as those of a study whose drafter is missing."""
TOKEN, FIRST = "tpot", "ttft"
"""The names of latencies: of a token after the first, and until the first."""
_GREY, _INK = "#9aa3af", "#111827"
_DOTTED = {"color": "#4b5563", "width": 1, "dash": "dot"}
_AXIS = {"gridcolor": "#e5e7eb", "zeroline": False, "automargin": True, "linecolor": "#d1d5db"}
_STYLE = {
    "xaxis": _AXIS,
    "yaxis": _AXIS,
    "margin": {"l": 56, "r": 14, "t": 10, "b": 48},
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1f2937"},
    "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "bordercolor": _GREY, "font": {"color": "#1f2937"}},
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
_MIN_PAUSE = 60.0  # seconds without a trial that are cut out, and at least this share of the time with trials:
_PAUSE_SHARE = 0.1
_ONE_LANE = "trials"
_UNITS = ((3 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_FAILED, _KILLED, _RUNNING, _INTERRUPTED, _PRUNED = "engine failed", "killed", "running", "fail", "pruned"
_OUTCOMES = {
    _PRUNED: ("Faint: stopped early or not run.", ", stopped early or not run"),
    _FAILED: ("Hatched: the engine failed.", ", stopped early or not run"),
    _RUNNING: ("Grey: running.", ", running"),
    _INTERRUPTED: ("Grey with a frame: interrupted.", ", interrupted"),
    _KILLED: ("Cross: killed.", ", interrupted"),
}
"""By the outcome of a trial: what the note of the timeline says, and what follows the trial's number under the pointer."""


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
    chart = _figure("trial", "speedup", plain=1.0)
    speedups = [point.speedup for point in measured]
    _add_trials(chart, measured, [point.trial for point in measured], speedups, {"error_y": _intervals(measured)})
    leading = [point for point in measured if point.may_lead]
    best = list(itertools.accumulate((point.speedup for point in leading), max))
    _add_line(chart, "best so far", [point.trial for point in leading], best)
    return chart.update_xaxes(dtick=1) if measured[-1].trial < _FEW else chart


def acceptance(measured: Sequence[Point]) -> go.Figure | None:
    """Return the speedup against the acceptance rate of trials that draft, and the trials that none exceeds in both."""
    drafting = [point for point in measured if point.config.method != "none"]
    rates = [float(point.metrics["acceptance_rate"]) for point in drafting]
    chart = _against_speedup(drafting, "acceptance rate", rates, more_is_better=True)
    return None if chart is None else chart.update_xaxes(range=[-0.03, 1.03])


def memory(measured: Sequence[Point]) -> go.Figure | None:
    """Return the speedup against peak memory, and the trials that none is faster than with less memory."""
    known = [point for point in measured if point.metrics.get("peak_memory_bytes")]
    sizes = [float(point.metrics["peak_memory_bytes"]) / 2**20 for point in known]
    return _against_speedup(known, "peak memory, MiB", sizes, more_is_better=False)


def _against_speedup(measured: Sequence[Point], title: str, x: Sequence[float], more_is_better: bool) -> go.Figure | None:
    if not measured:
        return None
    chart, speedups = _figure(title, "speedup", plain=1.0), [point.speedup for point in measured]
    _add_trials(chart, measured, x, speedups)
    _add_front(chart, measured, x, speedups, more_is_better)
    return chart


def predictions(measured: Sequence[Point]) -> go.Figure | None:
    """Return the measured against the predicted speedup of the trials that were predicted."""
    known = [point for point in measured if point.predicted]
    if not known:
        return None
    chart, x = _figure("predicted speedup", "measured speedup"), [float(point.predicted or 0.0) for point in known]
    _add_trials(chart, known, x, [point.speedup for point in known], {"error_y": _intervals(known)})
    low, high = 0.95 * min(x), 1.05 * max(x)
    return chart.add_shape(type="line", layer="below", x0=low, y0=low, x1=high, y1=high, line=_DOTTED)


def throughput(measured: Sequence[Point], latency: str, level: str = "") -> go.Figure | None:
    """Return the tokens per second of the engine against a latency, and the trials that no other one exceeds in both.

    A bar leads from the median to the 95th percentile. A star is plain decoding, the median of trials. ``latency`` is
    ``TOKEN`` or ``FIRST``, ``level`` one of :func:`~searches.report.tables.levels`.
    """
    under = [replace(point, requests=_under(point.requests, level)) for point in measured]
    known = [point for point in under if {"throughput", f"{latency}_p50"} <= point.requests.keys()]
    if not known:
        return None
    chart = _figure(_LATENCIES[latency], "tokens/s of the engine")
    x = [_milliseconds(point.requests, latency) for point in known]
    y = [float(point.requests["throughput"]) for point in known]
    tails = [_milliseconds(point.requests, latency, 95) - median for point, median in zip(known, x, strict=True)]
    texts = [f"{describe(point)}<br>{_request_lines(point.requests)}" for point in known]
    _add_trials(chart, known, x, y, {"error_x": (tails, [0.0] * len(tails))}, texts)
    _add_front(chart, known, x, y, more_is_better=False)
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
            marker={"color": _INK, "size": 13, "symbol": "star-open"},
        )
    return chart


def skipped_by_trials(measured: Sequence[Point], layers: int) -> go.Figure | None:
    """Return the mean speedup of the trials that skipped each sub-layer of a target with so many decoder layers."""
    total, count = np.zeros((2, layers)), np.zeros((2, layers), dtype=np.int64)
    for point in measured:
        if point.config.method == "layer_skip" and sum(count_skipped(point.config.mask)) > 0:
            mask = SkipMask.parse(point.config.mask, layers)
            skipped = np.array([mask.attention, mask.mlp])
            total[skipped] += point.speedup
            count[skipped] += 1
    if not count.any():
        return None
    means = np.divide(total, count, out=np.full((2, layers), np.nan), where=count > 0)
    texts = [[f"{number} trial{'s' if number > 1 else ''} skipped it" for number in row] for row in count]
    return _heat_map(means, texts, "mean speedup")


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
    chart = _figure("speedup", "").add_vline(x=1.0, line=_DOTTED, layer="below")
    chart.update_yaxes(visible=False, range=[-0.3, count - 0.3], fixedrange=True)
    chart.update_layout(margin_l=12, height=90 + 72 * count)
    farthest = _FARTHEST * max(1.0, *(finalist.held_out["speedup"] for finalist in finals.finalists))
    for place, finalist in zip(range(count - 1, -1, -1), finals.finalists, strict=True):
        metrics, label = finalist.held_out, finalist.config.label()
        note = {"text": _shortened(label, 2), "showarrow": False, "align": "left", "bgcolor": "rgba(255,255,255,0.8)"}
        chart.add_annotation(xref="paper", x=0.01, xanchor="left", y=place + 0.36, **note)
        text = f"{_wrapped(label)}<br>held-out {_with_interval(metrics)}<br>in the search {finalist.search_speedup:.3f}"
        shown = {"mode": "markers", "y": [place], "text": [text], "hoverinfo": "text"}
        up, down = _bars([metrics], farthest)
        bar = {"symmetric": False, "array": up, "arrayminus": down, "width": 5}
        marker = {"color": color_of(finalist.config.method), "size": 10}
        chart.add_scatter(name=html.escape(label), x=[metrics["speedup"]], error_x=bar, marker=marker, **shown)
        search = {"color": _INK, "size": 14, "symbol": "line-ns-open"}
        chart.add_scatter(name="in the search", x=[finalist.search_speedup], marker=search, **shown)
    return chart


def describe(point: Point) -> str:
    """Return the text that is shown for a trial under the pointer."""
    metrics = point.metrics
    lines = [
        f"<b>trial {point.trial}</b>{'' if point.complete else ', stopped early'}",
        _wrapped(point.config.label()),
        f"speedup {_with_interval(metrics)}",
        f"{metrics['tokens_per_second']:.1f} tokens/s, acceptance {metrics['acceptance_rate']:.2f}",
        *([f"predicted {point.predicted:.3f}"] if point.predicted else []),
        f"output {output_state(point.config, metrics)}",
    ]
    return "<br>".join(lines)


def color_of(method: str) -> str:
    """Return the declared colour of a method."""
    known = config.methods()
    return known[method].color if method in known else OTHER


def methods(found: Set[str]) -> list[str]:
    """Return methods in the order of their ranks, unknown ones last."""
    known = config.methods()
    return [method for method in known if method in found] + sorted(found - known.keys())


def _figure(x: str, y: str, plain: float | None = None) -> go.Figure:
    """Return a figure in the style of the page, with titled axes and, if given, a line at the speedup of plain decoding."""
    titles = {"xaxis": {"title": {"text": x or None}}, "yaxis": {"title": {"text": y or None}}}
    chart = go.Figure(layout={"template": {"layout": _STYLE}, **titles})
    return chart if plain is None else chart.add_hline(y=plain, line=_DOTTED, layer="below")


_Bars = tuple[Sequence[float], Sequence[float]]  # lengths above and below


def _add_trials(
    chart: go.Figure,
    measured: Sequence[Point],
    x: Sequence[float],
    y: Sequence[float],
    bars: Mapping[str, _Bars] = MappingProxyType({}),
    texts: Sequence[str] | None = None,
) -> None:
    """Add trials, a trace for each drafter and way to end; ``bars`` are by ``error_x`` or ``error_y``."""
    shown = texts or [describe(point) for point in measured]
    for method, complete in sorted({(point.config.method, point.complete) for point in measured}):
        places = [place for place, p in enumerate(measured) if (p.config.method, p.complete) == (method, complete)]
        color = color_of(method)
        style = {"symmetric": False, "width": 2, "thickness": 1, "color": f"{color}80"}
        lengths = {axis: {"array": _at(places, up), "arrayminus": _at(places, down)} for axis, (up, down) in bars.items()}
        chart.add_scatter(
            mode="markers",
            name=f"{html.escape(method.replace('_', ' '))}{'' if complete else ', stopped early'}",
            x=_at(places, x),
            y=_at(places, y),
            marker={"color": color, "opacity": 0.85, "size": 8, "symbol": "circle" if complete else "x-thin-open"},
            text=_at(places, shown),
            hoverinfo="text",
            **{axis: style | length for axis, length in lengths.items()},
        )


def _at(places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    return [values[place] for place in places]


def _add_front(
    chart: go.Figure, measured: Sequence[Point], x: Sequence[float], y: Sequence[float], more_is_better: bool
) -> None:
    """Add the Pareto front of the trials that may lead, as a line: no other is better in both ``x`` and ``y``."""
    leading = [place for place, point in enumerate(measured) if point.may_lead]
    front = pareto_front({place: (y[place], -x[place] if more_is_better else x[place]) for place in leading})[::-1]
    _add_line(chart, "Pareto front", _at(front, x), _at(front, y), dash="dash")


def _add_line(chart: go.Figure, name: str, x: Sequence[float], y: Sequence[float], dash: str = "solid") -> None:
    """Add a line in steps, unless it has no points."""
    if x:
        line = {"color": _INK, "width": 1.5, "shape": "hv", "dash": dash}
        chart.add_scatter(mode="lines", name=name, x=x, y=y, line=line, hoverinfo="skip")


def _intervals(measured: Sequence[Point]) -> _Bars:
    farthest = _FARTHEST * max(1.0, *(point.speedup for point in measured))
    return _bars([point.metrics for point in measured], farthest)


def _bars(measured: Sequence[Mapping[str, float]], farthest: float) -> _Bars:
    """Return the lengths of intervals above and below the speedups, cut at ``farthest``."""
    up = [abs(min(each["speedup_high"], max(farthest, each["speedup"])) - each["speedup"]) for each in measured]
    return up, [abs(each["speedup"] - max(each["speedup_low"], 0.0)) for each in measured]


def _heat_map(cells: NDArray[np.float64], texts: list[list[str]], name: str) -> go.Figure:
    """Return a map of a value for each sub-layer, ``[2, layers]``; unknown cells stay empty."""
    title = {"text": name, "side": "top"}
    chart = _figure("", "").add_heatmap(
        z=cells.tolist(),
        text=texts,
        y=["attention", "MLP"],
        colorscale="Viridis",
        xgap=1,
        ygap=1,
        hoverongaps=False,
        colorbar={"orientation": "h", "thickness": 10, "y": 1.02, "yanchor": "bottom", "title": title},
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
            median, tail = (_milliseconds(requests, latency, percent) for percent in (50, 95))
            lines.append(f"{title}: {median:.1f}, 95 % below {tail:.1f}")
    return "<br>".join(lines)


def _with_interval(metrics: Mapping[str, float]) -> str:
    return f"{metrics['speedup']:.3f} ({metrics['speedup_low']:.2f} to {metrics['speedup_high']:.2f})"


def _wrapped(text: str) -> str:
    """Return a text in short lines, as plotly shows it; its own markup is shown as it is written."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(text, _HOVER_COLUMNS))


def _shortened(text: str, lines: int = 1) -> str:
    """Return the beginning of a text that fits into so many lines, as plotly shows it."""
    return "<br>".join(map(html.escape, textwrap.wrap(text, _HOVER_COLUMNS, max_lines=lines, placeholder="…")))


@dataclass(frozen=True)
class _Span:
    """The time of a trial: its seconds, 0.0 if it was killed, and its begin after the study's start, without pauses."""

    trial: FrozenTrial
    start: datetime
    seconds: float
    begin: float = 0.0

    @property
    def lane(self) -> str:
        return str(self.trial.user_attrs.get(WORKER, _ONE_LANE))

    @property
    def method(self) -> str:
        return configuration(self.trial).method if "config" in self.trial.user_attrs else "not sampled"

    @property
    def outcome(self) -> str:
        """The way it ended: the name of its state, that it was killed without a trace, or that the engine failed."""
        if self.trial.state == TrialState.FAIL and not self.seconds:
            return _KILLED
        failed = str(self.trial.user_attrs.get("reason")).startswith(ENGINE_FAILED)
        return _FAILED if failed else self.trial.state.name.lower()


def timeline(trials: Sequence[FrozenTrial], now: datetime) -> tuple[go.Figure | None, str]:
    """Return the timeline of the trials that have started, and what it shows besides finished trials.

    ``now`` is the end of running trials, with a time zone.
    """
    spans, pauses = _spans(trials, now)
    if not spans:
        return None, ""
    total = max(span.begin + span.seconds for span in spans)
    unit, name = _unit(total)
    chart = _figure(f"{name} in which trials ran", "")
    chart.update_xaxes(range=[-0.01 * total / unit, 1.02 * total / unit or 1.0])
    chart.update_layout(barmode="overlay", margin_t=28 if pauses else 10, margin_l=12)
    _set_lanes(chart, spans)
    for offset, seconds in pauses:
        chart.add_vline(x=offset / unit, line={"color": _INK, "width": 1, "dash": "dash"})
        note = {"text": _duration(seconds), "showarrow": False, "yref": "paper", "y": 1, "yanchor": "bottom"}
        chart.add_annotation(x=offset / unit, xanchor="right" if 2 * offset > total else "left", **note)
    groups = sorted({(span.method, span.outcome) for span in spans if span.outcome != _KILLED})
    for method, outcome in groups:
        _add_spans(chart, [span for span in spans if (span.method, span.outcome) == (method, outcome)], unit)
    if killed := [span for span in spans if span.outcome == _KILLED]:
        chart.add_scatter(
            mode="markers",
            name=_KILLED,
            x=[span.begin / unit for span in killed],
            y=[span.lane for span in killed],
            marker={"symbol": "x", "size": 11, "color": _INK, "line": {"color": "#ffffff", "width": 1}},
            text=[_describe_span(span) for span in killed],
            hoverinfo="text",
        )
    outcomes = {span.outcome for span in spans}
    notes = [note for outcome, (note, _) in _OUTCOMES.items() if outcome in outcomes]
    return chart, " ".join([*notes, *(["Dashed: a pause that is cut out."] if pauses else [])])


def _spans(trials: Sequence[FrozenTrial], now: datetime) -> tuple[list[_Span], list[tuple[float, float]]]:
    """Return the times of the trials that have started, in the order of their starts, and the pauses between them.

    Trials whose configuration another worker measured at that moment are left out. A pause, in which nothing ran for long,
    has a place and a length, both in seconds.
    """
    spans = []
    for trial in trials:
        if trial.datetime_start is None or DUPLICATE_OF in trial.user_attrs:
            continue
        start = trial.datetime_start.astimezone()  # Optuna's times have no zone in some versions: they are local ones
        seconds = trial.user_attrs.get("seconds")
        if seconds is None and trial.state in FINISHED and trial.datetime_complete is not None:
            seconds = (trial.datetime_complete.astimezone() - start).total_seconds()
        if trial.state == TrialState.RUNNING:
            seconds = (now - start).total_seconds()
        spans.append(_Span(trial, start, max(0.0, float(seconds or 0.0))))
    spans.sort(key=lambda span: span.start)
    minimum = max(_MIN_PAUSE, _PAUSE_SHARE * sum(span.seconds for span in spans))
    placed: list[_Span] = []
    pauses: list[tuple[float, float]] = []
    cut, end = 0.0, spans[0].start if spans else now
    for span in spans:
        idle = (span.start - end).total_seconds()
        if idle > minimum:
            pauses.append(((end - spans[0].start).total_seconds() - cut, idle))
            cut += idle
        placed.append(replace(span, begin=(span.start - spans[0].start).total_seconds() - cut))
        end = max(end, span.start + timedelta(seconds=span.seconds))
    return placed, pauses


def _set_lanes(chart: go.Figure, spans: Sequence[_Span]) -> None:
    """Give each worker a lane. Names lie in the lanes, because a phone has no place beside them."""
    lanes = sorted({span.lane for span in spans}, key=_natural, reverse=True)
    chart.update_yaxes(type="category", categoryarray=lanes, categoryorder="array", fixedrange=True)
    chart.update_yaxes(showticklabels=False, range=[-0.5, len(lanes) - 0.4])
    chart.update_layout(height=110 + 46 * len(lanes))
    for place, lane in enumerate(lanes if lanes != [_ONE_LANE] else ()):
        name = {"text": _shortened(lane), "font_size": 12, "showarrow": False}
        chart.add_annotation(xref="paper", x=0, xanchor="left", y=place + 0.4, **name)


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in a text by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def _add_spans(chart: go.Figure, spans: Sequence[_Span], unit: float) -> None:
    """Add the bars of the trials of one method and outcome."""
    method, outcome, state = spans[0].method, spans[0].outcome, spans[0].trial.state
    chart.add_bar(
        orientation="h",
        width=0.45,
        name=f"{html.escape(method.replace('_', ' '))}, {outcome}",
        base=[span.begin / unit for span in spans],
        x=[span.seconds / unit for span in spans],
        y=[span.lane for span in spans],
        marker_color=color_of(method) if state in FINISHED else _GREY,
        marker_line={"color": _INK, "width": 1} if outcome == _INTERRUPTED else {"color": "#ffffff", "width": 0.5},
        marker_pattern={"shape": "x", "size": 5, "fgcolor": _INK} if outcome == _FAILED else None,
        marker_opacity=0.45 if outcome == _PRUNED else 1.0,
        hoverinfo="text",
        hovertext=[_describe_span(span) for span in spans],
    )


def _describe_span(span: _Span) -> str:
    """Return the text that is shown for a trial under the pointer."""
    trial, known = span.trial, span.trial.user_attrs
    lines = [f"<b>trial {trial.number}</b>{_OUTCOMES.get(span.outcome, ('', ''))[1]}"]
    lines += [_wrapped(configuration(trial).label())] if "config" in known else []
    lines.append(f"{span.start:%Y-%m-%d %H:%M:%S}, {_KILLED if span.outcome == _KILLED else _duration(span.seconds)}")
    lines += [_wrapped(f"on {known[WORKER]}")] if WORKER in known else []
    lines += [f"takes over trial {known[RETRY_OF]}"] if RETRY_OF in known else []
    lines += [_wrapped(str(known["reason"]))] if "reason" in known else []
    return "<br>".join(lines)


def _unit(seconds: float) -> tuple[float, str]:
    """Return the seconds and the name of the unit that a duration is shown in."""
    return next((unit, name) for minimum, unit, name in _UNITS if seconds >= minimum)


def _duration(seconds: float) -> str:
    unit, name = _unit(seconds)
    return f"{seconds / unit:.1f} {name}"
