"""What an engine reports beside the samples of the finals: start-up seconds, throughput and latencies.

They stand in the log of the rows, so that an interrupted run keeps them. Those of a repeat that was interrupted cover the
prompts that were measured after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from searches.app.resume_log import ResultLog
from searches.backends.backend import BASELINE

_ENTRY = "{} figures"


def add_figures(log: ResultLog, repeat: int, names: Collection[str], figures: Mapping[str, float]) -> None:
    """Log the figures of a repeat; nothing if there are none.

    Args:
        log: of the rows.
        repeat: its number.
        names: of the configurations that were measured.
        figures: as :meth:`~searches.backends.backend.Backend.figures` returns them.
    """
    if figures and (entry := _ENTRY.format(repeat)) not in log:
        found = {name: _of(figures, name) for name in (BASELINE, *names)}
        if len(names) == 1:  # its figures have no prefix
            (name,) = names
            found[name] = {key: value for key, value in figures.items() if not key.startswith(f"{BASELINE}_")}
        log.add(entry, {"figures": found, "seconds": 0.0})


def logged_figures(log: ResultLog, repeats: int, name: str) -> dict[str, float]:
    """Return a configuration's figures in the last repeat that has them, and those of plain decoding beside it.

    Args:
        log: of the rows.
        repeats: number of repeats.
        name: of the configuration, or ``baseline``.

    Returns:
        The figures; names of plain decoding's start with ``baseline_``. Empty if the back end reports none.
    """
    for entry in map(_ENTRY.format, reversed(range(repeats))):
        found = log[entry]["figures"] if entry in log else {}
        if name in found:
            return {**found[name], **{f"{BASELINE}_{key}": value for key, value in found[BASELINE].items()}}
    return {}


def _of(figures: Mapping[str, float], name: str) -> dict[str, float]:
    return {key.removeprefix(f"{name}_"): value for key, value in figures.items() if key.startswith(f"{name}_")}
