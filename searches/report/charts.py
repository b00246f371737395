"""The charts of a report: plotly figures, which plotly.js draws on the page, and matplotlib in ``report.png``.

A chart of nothing is None.
"""

from __future__ import annotations

import html
import itertools
import operator
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from plotly import graph_objects as go

from layerskip import DraftPlan
from layerskip.config import methods
from layerskip.draft_plan import BITS, SKIP
from searches.report.tables import may_lead, output_state, pareto_front
from searches.study.finals import Finals
from searches.study.leaderboard import FINISHED, configuration
from searches.study.study import DUPLICATE_OF, finished
from searches.tracking.names import METRICS, PREDICTED, RETRY_OF, WORKER

_GREY, _INK = "#9aa3af", "#111827"
_DOTTED = {"color": "#4b5563", "width": 1, "dash": "dot"}
_LAYOUT = {
    "template": "plotly_white",
    "margin": {"l": 56, "r": 14, "t": 10, "b": 48},
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1f2937"},
    "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": _GREY, "font": {"color": "#1f2937"}},
    "showlegend": False,
}
_FARTHEST = 1.3  # an interval is drawn up to this multiple of the fastest trial; two prompts may have one without end
_FEW = 12  # trials or layers that each have a tick
_HOVER_COLUMNS = 44  # characters of a line; a narrow screen has no more
_MIN_PAUSE = 60.0  # seconds without a trial that are cut out, and at least this share of the time with trials:
_PAUSE_SHARE = 0.1


def of_study(
    study: optuna.Study, finals: Finals | None, singles: NDArray[np.float64] | None, now: datetime
) -> dict[str, go.Figure]:
    """Return the charts of a study by their names, without those of nothing.

    ``singles`` are the agreements of scans, ``[2, layers]``, with one attention or MLP skipped; ``now`` has a time zone.
    """
    done = finished(study)
    charts = {
        "history": history(done),
        "acceptance": acceptance(done),
        "load": throughput(done),
        "scans": agreement_of_scans(singles),
        "plan": fastest_plan(done, 0 if singles is None else singles.shape[1]),
        "timeline": timeline(study.get_trials(deepcopy=False), now),
        "held-out": held_out(finals),
    }
    return {name: chart for name, chart in charts.items() if chart is not None}


def legend(trials: Iterable[FrozenTrial]) -> dict[str, str]:
    """Return the drafters of finished trials, in the order of their ranks, with their colours."""
    found = {configuration(trial).method for trial in trials}
    shown = {name: "no drafting" if name == "none" else name.replace("_", " ") for name in methods() if name in found}
    return {text: _color(name) for name, text in shown.items()}


def history(trials: Iterable[FrozenTrial]) -> go.Figure | None:
    """Return the speedup of each trial in order, with its interval, and the best so far."""
    measured = _measured(trials)
    if not measured:
        return None
    chart, numbers = _figure("trial", "speedup", plain=1.0), [trial.number for trial in measured]
    _add_trials(
        chart, measured, numbers, _speedups(measured), error_y=_bars([trial.user_attrs["measurement"] for trial in measured])
    )
    leading = [trial for trial in measured if may_lead(trial)]
    _add_line(chart, "best so far", [t.number for t in leading], list(itertools.accumulate(_speedups(leading), max)))
    return chart.update_xaxes(dtick=1) if measured[-1].number < _FEW else chart


def acceptance(trials: Iterable[FrozenTrial]) -> go.Figure | None:
    """Return the speedup against the acceptance rate of trials that draft, and the trials that none exceeds in both."""
    drafting = [trial for trial in _measured(trials) if configuration(trial).method != "none"]
    if not drafting:
        return None
    chart = _figure("acceptance rate", "speedup", plain=1.0).update_xaxes(range=[-0.03, 1.03])
    rates = [float(trial.user_attrs["measurement"]["acceptance_rate"]) for trial in drafting]
    _add_trials(chart, drafting, rates, _speedups(drafting))
    return _add_front(chart, drafting, rates, _speedups(drafting), more_is_better=True)


