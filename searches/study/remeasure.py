"""Measuring rows of held-out prompts once more, after the machine drifted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from layerskip import PromptSet, SpeculativeConfig
from searches.app.resume_log import ResultLog
from searches.study.bench import Bench, Row, logged_row, surviving_rows
from searches.study.drift import drifted_rows
from searches.study.objective import MeasureSettings

_SEED = 1_000_003


def remeasure_drifted(
    bench: Bench,
    configs: Mapping[str, SpeculativeConfig],
    rows: Sequence[Row],
    prompts: PromptSet,
    settings: MeasureSettings,
    seed: int,
    log: ResultLog,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[int, Row]:
    """Measure once more the rows with drift, and return the new ones by their places.

    Drafters that learn first decode the prompts before, as many as in a trial.

    Args:
        bench: measures them.
        configs: by name.
        rows: one per prompt, repeat by repeat.
        prompts: of the rows.
        settings: the tolerated drift.
        seed: of the study.
        log: takes the new rows.
        is_over: returns whether time has run out; then no row is measured.
    """
    again: dict[int, Row] = {}
    for place, drifted in enumerate(drifted_rows(rows, settings.drift)):
        repeat, number = divmod(place, len(prompts))
        name = f"{repeat} {prompts.items[number].id} again"
        if drifted and (name in log or not is_over()):
            item, before = prompts.items[number], PromptSet(prompts.items[max(0, number - settings.warming) : number])
            measured = surviving_rows(bench, configs, PromptSet((item,)), held_out_seed(seed, repeat) + number, (), before)
            again[place] = logged_row(measured, log, name)
    return again


def held_out_seed(seed: int, repeat: int) -> int:
    """Return a seed that differs from those of all trials and of the other repeats."""
    return seed + _SEED + 7919 * repeat
