"""A study that is killed when it begins a given piece of work: ``python -m tests.searches.mortal``.

Arguments: a log file, a stage, the number of the piece of work in that stage (0 kills nothing), and the study's overrides.
Each piece of work writes a line to the log when it begins. The next line shows that the one before was finished and kept.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from layerskip import DraftPlan
from layerskip.measure.measurement import Sample
from layerskip.scan.scan import Scan, Scanner
from layerskip.texts import continuations
from searches.app.application import run
from searches.layerskip import start
from searches.predict import preparation
from searches.study.bench import ModelBench
from searches.study.objective import Objective

log, dies_in, dies_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
begun: list[str] = []


def begin(stage: str, what: object) -> None:
    """Log the beginning of a piece of work, and kill the process if it is the chosen one."""
    begun.append(stage)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{stage} {what}\n")
    if stage == dies_in and begun.count(stage) == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)


def logged(stage: str, work: Callable[..., Any], name: Callable[..., object]) -> Callable[..., Any]:
    """Return a function that logs its beginning."""

    def wrapper(*args: Any, **more: Any) -> Any:
        begin(stage, name(*args))
        return work(*args, **more)

    return wrapper


scan, check, compare = Scanner.scan, Scanner.check, ModelBench.compare


def scan_one_by_one(self: Scanner, masks: list[DraftPlan], depth: int | None = None, *args: Any, **more: Any) -> list[Scan]:
    if depth != 2:  # the test of memory, which runs at every start
        for mask in masks:
            begin("scan", f"{depth} {mask.format()}")
    return scan(self, masks, depth, *args, **more)


def check_silently(self: Scanner) -> None:
    """Run the self-check, which runs at every start, too."""
    with mock.patch.object(Scanner, "scan", scan):
        check(self)


def compare_finalists(self: ModelBench, *args: Any) -> Iterator[Mapping[str, Sample]]:
    for row in compare(self, *args):
        if "candidate" not in row:  # the name of a trial's configuration
            begin("verdict", next(iter(row.values())).prompt_id)
        yield row


continuations._decode = logged("continuations", continuations._decode, lambda target, item, *_: item.id)
preparation.profile_costs = logged("profile", preparation.profile_costs, lambda *_: "")  # type: ignore[attr-defined]
Scanner.scan = scan_one_by_one  # type: ignore[method-assign, assignment]
Scanner.check = check_silently  # type: ignore[method-assign]
ModelBench.compare = compare_finalists  # type: ignore[method-assign, assignment]
Objective.__call__ = logged("trials", Objective.__call__, lambda _, trial, *__: f"number {trial.number}")  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.argv = ["layerskip", *sys.argv[4:]]
    run("layerskip", start)