def throughput(trials: Iterable[FrozenTrial]) -> go.Figure | None:
    """Return the engine's tokens per second against the median time per token, with the Pareto front and plain decoding."""
    known = [trial for trial in _measured(trials) if {"throughput", "tpot_p50"} <= trial.user_attrs.get(METRICS, {}).keys()]
    if not known:
        return None
    chart, loads = _figure("ms per token", "tokens/s of the engine"), [trial.user_attrs.get(METRICS, {}) for trial in known]
    speeds, milliseconds = [load["throughput"] for load in loads], [1000 * load["tpot_p50"] for load in loads]
    _add_trials(chart, known, milliseconds, speeds)
    _add_front(chart, known, milliseconds, speeds, more_is_better=False)
    baselines = ["baseline_throughput", "baseline_tpot_p50"]
    plain = [[load[name] for name in baselines] for load in loads if set(baselines) <= load.keys()]
    if plain:  # trials were compared with plain decoding under the load
        speed, seconds = np.median(plain, axis=0).tolist()
        marker = {"color": _INK, "size": 13, "symbol": "star-open"}
        chart.add_scatter(mode="markers", name="plain decoding", x=[1000 * seconds], y=[speed], marker=marker)
    return chart


def agreement_of_scans(singles: NDArray[np.float64] | None) -> go.Figure | None:
    """Return how often the first drafted token is right with one sub-layer skipped. Unknown cells stay empty."""
    if singles is None or np.isnan(singles).all():
        return None
    bar = {"title": {"text": "first drafted token right", "side": "top"}}
    style: Any = {
        "colorscale": "Viridis",
        "hoverongaps": False,
        "hovertemplate": "layer %{x}, %{y}<br>%{z:.3f}<extra></extra>",
    }
    return _by_layer(singles.tolist(), bar, **style).update_layout(plot_bgcolor="#e5e7eb")


def fastest_plan(trials: Iterable[FrozenTrial], layers: int) -> go.Figure | None:
    """Return what the fastest self-draft skips and reads at fewer bits, by layer, unless it treats all layers alike."""
    fastest = sorted(_measured(trials), key=lambda trial: -float(trial.user_attrs["measurement"]["speedup"]))
    parts = [part for trial in fastest for config in [configuration(trial)] for part in config.members or (config,)]
    plans = [DraftPlan.parse(part.plan, layers) for part in parts if layers and methods()[part.method].plan_field]
    plan = plans[0] if plans else DraftPlan.none(layers)
    shown = [[plan.treatment(kind, layer) for layer in range(layers)] for kind in ("attention", "mlp")]
    if len(set(itertools.chain(*shown))) < 2:
        return None
    names = SKIP, *sorted(BITS, key=lambda name: BITS[name] or 16)
    colors = ["#e5e7eb", "#1b9e77", "#7fc9a9", "#1f2937"]
    scale = [(step / 4, color) for place, color in enumerate(colors) for step in (place, place + 1)]
    return _by_layer(
        [[names.index(name) for name in row] for row in shown],
        {"tickvals": list(range(4)), "ticktext": list(names)},
        text=shown,
        zmin=-0.5,
        zmax=3.5,
        colorscale=scale,
        hovertemplate="layer %{x}, %{y}<br>%{text}<extra></extra>",
    )


def _by_layer(values: Sequence[Sequence[float]], colorbar: Mapping[str, Any], **style: Any) -> go.Figure:
    place = {"orientation": "h", "thickness": 10, "y": 1.02, "yanchor": "bottom"}
    chart = _figure().add_heatmap(z=values, y=["attention", "MLP"], xgap=1, ygap=1, colorbar=place | dict(colorbar), **style)
    chart.update_xaxes(showgrid=False, **({"dtick": 1} if len(values[0]) <= _FEW else {"nticks": 12}))
    return chart.update_yaxes(showgrid=False, fixedrange=True, autorange="reversed")


