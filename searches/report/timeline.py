"""The timeline of a study's trials: one lane for each worker, with hours in which nothing ran cut out."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from searches.report.drawing import GREY, INK, Figure, layout, shortened, wrapped
from searches.report.trial_points import COLORS, OTHER
from searches.study.leaderboard import FINISHED, configuration
from searches.study.requeue import DUPLICATE_OF
from searches.tracking.names import ENGINE_FAILED, RETRY_OF, WORKER

_LEAST_PAUSE = 60.0  # seconds without a trial that are cut out, and at least this share of the time with trials:
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
    """

    trial: FrozenTrial
    start: datetime
    seconds: float

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
    def kind(self) -> str:
        """Its drafter."""
        return configuration(self.trial).kind if "config" in self.trial.user_attrs else "not sampled"

    @property
    def outcome(self) -> str:
        """The way it ended: the name of its state, or that the engine failed."""
        failed = str(self.trial.user_attrs.get("reason")).startswith(ENGINE_FAILED)
        return _FAILED if failed else self.trial.state.name.lower()


def timeline(trials: Sequence[FrozenTrial], now: datetime) -> Figure | None:
    """Return the timeline of the trials that have started.

    Args:
        trials: finished, failed and running ones.
        now: the end of running trials, with a time zone.
    """
    spans = _spans(trials, now)
    if not spans:
        return None
    offsets, pauses = _cut_pauses(spans)
    total = max(offset + span.seconds for offset, span in zip(offsets, spans, strict=True))
    unit, name = next((unit, name) for least, unit, name in _UNITS if total >= least)
    axes = layout(f"{name} in which trials ran", "")
    axes |= {"barmode": "overlay", "annotations": []}
    axes["xaxis"]["range"] = [-0.01 * total / unit, 1.02 * total / unit or 1.0]
    _set_lanes(axes, spans)
    for offset, seconds in pauses:
        at = offset / unit
        axes["shapes"].append({"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at})
        axes["shapes"][-1]["line"] = {"color": INK, "width": 1, "dash": "dash"}
        note = {"x": at, "yref": "paper", "y": 1, "yanchor": "bottom", "text": _duration(seconds), "showarrow": False}
        axes["annotations"].append(note | {"xanchor": "right" if 2 * offset > total else "left"})
    axes["margin"] |= {"t": 28 if pauses else 10, "l": 12}
    begins = {span.trial.number: offset / unit for offset, span in zip(offsets, spans, strict=True)}
    groups = sorted({(span.kind, span.outcome) for span in spans if not span.killed})
    bars = [_bars([s for s in spans if (s.kind, s.outcome) == group and not s.killed], begins, unit) for group in groups]
    return {"data": [*_takeovers(spans, begins, unit), *bars, *_crosses(spans, begins)], "layout": axes}


def timeline_notes(trials: Sequence[FrozenTrial], now: datetime) -> str:
    """Return what the timeline shows besides finished trials; the arguments are those of :func:`timeline`."""
    spans = _spans(trials, now)
    outcomes, numbers = {span.outcome for span in spans}, {span.trial.number for span in spans}
    sentences = {
        "Faint: stopped early or not run.": TrialState.PRUNED.name.lower() in outcomes,
        "Hatched: the engine failed.": _FAILED in outcomes,
        "Grey: running.": TrialState.RUNNING.name.lower() in outcomes,
        "Grey with a frame: interrupted.": any(s.trial.state == TrialState.FAIL and not s.killed for s in spans),
        "Cross: killed.": any(span.killed for span in spans),
        "Dotted: to the trial that took over.": any(s.trial.user_attrs.get(RETRY_OF) in numbers for s in spans),
        "Dashed: a pause that is cut out.": bool(spans and _cut_pauses(spans)[1]),
    }
    return " ".join(sentence for sentence, holds in sentences.items() if holds)


def _spans(trials: Sequence[FrozenTrial], now: datetime) -> list[Span]:
    """Return the times of the trials that have started, in the order of their starts.

    Trials whose configuration another worker measured at that moment are left out.
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
    return sorted(spans, key=lambda span: span.start)


def _set_lanes(axes: dict[str, Any], spans: Sequence[Span]) -> None:
    """Give each worker a lane. Names lie in the lanes, as a phone has no place beside."""
    lanes = sorted({span.lane for span in spans}, key=_natural, reverse=True)
    axes["yaxis"] |= {"type": "category", "categoryarray": lanes, "categoryorder": "array", "fixedrange": True}
    axes["yaxis"] |= {"showticklabels": False, "range": [-0.5, len(lanes) - 0.4]}
    axes["height"] = 110 + 46 * len(lanes)
    if lanes != [_ONE_LANE]:
        axes["annotations"] += [
            {
                "xref": "paper",
                "x": 0,
                "xanchor": "left",
                "y": place + 0.4,
                "showarrow": False,
                "text": shortened(lane),
                "font": {"size": 12},
            }
            for place, lane in enumerate(lanes)
        ]


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in a text by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


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


def _bars(spans: Sequence[Span], begins: Mapping[int, float], unit: float) -> dict[str, Any]:
    """Return the bars of the trials of one kind and outcome."""
    kind, outcome, state = spans[0].kind, spans[0].outcome, spans[0].trial.state
    marker: dict[str, Any] = {
        "color": COLORS.get(kind, OTHER) if state in FINISHED else GREY,
        "line": {"color": "#ffffff", "width": 0.5},
    }
    if outcome == _FAILED:
        marker["pattern"] = {"shape": "x", "size": 5, "fgcolor": INK}
    elif state == TrialState.PRUNED:
        marker["opacity"] = 0.45
    elif state == TrialState.FAIL:
        marker["line"] = {"color": INK, "width": 1}
    return {
        "type": "bar",
        "orientation": "h",
        "width": 0.45,
        "name": f"{html.escape(kind.replace('_', ' '))}, {outcome}",
        "base": [begins[span.trial.number] for span in spans],
        "x": [span.seconds / unit for span in spans],
        "y": [span.lane for span in spans],
        "marker": marker,
        "hoverinfo": "text",
        "hovertext": [_describe(span) for span in spans],
    }


def _crosses(spans: Sequence[Span], begins: Mapping[int, float]) -> list[dict[str, Any]]:
    """Return a marker at the start of each killed trial, whose end is unknown."""
    killed = [span for span in spans if span.killed]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": "killed",
        "x": [begins[span.trial.number] for span in killed],
        "y": [span.lane for span in killed],
        "marker": {"symbol": "x", "size": 11, "color": INK, "line": {"color": "#ffffff", "width": 1}},
        "text": [_describe(span) for span in killed],
        "hoverinfo": "text",
    }
    return [trace] if killed else []


def _takeovers(spans: Sequence[Span], begins: Mapping[int, float], unit: float) -> list[dict[str, Any]]:
    """Return lines from interrupted trials to the trials that tried their choices again."""
    known = {span.trial.number: span for span in spans}
    x: list[float | None] = []
    y: list[str | None] = []
    for span in spans:
        before = known.get(span.trial.user_attrs.get(RETRY_OF, -1))
        if before is not None:
            x += [begins[before.trial.number] + before.seconds / unit, begins[span.trial.number], None]
            y += [before.lane, span.lane, None]
    line = {"color": INK, "width": 1.5, "dash": "dot"}
    trace = {"type": "scatter", "mode": "lines", "name": "taken over", "x": x, "y": y, "line": line, "hoverinfo": "skip"}
    return [trace] if x else []


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
    unit, name = next((unit, name) for least, unit, name in _UNITS if seconds >= least)
    return f"{seconds / unit:.1f} {name}"
