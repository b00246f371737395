"""``report.html``: a study on one page that opens from the disk and loads nothing; written again while the study runs."""

from __future__ import annotations

import contextlib
import html
import json
import shlex
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import TrialState
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from layerskip.files import atomic_write
from searches.app.checks import InputError
from searches.app.interrupt import defer_interrupt, is_interrupt
from searches.report import charts
from searches.report.markdown import study_notes, verdict, winner_notes
from searches.report.tables import (
    as_html_with_requests,
    best_trials,
    finals_requests,
    finals_rows,
    levels,
    trial_requests,
    trial_rows,
)
from searches.report.timeline import timeline, timeline_notes
from searches.study.finals import Finals
from searches.study.leaderboard import configuration, ranking
from searches.study.study import SETTINGS, finished
from searches.tracking.names import DEVICE
from searches.workers.pool import ALONE, Workers

PAGE = "report.html"
RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"
_SECONDS = 60.0  # between two writes; each takes a fraction of a second and writes five megabytes
_PLOTLY = "@plotly@"
_REFRESH = '<meta http-equiv="refresh" content="60">'
_EMPTY = '<p class="empty">Nothing measured yet.</p>'
_HELD_OUT = "Held-out prompts, 95 % intervals. A stroke is the speedup in the search. Dotted: plain decoding."
_WORKLOAD = "Bar: from the median to the 95th percentile. Star: plain decoding. Dashed: the Pareto front of medians."
_BEST = "Speedups are those on the tune prompts that every trial decodes, over all trials of the configuration."
_CODE = """import layerskip

target = layerskip.load_target({target!r})
export = layerskip.Export.load({export!r}, target)
drafter = layerskip.build_drafter(export.config, target)  # keep one drafter for all requests
result = layerskip.generate(target, "Why is the sky blue?", drafter, max_new_tokens=64)
print(result.text)

# The same inside transformers' generate:
method = export.custom_generate(target.tokenizer)
messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
inputs = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = target.model.generate(**inputs.to(target.device), custom_generate=method, max_new_tokens=64)
"""
_CHARTS = {
    "history": ("Search history", "Tune prompts, 95 % intervals. Cross: stopped early. Line: the best so far.", "wide"),
    "acceptance": ("Speedup against acceptance", "Dashed: the Pareto front of trials measured to the end.", ""),
    "memory": ("Speedup against memory", "Peak of the GPU, or of the process on a CPU. Dashed: the Pareto front.", ""),
    charts.TOKEN: ("Throughput against time per token", "", ""),
    charts.FIRST: ("Throughput against time to the first token", "", ""),
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
        "figures": _as_json(figures),
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


def _figures(study: optuna.Study, page: Page, now: datetime) -> dict[str, go.Figure]:
    """Return the figures that have something to draw, by the identifier of their place on the page."""
    measured = charts.points(finished(study))
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
    for level in levels(point.requests for point in measured):
        for latency in (charts.TOKEN, charts.FIRST):
            drawn[f"{latency}{level}"] = charts.throughput(measured, latency, level)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _as_json(figures: Mapping[str, go.Figure]) -> str:
    """Return the figures as JSON in which no tag of the page ends; plotly writes null for NaN and infinities."""
    shown = ",".join(f"{json.dumps(name)}:{figure.to_json()}" for name, figure in figures.items())
    return f"{{{shown}}}".replace("<", "\\u003c")


def _content(study: optuna.Study, page: Page, figures: Mapping[str, go.Figure], path: Path, now: datetime) -> str:
    """Return the cards of the page."""
    requests = study.user_attrs.get(SETTINGS, {}).get("workload.concurrency", 1)
    cards = []
    for kind, (title, text, shape) in _CHARTS.items():
        for name in [name for name in figures if name.partition("_at_")[0] == kind] or [_ALWAYS] * (kind == _ALWAYS):
            if kind == "timeline":
                text = timeline_notes(study.get_trials(deepcopy=False), now)
            elif kind in (charts.TOKEN, charts.FIRST):
                text = f"Requests in flight: {name.partition('_at_')[2] or requests}. {_WORKLOAD}"
            cards.append(_chart(figures, name, title, text, shape))
    finals = use = ""
    if page.finals is not None:
        use = f'<section class="card use"><h2>Use the winner</h2>{_usage(study, page.finals, path)}</section>'
        chart = _chart(figures, "held-out", "Finalists", _HELD_OUT, "fitted wide")
        finals = f'<div class="grid">{chart}<section class="card wide">{_finals_table(page.finals)}</section></div>'
    return "\n".join(
        (
            _verdict(study, page),
            finals,
            use,
            _legend(study),
            f'<div class="grid">{"".join(cards)}</div>',
            f'<section class="card"><h2>Best trials</h2><p>{_BEST}</p>{_best_table(study) or _EMPTY}</section>',
        )
    )


def _chart(figures: Mapping[str, go.Figure], name: str, title: str, text: str, shape: str) -> str:
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
    found = {configuration(trial).method for trial in finished(study)}
    names = {method: "no drafting" if method == "none" else method.replace("_", " ") for method in charts.methods(found)}
    items = (
        f'<li><i style="background:{charts.color_of(method)}"></i>{html.escape(name)}</li>' for method, name in names.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _finals_table(finals: Finals) -> str:
    """Return the table of plain decoding and the finalists."""
    rows = finals_rows(finals)
    names = [{name: row[name] for name in ("configuration", "verdict")} for row in rows]
    return as_html_with_requests(rows, names, finals_requests(finals))


def _best_table(study: optuna.Study) -> str:
    """Return the table of the best trials, and one for each of several numbers of requests; empty if none was measured."""
    trials = best_trials(finished(study))
    rows = [{"configuration": row["configuration"]} | row for row in trial_rows(trials)]
    names = [{name: row[name] for name in ("configuration", "trial")} for row in rows]
    return as_html_with_requests(rows, names, [trial_requests(trial) for trial in trials]) if rows else ""


def _usage(study: optuna.Study, finals: Finals, path: Path) -> str:
    """Return how the winner is used; ``path`` is that of the page."""
    if finals.winner.config.method == "none":
        return "<p>Plain decoding wins: use the model as it is. best.json holds the evidence.</p>"
    settings, export = study.user_attrs.get(SETTINGS, {}), str(path.with_name("best.json"))
    parts = [f"<p>best.json holds {html.escape(finals.winner.config.label())}.</p>"]
    if (engine := settings.get("backend.name")) is None:
        target = str(settings.get("target.path") or settings.get("target.name") or "the searched model")
        parts += [_block(_CODE.format(target=target, export=export)), "<p>Commands of other engines:</p>"]
    else:
        parts.append(f"<p>It was measured with {html.escape(str(engine))}. Commands of engines:</p>")
    parts.append(_block(f"python -m searches.export {shlex.quote(export)}"))
    parts.append("<p>Check it on another day, with the overrides of the search for target and prompts:</p>")
    return "".join([*parts, _block(f"python -m searches.verify {shlex.quote(export)}")])


def _block(code: str) -> str:
    return f"<pre><code>{html.escape(code)}</code></pre>"


class LiveView:
    """Writer of the page of a running study. A page that cannot be written stops no study.

    Args:
        study: the opened study.
        folder: of the study.
        layers: the number of decoder layers of the target.
        trials: the number of finished trials at the end.
        pool: the workers of the study, of which the first writes the page until one measures the finals.

    Attributes:
        singles: ``[2, layers]``, the agreement with one sub-layer skipped, once scans have found it.
    """

    def __init__(self, study: optuna.Study, folder: Path, layers: int, trials: int, pool: Workers = ALONE) -> None:
        self._study, self._path, self._layers, self._trials, self._pool = study, folder / PAGE, layers, trials, pool
        self._stage, self._written, self._writes = "", 0.0, False
        self.singles: NDArray[np.float64] | None = None

    def begin(self, stage: str, is_alone: bool = False) -> None:
        """Write the page at the start of a stage of the study, which it names.

        Args:
            stage: names the stage.
            is_alone: whether this worker alone does what is left, while the others wait for it.
        """
        self._stage, self._writes = stage, is_alone
        self._write(RUNNING)

    def refresh(self) -> None:
        """Write the page unless it was written less than a minute ago. Call it where nothing is timed."""
        if time.monotonic() - self._written >= _SECONDS:
            self._write(RUNNING)

    def after(self, step: Callable[[], object]) -> Callable[[], None]:
        """Return a function that takes a step, such as that of a progress bar, and then keeps the page up to date."""

        def taken() -> None:
            step()
            self.refresh()

        return taken

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """State on the page that a block was interrupted or failed, if it raises."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error is the one to report
                self._stage = ""
                if self._pool.leave():
                    pass
                elif is_interrupt(error):
                    self._write(INTERRUPTED, "Interrupted: the same command continues.")
                else:  # the text of a foreign error may hold anything, such as a database's password
                    why = str(error) if isinstance(error, InputError) else type(error).__name__
                    self._write(FAILED, f"It ended with an error: {why}")
            raise

    @defer_interrupt()
    def _write(self, state: str, reason: str = "") -> None:
        self._written = time.monotonic()
        if not (self._writes or self._pool.leads()):
            return
        notes = study_notes(self._study, None)
        page = Page(self._layers, self._trials, notes, state, self._stage, reason, singles=self.singles)
        with contextlib.suppress(OSError):
            write_page(self._path, self._study, page)