def held_out(finals: Finals | None) -> go.Figure | None:
    """Return the held-out speedup of each finalist with its interval, and its speedup in the search; fastest at the top."""
    if finals is None or not finals.finalists:
        return None
    ranked, count = finals.finalists[::-1], len(finals.finalists)
    chart = _figure("speedup").add_vline(x=1.0, line=_DOTTED).update_layout(height=90 + 72 * count)
    labels = [_wrapped(finalist.config.label(), max_lines=2, placeholder="…") for finalist in ranked]
    _add_lanes(chart, range=[-0.3, count - 0.3], tickvals=list(range(count)), ticktext=labels, showgrid=False)
    texts = [
        f"{_wrapped(finalist.config.label())}<br>held-out {_with_interval(finalist.held_out)}<br>"
        f"in the search {finalist.search_speedup:.3f}"
        for finalist in ranked
    ]
    shown = {"mode": "markers", "text": texts, "hoverinfo": "text", "y": list(range(count))}
    metrics, marker = [f.held_out for f in ranked], {"color": [_color(f.config.method) for f in ranked], "size": 10}
    chart.add_scatter(x=[each["speedup"] for each in metrics], error_x=_bars(metrics), marker=marker, **shown)
    stroke = {"color": _INK, "size": 14, "symbol": "line-ns-open"}
    return chart.add_scatter(x=[f.search_speedup for f in ranked], marker=stroke, **shown)


def timeline(trials: Sequence[FrozenTrial], now: datetime) -> go.Figure | None:
    """Return the times of the trials that have started, with a lane for each worker; pauses are cut out.

    A trial that was killed is a stroke. Trials whose configuration another worker measured at that moment are left out.
    """
    begun = [(trial.datetime_start.astimezone(), trial) for trial in trials if trial.datetime_start is not None]
    begun = sorted((each for each in begun if DUPLICATE_OF not in each[1].user_attrs), key=operator.itemgetter(0))
    if not begun:
        return None
    starts, shown = zip(*begun, strict=True)
    durations = [timedelta(seconds=_seconds(trial, now)) for trial in shown]
    lanes = [str(trial.user_attrs.get(WORKER, "trials")) for trial in shown]
    order = sorted(set(lanes), key=lambda lane: (len(lane), lane), reverse=True)  # 10 after 2
    chart = _figure().update_layout(height=110 + 46 * len(order))
    chart.update_xaxes(type="date", rangebreaks=[{"bounds": pause} for pause in _pauses(starts, durations)])
    span = [-0.5, len(order) - 0.4]
    _add_lanes(chart, range=span, type="category", categoryarray=order, showticklabels=len(order) > 1)
    colors = [_color(configuration(trial).method) if trial.state in FINISHED else _GREY for trial in shown]
    opacities = [0.45 if trial.state == TrialState.PRUNED else 1.0 for trial in shown]
    return chart.add_bar(
        orientation="h",
        width=0.45,
        base=starts,
        x=[1000 * taken.total_seconds() for taken in durations],
        y=lanes,
        marker={"color": colors, "opacity": opacities, "line": {"color": _INK, "width": 0.5}},
        hoverinfo="text",
        hovertext=list(map(_describe_span, starts, durations, shown)),
    )


def _color(method: str) -> str:
    return methods()[method].color


def _speedups(measured: Sequence[FrozenTrial]) -> list[float]:
    return [float(trial.user_attrs["measurement"]["speedup"]) for trial in measured]


def _figure(x: str | None = None, y: str | None = None, plain: float | None = None) -> go.Figure:
    """Return a figure in the style of the page, with titled axes and, if given, a line at the speedup of plain decoding."""
    chart = go.Figure(layout=_LAYOUT).update_layout(xaxis_title_text=x, yaxis_title_text=y)
    return chart if plain is None else chart.add_hline(y=plain, line=_DOTTED)


