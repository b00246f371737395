"""``report.html``: a study, finished or running, on one page that opens from the disk and loads nothing."""

from __future__ import annotations

import html
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import TrialState
from plotly.offline import get_plotlyjs

from layerskip.files import atomic_write
from searches.report import charts, load_charts
from searches.report.drawing import Figure, finite, kinds
from searches.report.load_report import levels
from searches.report.page_tables import best_table, finals_table, usage
from searches.report.study_report import verdict, winner_notes
from searches.report.timeline import timeline, timeline_notes
from searches.report.trial_points import COLORS, OTHER, points
from searches.study.finals import Finals
from searches.study.leaderboard import configuration, ranking
from searches.study.study import SETTINGS, finished
from searches.tracking.names import DEVICE

RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"
_PLOTLY = "@plotly@"
_REFRESH = '<meta http-equiv="refresh" content="60">'
_EMPTY = '<p class="empty">Nothing measured yet.</p>'
_HELD_OUT = "Held-out prompts, 95 % intervals. A stroke is the speedup in the search. Dotted: plain decoding."
_LOAD = "Bar: from the median to the 95th percentile. Star: plain decoding. Dashed: the Pareto front of medians."
_BEST = "Speedups are those on the tune prompts that every trial decodes, over all trials of the configuration."
_CHARTS = {
    "history": ("Search history", "Tune prompts, 95 % intervals. Cross: stopped early. Line: the best so far.", "wide"),
    "acceptance": ("Speedup against acceptance", "Dashed: the Pareto front of trials measured to the end.", ""),
    "memory": ("Speedup against memory", "Peak of the GPU, or of the process on a CPU. Dashed: the Pareto front.", ""),
    load_charts.TOKEN: ("Throughput against time per token", "", ""),
    load_charts.FIRST: ("Throughput against time to the first token", "", ""),
    "predictions": ("Predicted against measured", "Predictions were made before the trials ran. Dotted: equal.", ""),
    "skips": (
        "Skipped sub-layers",
        "By layer: the mean speedup of the trials that skipped a sub-layer. Grey: none did.",
        "low wide",
    ),
    "scans": (
        "Scanned sub-layers",
        "By layer: how often the first drafted token is right with one skipped. Grey: unknown.",
        "low wide",
    ),
    "timeline": ("Timeline", "", "fitted wide"),
}
"""Title, text and shape of each chart, in the order of the page; empty texts depend on the study."""
_ALWAYS = "history"
"""The chart that has a place although it has nothing to draw yet."""


@dataclass(frozen=True)
class Page:
    """The content of a page, without the study.

    Args:
        layers: the number of decoder layers of the target.
        trials: the number of finished trials at the end.
        notes: sentences on the study.
        state: ``running``, ``finished``, ``interrupted`` or ``failed``.
        stage: what a running study does now; empty for nothing.
        reason: why the study has ended early; empty if it has not.
        finals: the results on held-out prompts; None before them.
        singles: ``[2, layers]``, the agreement with one attention or MLP sub-layer skipped, from scans; None without any.
    """

    layers: int
    trials: int
    notes: Sequence[str] = ()
    state: str = RUNNING
    stage: str = ""
    reason: str = ""
    finals: Finals | None = None
    singles: NDArray[np.float64] | None = None


def write_page(path: Path, study: optuna.Study, page: Page) -> None:
    """Write the page atomically, so that a reader never sees a part of it."""
    template = (resources.files("searches") / "data" / "report.html").read_text(encoding="utf-8")
    now = datetime.now().astimezone()
    figures = _figures(study, page, now)
    before, after = template.split(_PLOTLY)
    values = {
        "title": html.escape(study.study_name),
        "refresh": _REFRESH if page.state == RUNNING else "",
        "badge": page.state,
        "status": html.escape(": ".join(filter(None, (page.state, page.stage)))),
        "progress": _progress(study, page),
        "written": now.isoformat(),
        "written_text": f"{now:%Y-%m-%d %H:%M:%S %Z}",
        "live": json.dumps(page.state == RUNNING),
        "content": _content(study, page, figures, path, now),
        "figures": json.dumps(finite(figures), allow_nan=False).replace("<", "\\u003c"),
    }
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(string.Template(before).substitute(values))
        file.write(get_plotlyjs())
        file.write(string.Template(after).substitute(values))


