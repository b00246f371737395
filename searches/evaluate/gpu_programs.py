"""The programs that ``searches.evaluate.gpu`` runs: the tests that use the device, and a study of a minute."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from omegaconf import DictConfig

from searches.app.composition import literal
from searches.evaluate.gpu_worker import Known, Report, Row
from searches.study.storage import open_journal

_ROOT = Path(__file__).parents[2]
# A line of verbose pytest with one process, and with several.
_OUTCOMES = (
    re.compile(r"^(?P<test>\S+\.py::.+?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b"),
    re.compile(r"^\[gw\d+\] \[ *\d+%\] (?P<outcome>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (?P<test>\S+\.py::.+?) *$"),
)
_ENDED = re.compile(r"\d+ (passed|skipped).* in [\d.]+s")  # the last line of pytest
_BAD = ("failed", "error")
_SHOWN = 50  # failed tests that are named
_REPORTED = 25  # results between two updates of the row
_STUDY = "smoke"


def run_tests(config: DictConfig, known: Known, report: Report) -> None:
    """Run the listed tests with their models on the device, and report the counts as they grow."""
    parallel = config.tests.workers and importlib.util.find_spec("xdist") is not None
    options = ["-n", str(config.tests.workers), "--dist", "loadfile"] if parallel else []
    command = [sys.executable, "-m", "pytest", "-vv", "--tb=line", "-p", "no:cacheprovider", *options, *config.tests.paths]
    device = known["type"] if config.target.device == "auto" else config.target.device
    start, counts, failures, last = time.monotonic(), Counter[str](), list[str](), ""

    def row() -> Row:
        kinds = {kind: counts[kind] for kind in ("passed", "failed", "skipped")} | {"errors": counts["error"]}
        return kinds | {"failures": failures[:_SHOWN], "seconds": time.monotonic() - start}

    report.step("collecting")
    # Compiling hundreds of tiny models would take most of the time; what surrounds the compiler is tested without it.
    for line in _lines(command, {"LAYERSKIP_TEST_DEVICE": str(device), "TORCHDYNAMO_DISABLE": "1"}, _ROOT):
        last = line or last
        match = next((match for pattern in _OUTCOMES if (match := pattern.match(line))), None)
        if match is None:
            continue
        outcome = match["outcome"].lower()
        counts[outcome] += 1
        if outcome in _BAD:
            failures.append(match["test"])
        if outcome in _BAD or counts.total() % _REPORTED == 1:
            report.row("tests", row())
    problem = (
        f"{len(failures)} tests fail" if failures else None if _ENDED.search(last) else f"the tests did not end: {last}"
    )
    report.row("tests", row() | ({} if problem is None else {"error": problem}))


def run_study(config: DictConfig, known: Known, report: Report) -> None:
    """Run a small study of the target, and report the speedup of its export, its trials and its seconds."""
    outputs, name = Path(config.outputs) / "gpu-study", time.strftime("%Y%m%d-%H%M%S")  # an earlier one would be resumed
    command = [sys.executable, "-m", "searches.layerskip", *_target_overrides(config.target), *config.study_overrides]
    command += [f"outputs={quoted(str(outputs))}", f"study.name={quoted(name)}"]
    start, last = time.monotonic(), ""
    report.step(_STUDY)
    for line in _lines(command, {}, Path.cwd()):
        last = line or last
        if line.startswith(("study ", "error:")):
            report.step(line)
    row: dict[str, Any] = {"seconds": time.monotonic() - start}
    try:
        export = json.loads((outputs / name / "best.json").read_text(encoding="utf-8"))
    except OSError:
        report.row(_STUDY, row | {"error": f"no export was written: {last}"})
        return
    storage = open_journal(outputs / name / "journal.log", alone=True)
    states = Counter(trial.state.name.lower() for trial in optuna.load_study(study_name=name, storage=storage).trials)
    evidence = export["evidence"]
    row |= {"trials": dict(states), "config": export["config"]}
    row |= {"over_plain": evidence["speedup"], "over_plain_low": evidence["speedup_low"]}
    row |= {"over_plain_high": evidence["speedup_high"], "tokens_per_second": evidence["tokens_per_second"]}
    report.row(_STUDY, row)


def _lines(command: Sequence[str], variables: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Run a program and yield the lines of its output and of its errors."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip()


def _target_overrides(target: DictConfig) -> list[str]:
    """Return the overrides that give another program the same target."""
    group = "local" if "path" in target else "hub"  # which takes the names of wheels, too
    fields = {str(name): value for name, value in target.items() if name != "_target_" and value is not None}
    return [f"target={group}", *(f"target.{name}={quoted(value)}" for name, value in fields.items())]


def quoted(value: Any) -> str:
    """Return a value for Hydra's command line, which reads a quoted string literally."""
    if not isinstance(value, str):
        return str(value).lower()
    return literal(value)
