"""The live view of a study: ``report.html``, written again at most once a minute while the study runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import optuna
from numpy.typing import NDArray

from searches.app.checks import InputError
from searches.app.interrupt import defer_interrupt, is_interrupt
from searches.report.html_report import FAILED, INTERRUPTED, RUNNING, Page, write_page
from searches.report.study_report import study_notes
from searches.workers.alone import ALONE, Workers

PAGE = "report.html"
_SECONDS = 60.0  # between two writes; each takes a fraction of a second and writes five megabytes


class LiveView:
    """Writer of the page of a running study. A page that cannot be written stops no study.

    Args:
        study: the opened study.
        folder: of the study.
        layers: the number of decoder layers of the target.
        trials: the number of finished trials at the end.
        crew: the workers of the study, of which the first writes the page until one measures the finals.

    Attributes:
        singles: ``[2, layers]``, the agreement with one sub-layer skipped, once scans have found it.
    """

    def __init__(self, study: optuna.Study, folder: Path, layers: int, trials: int, crew: Workers = ALONE) -> None:
        self._study, self._path, self._layers, self._trials, self._crew = study, folder / PAGE, layers, trials, crew
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
                if self._crew.leave():
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
        if not (self._writes or self._crew.leads()):
            return
        notes = study_notes(self._study, None)
        page = Page(self._layers, self._trials, notes, state, self._stage, reason, singles=self.singles)
        with contextlib.suppress(OSError):
            write_page(self._path, self._study, page)