def _measured(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    return [trial for trial in trials if "measurement" in trial.user_attrs]


def _describe(trial: FrozenTrial) -> str:
    known = trial.user_attrs
    metrics, requests = known["measurement"], known.get(METRICS, {})
    lines = [
        f"<b>trial {trial.number}</b>{'' if trial.state == TrialState.COMPLETE else ', stopped early'}",
        _wrapped(configuration(trial).label()),
        f"speedup {_with_interval(metrics)}",
        f"{metrics['tokens_per_second']:.1f} tokens/s, acceptance {metrics['acceptance_rate']:.2f}",
        *([f"predicted {known[PREDICTED]:.3f}"] if known.get(PREDICTED) else []),
        *([f"{requests['throughput']:.1f} tokens/s of the engine"] if "throughput" in requests else []),
        f"output {output_state(metrics)}",
    ]
    return "<br>".join(lines)


def _bars(measured: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    farthest = _FARTHEST * max(1.0, *(each["speedup"] for each in measured))
    down = [abs(each["speedup"] - max(each["speedup_low"], 0.0)) for each in measured]
    up = [abs(min(each["speedup_high"], farthest) - each["speedup"]) for each in measured]
    return {"symmetric": False, "array": up, "arrayminus": down, "thickness": 1, "width": 3, "color": _GREY}


def _add_trials(
    chart: go.Figure, measured: Sequence[FrozenTrial], x: Sequence[float], y: Sequence[float], **bars: Any
) -> None:
    """Add trials in the colours of their drafters. Those that were stopped early are crosses."""
    complete = [trial.state == TrialState.COMPLETE for trial in measured]
    marker = {
        "color": [_color(configuration(trial).method) for trial in measured],
        "symbol": ["circle" if each else "x-thin-open" for each in complete],
        "opacity": 0.85,
        "size": 8,
    }
    texts = [_describe(trial) for trial in measured]
    chart.add_scatter(mode="markers", name="trials", x=x, y=y, marker=marker, text=texts, hoverinfo="text", **bars)


def _add_front(
    chart: go.Figure, measured: Sequence[FrozenTrial], x: Sequence[float], y: Sequence[float], more_is_better: bool
) -> go.Figure:
    """Add the Pareto front of the trials that may lead, as a line: no other is better in both ``x`` and ``y``."""
    leading = [place for place, trial in enumerate(measured) if may_lead(trial)]
    front = pareto_front({place: (y[place], -x[place] if more_is_better else x[place]) for place in leading})[::-1]
    return _add_line(chart, "Pareto front", [x[place] for place in front], [y[place] for place in front], dash="dash")


def _add_line(chart: go.Figure, name: str, x: Sequence[float], y: Sequence[float], dash: str = "solid") -> go.Figure:
    line = {"color": _INK, "width": 1.5, "shape": "hv", "dash": dash}
    return chart.add_scatter(mode="lines", name=name, x=x, y=y, line=line, hoverinfo="skip")


def _with_interval(metrics: Mapping[str, float]) -> str:
    return f"{metrics['speedup']:.3f} ({metrics['speedup_low']:.2f} to {metrics['speedup_high']:.2f})"


def _add_lanes(chart: go.Figure, **axis: Any) -> None:
    """Turn the vertical axis into lanes. Their names lie in them, because a phone has no place beside them."""
    chart.update_yaxes(fixedrange=True, ticklabelposition="inside top", **axis).update_layout(margin_l=12)


def _wrapped(text: str, **limits: Any) -> str:
    """Return a text in short lines, as plotly shows it; its own markup is shown as it is written."""
    return "<br>".join(map(html.escape, textwrap.wrap(text, _HOVER_COLUMNS, **limits)))


def _seconds(trial: FrozenTrial, now: datetime) -> float:
    """Return the seconds of a trial that has started; 0 if it was killed."""
    start, end = trial.datetime_start, now if trial.state == TrialState.RUNNING else trial.datetime_complete
    if "seconds" in trial.user_attrs or start is None or end is None or trial.state == TrialState.FAIL:
        return float(trial.user_attrs.get("seconds", 0.0))
    return max(0.0, (end.astimezone() - start.astimezone()).total_seconds())


def _pauses(starts: Sequence[datetime], durations: Sequence[timedelta]) -> list[tuple[datetime, datetime]]:
    """Return the times between trials, in the order of their starts, in which nothing ran for long."""
    minimum = max(timedelta(seconds=_MIN_PAUSE), _PAUSE_SHARE * sum(durations, timedelta()))
    pauses, end = [], starts[0]
    for start, taken in zip(starts, durations, strict=True):
        if start - end > minimum:
            pauses.append((end, start))
        end = max(end, start + taken)
    return pauses


def _describe_span(start: datetime, taken: timedelta, trial: FrozenTrial) -> str:
    known = trial.user_attrs
    lines = [
        f"<b>trial {trial.number}</b>, {trial.state.name.lower()}",
        *([_wrapped(configuration(trial).label())] if "config" in known else []),
        f"{start:%Y-%m-%d %H:%M:%S}, {taken.total_seconds():.1f} seconds",
        *([_wrapped(f"on {known[WORKER]}")] if WORKER in known else []),
        *([f"takes over trial {known[RETRY_OF]}"] if RETRY_OF in known else []),
        *([_wrapped(str(known["reason"]))] if "reason" in known else []),
    ]
    return "<br>".join(lines)
