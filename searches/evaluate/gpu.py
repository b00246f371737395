"""Decoding on a GPU, measured in at most eight minutes and written as one record.

Usage: ``python -m searches.evaluate.gpu [parts=[plain,drafters]] [field=value]``

- ``tests``: the tests that put models on the device.
- ``plain``: plain decoding of the target and of random Llamas of 1B, 3B and 8B, as a share of what the memory bandwidth
  allows, and beside transformers' ``generate``, with its dynamic and its compiled static cache.
- ``drafters``: every drafter on the target, beside plain decoding; and plain decoding with and without compiled layers.
- ``verification``: the target's pass over 1 to 64 tokens, as a chain and as a tree.
- ``study``: a search of a minute.

Every part runs in a process of its own, for at most its ``seconds``. The record is written after every row, so a run that is
killed keeps its finished rows. An error is written into the record, the other parts are run, and the exit code is 1. Runs on
a CPU, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from layerskip.files import write_json
from searches.app.application import run
from searches.app.checks import InputError, check_list, check_number, check_seed, check_whole
from searches.evaluate.gpu_device import describe_device
from searches.evaluate.gpu_drafting import measure_drafters, measure_verification
from searches.evaluate.gpu_plain import measure_plain
from searches.evaluate.gpu_programs import run_study, run_tests
from searches.evaluate.gpu_table import describe_row, table
from searches.evaluate.gpu_worker import Known, Part, run_part

PARTS: Mapping[str, Part] = {
    "tests": run_tests,
    "plain": measure_plain,
    "drafters": measure_drafters,
    "verification": measure_verification,
    "study": run_study,
}
_DEVICE = "device"
_FAILED = 1


def measure_gpu(config: DictConfig) -> dict[str, Any]:
    """Run the parts and return the record. See ``conf/gpu.yaml``.

    Raises:
        InputError: the configuration is wrong, or the target cannot be loaded.
        SystemExit: the device, a part or one of its rows ended with an error; exit code 1.
    """
    _check(config)
    path = Path(config.record or Path(config.outputs) / "gpu.json")
    record: dict[str, Any] = {"parts": {}}
    clock = _Clock()
    device = _run(_DEVICE, describe_device, config, {}, record, None, clock)
    if "error" in device:
        sys.exit(f"error: device: {device['error']}")
    record = {**device["rows"]["header"], "device": device["rows"]["device"], "parts": {}}
    record["config"] = OmegaConf.to_container(config, resolve=True)
    for part in config.parts:
        _run(part, PARTS[part], config, record["device"], record, path, clock)
    record["seconds"] = clock.seconds()
    write_json(path, record)
    print(table(record))
    print(f"wrote {path}")
    errors = [name for name, part in record["parts"].items() if has_error(part)]
    if errors:
        print(f"errors in: {', '.join(errors)}")
        sys.exit(_FAILED)
    return record


def has_error(part: Mapping[str, Any]) -> bool:
    """Return whether a part of a record, or one of its rows, has an error."""
    return "error" in part or any("error" in row for row in part["rows"].values())


def _run(
    name: str, part: Part, config: DictConfig, known: Known, record: dict[str, Any], path: Path | None, clock: _Clock
) -> dict[str, Any]:
    """Run a part and write its rows into the record as they come; return what is in the record of it.

    Raises:
        InputError: the part refuses the configuration.
    """
    found: dict[str, Any] = {"seconds": 0.0, "rows": {}}
    record["parts"][name] = found
    start = clock.seconds()
    clock.say(f"{name}: at most {config.seconds[name]:g} s")
    messages = run_part(name, part, config, known, config.seconds[name])
    # A generator that nobody closes would leave the process running after Ctrl-C.
    with closing(messages):
        for kind, value in messages:
            if kind == "step":
                clock.say(f"{name}: {value} ...")
            elif kind == "row":
                row, fields = value
                found["rows"][row] = fields
                clock.say(f"{name}: {describe_row(row, fields)}")
            elif kind == "log":
                found.setdefault("log", []).append(value)
                clock.say(f"{name}: {value}")
            elif kind == "refused" and path is None:
                raise InputError(value)
            else:
                found["error"] = value
                clock.say(f"{name}: ERROR: {value}")
            found["seconds"] = clock.seconds() - start
            if path is not None:
                write_json(path, record)
    return found


class _Clock:
    """Seconds since the start, and progress lines that begin with them."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def say(self, line: str) -> None:
        print(f"[{self.seconds():6.1f} s] {line}", flush=True)


def _check(config: DictConfig) -> None:
    check_seed(config.seed)
    check_list("parts", config.parts, list(PARTS), or_empty=False)
    for name in (_DEVICE, *PARTS):
        check_number(f"seconds.{name}", config.seconds[name])
    check_whole("context", config.context)
    check_whole("tests.workers", config.tests.workers, 0)
    check_list("tests.paths", config.tests.paths, or_empty=False)
    check_list("study_overrides", config.study_overrides)
    check_list("tokens", config.tokens, or_empty=False)
    for count in config.tokens:
        check_whole("tokens", count)
    if 1 not in config.tokens:
        raise InputError("tokens: has no 1, which the others are compared with")
    if config.shapes is not None and not isinstance(config.shapes, DictConfig):
        raise InputError(f"shapes: {config.shapes!r} is not a mapping of names to fields of LlamaConfig")


if __name__ == "__main__":
    run("gpu", measure_gpu, resumable=False)