def _progress(study: optuna.Study, page: Page) -> str:
    """Return the number of finished trials, of those that run now, and the type of the workers' devices."""
    done = finished(study)
    parts = [f"{len(done)} of {page.trials} trials finished"]
    if page.state == RUNNING and (now := study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))):
        parts.append(f"{len(now)} running")
    parts += sorted({str(trial.user_attrs[DEVICE]) for trial in done if DEVICE in trial.user_attrs})
    return html.escape(", ".join(parts))


def _figures(study: optuna.Study, page: Page, now: datetime) -> dict[str, Figure]:
    """Return the figures that have something to draw, by the identifier of their place on the page."""
    measured = points(finished(study))
    drawn = {
        "history": charts.history(measured),
        "acceptance": charts.acceptance(measured),
        "memory": charts.memory(measured),
        "predictions": charts.predictions(measured),
        "skips": charts.skipped_by_trials(measured, page.layers),
        "scans": charts.agreement_of_scans(page.singles),
        "timeline": timeline(study.get_trials(deepcopy=False), now),
        "held-out": charts.held_out(page.finals),
    }
    for level in levels(point.load for point in measured):
        for latency in (load_charts.TOKEN, load_charts.FIRST):
            drawn[f"{latency}{level}"] = load_charts.throughput(measured, latency, level)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _content(study: optuna.Study, page: Page, figures: Mapping[str, Figure], path: Path, now: datetime) -> str:
    """Return the cards of the page."""
    requests = study.user_attrs.get(SETTINGS, {}).get("load.concurrency", 1)
    cards = []
    for kind, (title, text, shape) in _CHARTS.items():
        for name in [name for name in figures if name.partition("_at_")[0] == kind] or [_ALWAYS] * (kind == _ALWAYS):
            if kind == "timeline":
                text = timeline_notes(study.get_trials(deepcopy=False), now)
            elif kind in (load_charts.TOKEN, load_charts.FIRST):
                text = f"Requests in flight: {name.partition('_at_')[2] or requests}. {_LOAD}"
            cards.append(_chart(figures, name, title, text, shape))
    finals = use = ""
    if page.finals is not None:
        use = f'<section class="card use"><h2>Use the winner</h2>{usage(study, page.finals, path)}</section>'
        chart = _chart(figures, "held-out", "Finalists", _HELD_OUT, "fitted wide")
        finals = f'<div class="grid">{chart}<section class="card wide">{finals_table(page.finals)}</section></div>'
    return "\n".join(
        (
            _verdict(study, page),
            finals,
            use,
            _legend(study),
            f'<div class="grid">{"".join(cards)}</div>',
            f'<section class="card"><h2>Best trials</h2><p>{_BEST}</p>{best_table(study) or _EMPTY}</section>',
        )
    )


def _chart(figures: Mapping[str, Figure], name: str, title: str, text: str, shape: str) -> str:
    """Return the card of a chart; ``shape`` names its classes."""
    place = f'<div class="chart" id="{name}"></div>' if name in figures else _EMPTY
    return f'<section class="card {shape}"><h2>{title}</h2><p>{text}</p>{place}</section>'


def _verdict(study: optuna.Study, page: Page) -> str:
    """Return the verdict, or the leader so far, and the notes."""
    notes = list(page.notes)
    if page.finals is not None:
        first = verdict(page.finals)
        notes += winner_notes(study, page.finals)
    else:
        first = "No configuration that drafts was measured to the end yet."
        for leader in ranking(study)[:1]:
            first = f"Best so far: {leader.config.label()}, {leader.speedup:.2f} x plain decoding on tune prompts."
    if page.state == RUNNING:
        notes.append("The finals follow the last trial. They choose the winner and write best.json.")
    shown = "".join(f"<p>{html.escape(note)}</p>" for note in (first, *notes))
    reason = f'<section class="card reason"><p>{html.escape(page.reason)}</p></section>' if page.reason else ""
    return f'{reason}<section class="card verdict">{shown}</section>'


def _legend(study: optuna.Study) -> str:
    """Return the colours of the drafters, which all charts share."""
    found = {configuration(trial).kind for trial in finished(study)}
    names = {kind: "no drafting" if kind == "none" else kind.replace("_", " ") for kind in kinds(found)}
    items = (
        f'<li><i style="background:{COLORS.get(kind, OTHER)}"></i>{html.escape(name)}</li>' for kind, name in names.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>'
