"""Tests of the processes of ``searches.evaluate.gpu``: parts that hang, crash, raise or warn."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from pathlib import Path

import pytest
from omegaconf import DictConfig

from searches.app.composition import compose_config
from searches.evaluate.gpu_worker import Known, Message, Part, Report, run_part
from tests.searches.programs import FORKS


@pytest.fixture(scope="module", autouse=True)
def _forkserver() -> None:
    """Start the tests' server of processes, which has imported everything, before a program would start one of its own."""
    process = FORKS.Process(target=os.getpid)
    process.start()
    process.join()


def test_numbers_that_json_has_not_are_left_out() -> None:
    messages: list[Message] = []
    Report(messages.append).row("a", {"high": float("inf"), "low": 1.0, "inner": {"x": float("nan")}})
    assert messages == [("row", ("a", {"high": None, "low": 1.0, "inner": {"x": None}}))]


def _hang(config: DictConfig, known: Known, report: Report) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        report.row("done", {"pid": child.pid})
        report.step("sleeping")


def _crash(config: DictConfig, known: Known, report: Report) -> None:
    report.row("done", dict(known))
    report.step("falling")
    os._exit(7)


def _raise(config: DictConfig, known: Known, report: Report) -> None:
    report.attempt("bad", lambda: {"a": config.missing_field})
    raise ValueError("two\nlines")


def _warn(config: DictConfig, known: Known, report: Report) -> None:
    logging.getLogger("layerskip.models.compiled_layers").warning("%s: its layers\ncannot be compiled", "Model")


def _messages(part: Part, known: Known | None = None) -> list[Message]:
    return list(run_part("plain", part, compose_config("gpu"), known or {}, 1000))


def test_a_part_that_hangs_ends_with_its_seconds_and_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = run_part("plain", _hang, compose_config("gpu"), {}, 1000)
    _, (_, row) = next(messages)
    assert next(messages) == ("step", "sleeping")
    late = time.monotonic() + 1001
    monkeypatch.setattr("searches.evaluate.gpu_worker.monotonic", lambda: late)
    assert list(messages) == [("error", "seconds.plain: 1000 seconds were over during sleeping")]
    monkeypatch.undo()
    status = Path(f"/proc/{row['pid']}/status")
    for _ in range(250):
        if not status.exists() or "State:\tZ" in status.read_text(encoding="utf-8"):  # dead, or not yet waited for
            return
        time.sleep(0.02)
    raise AssertionError("what the part has started still runs")


def test_a_part_that_crashes_keeps_its_rows() -> None:
    assert _messages(_crash, {"bandwidth": 3.0}) == [
        ("row", ("done", {"bandwidth": 3.0})),
        ("step", "falling"),
        ("error", "the process ended with code 7 during falling"),
    ]


def test_errors_of_rows_and_parts_are_single_lines() -> None:
    messages = _messages(_raise)
    assert messages[1][1][1]["error"].startswith("ConfigAttributeError: ")
    assert messages[2] == ("error", "ValueError: two lines")


def test_warnings_of_the_library_are_messages() -> None:
    assert _messages(_warn) == [("log", "Model: its layers cannot be compiled")]
