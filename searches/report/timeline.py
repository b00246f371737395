"""The timeline of a study's trials: one lane for each worker, with hours in which nothing ran cut out."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from searches.report.charts import Figure, layout, wrapped
from searches.report.trial_points import COLORS, OTHER
from searches.study.leaderboard import FINISHED, configuration
from searches.tracking.names import WORKER

_LEAST_PAUSE = 60.0  # seconds without a trial that are cut out, and at least this share of the time with trials:
_PAUSE_SHARE = 0.1
_ONE_LANE = "trials"
_UNFINISHED = "#9aa3af"
_UNITS = ((3 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


@dataclass(frozen=True)
class Span:
    """The time of a trial.

    Args:
        trial: the trial.
        start: its start.
        seconds: its duration; 0.0 for a killed one, whose end is unknown.
    """

    trial: FrozenTrial
    start: datetime
    seconds: float

    @property
    def end(self) -> datetime:
        """Its end."""
        return self.start + timedelta(seconds=self.seconds)

    @property
    def lane(self) -> str:
        """The worker that ran it, as plotly shows text."""
        return html.escape(str(self.trial.user_attrs.get(WORKER, _ONE_LANE)))


def timeline(trials: Sequence[FrozenTrial], now: datetime) -> Figure | None:
    """Return the timeline of the trials that have started.

    Args:
        trials: finished, failed and running ones.
        now: the end of running trials, with a time zone.
    """
    spans = sorted((span for trial in trials if (span := _span(trial, now)) is not None), key=lambda span: span.start)
    if not spans:
        return None
    offsets, pauses = _cut_pauses(spans)
    total = max(offset + span.seconds for offset, span in zip(offsets, spans, strict=True))
    unit, name = next((unit, name) for least, unit, name in _UNITS if total >= least)
    lanes = sorted({span.lane for span in spans})
    axes = layout(f"{name} in which trials ran", "")
    axes |= {"barmode": "overlay", "bargap": 0.3, "height": 120 + 34 * len(lanes)}
    axes["yaxis"] |= {"type": "category", "categoryarray": lanes[::-1], "categoryorder": "array", "fixedrange": True}
    axes["yaxis"]["showticklabels"] = lanes != [_ONE_LANE]
    axes["xaxis"]["range"] = [-0.01 * total / unit, 1.02 * total / unit or 1.0]
    for offset, seconds in pauses:
        at = offset / unit
        axes["shapes"].append({"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at})
        axes["shapes"][-1]["line"] = {"color": "#111827", "width": 1, "dash": "dash"}
        axes.setdefault("annotations", []).append(
            {"x": at, "yref": "paper", "y": 1, "yanchor": "bottom", "text": _duration(seconds), "showarrow": False}
        )
    axes["margin"]["t"] = 28 if pauses else 10
    placed = list(zip(offsets, spans, strict=True))
    groups = sorted({(_kind(span.trial), span.trial.state) for span in spans}, key=str)
    data = [
        _bars([(at, s) for at, s in placed if (_kind(s.trial), s.trial.state) == group], *group, unit) for group in groups
    ]
    return {"data": data, "layout": axes}


def _span(trial: FrozenTrial, now: datetime) -> Span | None:
    """Return the time of a trial; None if it has not started."""
    start = trial.datetime_start
    if start is None:
        return None
    start = start.astimezone()  # Optuna's times have no zone in some versions and storages: they are local ones
    seconds = trial.user_attrs.get("seconds")
    if seconds is None and trial.state in FINISHED and trial.datetime_complete is not None:
        seconds = (trial.datetime_complete.astimezone() - start).total_seconds()
    if trial.state == TrialState.RUNNING:
        seconds = (now - start).total_seconds()
    return Span(trial, start, max(0.0, float(seconds or 0.0)))


def _cut_pauses(spans: Sequence[Span]) -> tuple[list[float], list[tuple[float, float]]]:
    """Return the start of each trial in seconds, without long times in which nothing ran, and these times.

    Args:
        spans: in the order of their starts.

    Returns:
        The starts, and the place and length of each pause in seconds.
    """
    busy = sum(span.seconds for span in spans)
    least = max(_LEAST_PAUSE, _PAUSE_SHARE * busy)
    first, end, cut = spans[0].start, spans[0].start, 0.0
    offsets, pauses = [], []
    for span in spans:
        idle = (span.start - end).total_seconds()
        if idle > least:
            pauses.append(((end - first).total_seconds() - cut, idle))
            cut += idle
        offsets.append((span.start - first).total_seconds() - cut)
        end = max(end, span.end)
    return offsets, pauses


def _bars(placed: Sequence[tuple[float, Span]], kind: str, state: TrialState, unit: float) -> dict[str, Any]:
    """Return the bars of the trials of one kind and state."""
    done = state in FINISHED
    marker: dict[str, Any] = {
        "color": COLORS.get(kind, OTHER) if done else _UNFINISHED,
        "line": {"color": "#ffffff", "width": 0.5},
    }
    if state == TrialState.PRUNED:
        marker["opacity"] = 0.45
    elif not done:
        marker["line"] = {"color": "#111827", "width": 1}  # a killed trial has no length
    return {
        "type": "bar",
        "orientation": "h",
        "name": f"{html.escape(kind.replace('_', ' '))}, {state.name.lower()}",
        "base": [offset / unit for offset, _ in placed],
        "x": [span.seconds / unit for _, span in placed],
        "y": [span.lane for _, span in placed],
        "marker": marker,
        "hoverinfo": "text",
        "hovertext": [_describe(span) for _, span in placed],
    }


def _kind(trial: FrozenTrial) -> str:
    return configuration(trial).kind if "config" in trial.user_attrs else "not sampled"


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
    lines.append(f"{span.start:%Y-%m-%d %H:%M:%S}, {_duration(span.seconds) if span.seconds else 'killed'}")
    if "reason" in trial.user_attrs:
        lines.append(wrapped(str(trial.user_attrs["reason"])))
    return "<br>".join(lines)


def _duration(seconds: float) -> str:
    unit, name = next((unit, name) for least, unit, name in _UNITS if seconds >= least)
    return f"{seconds / unit:.1f} {name}"
