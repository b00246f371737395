"""The timeline of a study's trials: one lane for each worker, with hours in which nothing ran cut out."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from optuna.trial import FrozenTrial, TrialState
from plotly import graph_objects as go

from searches.report.charts import GREY, INK, color_of, figure, shortened, wrapped
from searches.study.leaderboard import FINISHED, configuration
from searches.study.study import DUPLICATE_OF
from searches.tracking.names import ENGINE_FAILED, RETRY_OF, WORKER

_MIN_PAUSE = 60.0  # seconds without a trial that are cut out, and at least this share of the time with trials:
_PAUSE_SHARE = 0.1
_ONE_LANE = "trials"
_UNITS = ((3 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_FAILED = "engine failed"


@dataclass(frozen=True)
class Span:
    """The time of a trial.

    Args:
        trial: the trial.
        start: its start.
        seconds: its duration; 0.0 for a killed one, whose end is unknown.
        begin: seconds from the study's start to its own, without long times in which nothing ran.
    """

    trial: FrozenTrial
    start: datetime
    seconds: float
    begin: float = 0.0

    @property
    def lane(self) -> str:
        """The worker that ran it."""
        return str(self.trial.user_attrs.get(WORKER, _ONE_LANE))

    @property
    def end(self) -> datetime:
        """Its end."""
        return self.start + timedelta(seconds=self.seconds)

    @property
    def killed(self) -> bool:
        """True if it was interrupted without a trace of its end."""
        return self.trial.state == TrialState.FAIL and not self.seconds

    @property
    def method(self) -> str:
        """Its drafter."""
        return configuration(self.trial).method if "config" in self.trial.user_attrs else "not sampled"

    @property
    def outcome(self) -> str:
        """The way it ended: the name of its state, or that the engine failed."""
        failed = str(self.trial.user_attrs.get("reason")).startswith(ENGINE_FAILED)
        return _FAILED if failed else self.trial.state.name.lower()


def timeline(trials: Sequence[FrozenTrial], now: datetime) -> go.Figure | None:
    """Return the timeline of the trials that have started.

    Args:
        trials: finished, failed and running ones.
        now: the end of running trials, with a time zone.
    """
    spans, pauses = _spans(trials, now)
    if not spans:
        return None
    total = max(span.begin + span.seconds for span in spans)
    unit, name = next((unit, name) for minimum, unit, name in _UNITS if total >= minimum)
    chart = figure(f"{name} in which trials ran", "")
    chart.update_xaxes(range=[-0.01 * total / unit, 1.02 * total / unit or 1.0])
    chart.update_layout(barmode="overlay", margin_t=28 if pauses else 10, margin_l=12)
    _set_lanes(chart, spans)
    for offset, seconds in pauses:
        dashed = {"color": INK, "width": 1, "dash": "dash"}
        chart.add_vline(x=offset / unit, line=dashed)
        note = {"text": _duration(seconds), "showarrow": False, "yref": "paper", "y": 1, "yanchor": "bottom"}
        chart.add_annotation(x=offset / unit, xanchor="right" if 2 * offset > total else "left", **note)
    ended = [span for span in spans if not span.killed]
    for group in sorted({(span.method, span.outcome) for span in ended}):
        _add_bars(chart, [span for span in ended if (span.method, span.outcome) == group], unit)
    if killed := [span for span in spans if span.killed]:
        chart.add_scatter(
            mode="markers",
            name="killed",
            x=[span.begin / unit for span in killed],
            y=[span.lane for span in killed],
            marker={"symbol": "x", "size": 11, "color": INK, "line": {"color": "#ffffff", "width": 1}},
            text=[_describe(span) for span in killed],
            hoverinfo="text",
        )
    return chart


def timeline_notes(trials: Sequence[FrozenTrial], now: datetime) -> str:
    """Return what the timeline shows besides finished trials; the arguments are those of :func:`timeline`."""
    spans, pauses = _spans(trials, now)
    outcomes = {span.outcome for span in spans}
    sentences = {
        "Faint: stopped early or not run.": TrialState.PRUNED.name.lower() in outcomes,
        "Hatched: the engine failed.": _FAILED in outcomes,
        "Grey: running.": TrialState.RUNNING.name.lower() in outcomes,
        "Grey with a frame: interrupted.": any(s.trial.state == TrialState.FAIL and not s.killed for s in spans),
        "Cross: killed.": any(span.killed for span in spans),
        "Dashed: a pause that is cut out.": bool(pauses),
    }
    return " ".join(sentence for sentence, holds in sentences.items() if holds)


def _spans(trials: Sequence[FrozenTrial], now: datetime) -> tuple[list[Span], list[tuple[float, float]]]:
    """Return the times of the trials that have started, in the order of their starts, and the pauses between them.

    Trials whose configuration another worker measured at that moment are left out. A pause, in which nothing ran for long,
    has a place and a length, both in seconds.
    """
    spans = []
    for trial in trials:
        start = trial.datetime_start
        if start is None or DUPLICATE_OF in trial.user_attrs:
            continue
        start = start.astimezone()  # Optuna's times have no zone in some versions and storages: they are local ones
        seconds = trial.user_attrs.get("seconds")
        if seconds is None and trial.state in FINISHED and trial.datetime_complete is not None:
            seconds = (trial.datetime_complete.astimezone() - start).total_seconds()
        if trial.state == TrialState.RUNNING:
            seconds = (now - start).total_seconds()
        spans.append(Span(trial, start, max(0.0, float(seconds or 0.0))))
    spans.sort(key=lambda span: span.start)
    minimum = max(_MIN_PAUSE, _PAUSE_SHARE * sum(span.seconds for span in spans))
    placed: list[Span] = []
    pauses: list[tuple[float, float]] = []
    cut, end = 0.0, spans[0].start if spans else now
    for span in spans:
        idle = (span.start - end).total_seconds()
        if idle > minimum:
            pauses.append(((end - spans[0].start).total_seconds() - cut, idle))
            cut += idle
        placed.append(replace(span, begin=(span.start - spans[0].start).total_seconds() - cut))
        end = max(end, span.end)
    return placed, pauses


def _set_lanes(chart: go.Figure, spans: Sequence[Span]) -> None:
    """Give each worker a lane. Names lie in the lanes, because a phone has no place beside them."""
    lanes = sorted({span.lane for span in spans}, key=_natural, reverse=True)
    chart.update_yaxes(type="category", categoryarray=lanes, categoryorder="array", fixedrange=True)
    chart.update_yaxes(showticklabels=False, range=[-0.5, len(lanes) - 0.4])
    chart.update_layout(height=110 + 46 * len(lanes))
    for place, lane in enumerate(lanes if lanes != [_ONE_LANE] else ()):
        name = {"text": shortened(lane), "font_size": 12, "showarrow": False}
        chart.add_annotation(xref="paper", x=0, xanchor="left", y=place + 0.4, **name)


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in a text by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def _add_bars(chart: go.Figure, spans: Sequence[Span], unit: float) -> None:
    """Add the bars of the trials of one method and outcome."""
    method, outcome, state = spans[0].method, spans[0].outcome, spans[0].trial.state
    failed, interrupted = outcome == _FAILED, state == TrialState.FAIL
    chart.add_bar(
        orientation="h",
        width=0.45,
        name=f"{html.escape(method.replace('_', ' '))}, {outcome}",
        base=[span.begin / unit for span in spans],
        x=[span.seconds / unit for span in spans],
        y=[span.lane for span in spans],
        marker_color=color_of(method) if state in FINISHED else GREY,
        marker_line={"color": INK, "width": 1} if interrupted else {"color": "#ffffff", "width": 0.5},
        marker_pattern={"shape": "x", "size": 5, "fgcolor": INK} if failed else None,
        marker_opacity=0.45 if state == TrialState.PRUNED and not failed else 1.0,
        hoverinfo="text",
        hovertext=[_describe(span) for span in spans],
    )


_STATES = {
    TrialState.PRUNED: ", stopped early or not run",
    TrialState.FAIL: ", interrupted",
    TrialState.RUNNING: ", running",
}


def _describe(span: Span) -> str:
    """Return the text that is shown for a trial under the pointer."""
    trial = span.trial
    lines = [f"<b>trial {trial.number}</b>{_STATES.get(trial.state, '')}"]
    if "config" in trial.user_attrs:
        lines.append(wrapped(configuration(trial).label()))
    lines.append(f"{span.start:%Y-%m-%d %H:%M:%S}, {'killed' if span.killed else _duration(span.seconds)}")
    lines += [wrapped(f"on {trial.user_attrs[WORKER]}")] if WORKER in trial.user_attrs else []
    if RETRY_OF in trial.user_attrs:
        lines.append(f"takes over trial {trial.user_attrs[RETRY_OF]}")
    if "reason" in trial.user_attrs:
        lines.append(wrapped(str(trial.user_attrs["reason"])))
    return "<br>".join(lines)


def _duration(seconds: float) -> str:
    unit, name = next((unit, name) for minimum, unit, name in _UNITS if seconds >= minimum)
    return f"{seconds / unit:.1f} {name}"
