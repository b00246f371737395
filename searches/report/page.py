"""``report.html``: a study on one page that opens from the disk and loads nothing; written again while the study runs."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path

import numpy as np
import optuna
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from layerskip.files import atomic_write
from searches.app.checks import InputError
from searches.app.interrupt import defer_interrupt, is_interrupt
from searches.engines.race import Race
from searches.report import charts
from searches.report.markdown import race_verdict, study_notes, verdict, winner_notes
from searches.report.tables import finals_tables, trial_tables
from searches.study.finals import Finals
from searches.study.leaderboard import leaderboard
from searches.study.study import SETTINGS, finished
from searches.tracking.names import DEVICE
from searches.workers.pool import ALONE, Workers

PAGE = "report.html"
RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"
_SECONDS = 60.0  # between two writes; each takes a fraction of a second and writes five megabytes


@dataclass(frozen=True)
class Page:
    """The content of a page, without the study."""

    trials: int  # that are finished at the end
    state: str = RUNNING
    stage: str = ""  # what a running study does now
    reason: str = ""  # why the study has ended early
    finals: Finals | None = None
    race: Race | None = None
    singles: NDArray[np.float64] | None = None  # [2, layers]: agreement with one attention or MLP skipped, from scans


def write_page(path: Path, study: optuna.Study, page: Page) -> dict[str, go.Figure]:
    """Write the page atomically, so that a reader never sees a part of it; return its charts."""
    written, done, finals = datetime.now().astimezone(), finished(study), page.finals
    settings = study.user_attrs.get(SETTINGS, {})
    drawn = charts.of_study(study, finals, page.singles, written)
    export = str(path.with_name("best.json"))
    target = str(settings.get("target.path") or settings.get("target.name") or "the searched model")
    template = (resources.files("searches") / "data" / "report.html").read_text(encoding="utf-8")
    # Plotly writes null for NaN and infinities.
    figures = ",".join(f"{json.dumps(name)}:{figure.to_json()}" for name, figure in drawn.items())
    values = {
        "page": page,
        "title": study.study_name,
        "progress": _progress(study, page, done),
        "written": written,
        "notes": _notes(study, page),
        "finals_tables": {} if finals is None else finals_tables(finals),
        "winner": "" if finals is None or finals.winner.config.method == "none" else finals.winner.config.label(),
        "target": repr(target),
        "export": repr(export),
        "path": shlex.quote(export),
        "legend": charts.legend(done),
        "drawn": drawn,
        "settings": settings,
        "trial_tables": trial_tables(done),
        "plotly": Markup(get_plotlyjs()),
        "figures": Markup(f"{{{figures}}}".replace("<", "\\u003c")),  # JSON in which no tag of the page ends
    }
    with atomic_write(path) as partial:
        environment = Environment(autoescape=True, undefined=StrictUndefined)
        partial.write_text(environment.from_string(template).render(values), encoding="utf-8")
    return drawn


def _progress(study: optuna.Study, page: Page, done: Sequence[FrozenTrial]) -> str:
    parts = [f"{len(done)} of {page.trials} trials finished"]
    if page.state == RUNNING and (now := study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))):
        parts.append(f"{len(now)} running")
    return ", ".join(parts + sorted({str(trial.user_attrs[DEVICE]) for trial in done if DEVICE in trial.user_attrs}))


def _notes(study: optuna.Study, page: Page) -> list[str]:
    """Return the verdict, or the leader so far, and the notes."""
    notes = study_notes(study, page.finals)
    if page.finals is not None:
        fastest = [] if page.race is None else [race_verdict(page.race)]
        return [*fastest, verdict(page.finals), *notes, *winner_notes(study, page.finals)]
    first = "No configuration that drafts was measured to the end yet."
    if (leader := leaderboard(study).leader) is not None:
        first = f"Best so far: {leader.config.label()}, {leader.speedup:.2f} x plain decoding on tune prompts."
    later = ["The finals follow the last trial. They choose the winner and write best.json."]
    return [first, *notes, *(later if page.state == RUNNING else [])]


class LiveView:
    """Writer of the page of a running study. A page that cannot be written stops no study.

    ``pool`` holds the workers of the study, of which the first writes the page until one measures the finals. ``singles``
    are those of :class:`Page`, once scans have found them.
    """

    def __init__(self, study: optuna.Study, folder: Path, trials: int, pool: Workers = ALONE) -> None:
        self._study, self._path, self._trials, self._pool = study, folder / PAGE, trials, pool
        self._stage, self._written, self._writes = "", 0.0, False
        self.singles: NDArray[np.float64] | None = None

    def begin(self, stage: str, is_alone: bool = False) -> None:
        """Write the page at the start of a stage. ``is_alone``: this worker does what is left while the others wait."""
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
        with contextlib.suppress(OSError):
            write_page(self._path, self._study, Page(self._trials, state, self._stage, reason, singles=self.singles))
