"""Progress in a log file and in a real terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import time

import pytest

from searches import progress
from searches.progress import Progress, counting
from tests.searches.programs import environment

STAGE = """
import time
from searches.progress import Progress, counting
with counting(4, "prompts", "continuations") as count:
    count()
    time.sleep(1.5)
"""
WHOLE = """
import time
from searches.progress import Progress, counting
with Progress(100.0) as shown:
    shown.begin("trials")
    shown.leader = "prompt lookup 1.50 x (1.20 to 1.80)"
    with counting(4, "trials", "unused") as count:
        count()
        shown.step("trial 0: 1.50 x")
        time.sleep(1.5)
"""


def test_a_log_file_has_one_line_a_step_with_the_leader_and_the_seconds_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(100.0) as shown:
        shown.begin("trials")
        shown.step("trial 0: 1.10 x")
        shown.leader = "prompt lookup 1.50 x"
        shown.started -= 40  # of an earlier run
        shown.step("trial 1: 1.50 x")
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert first.endswith("trials: trial 0: 1.10 x; 100 s left")
    assert second == "[  40 s] trials: trial 1: 1.50 x; leader prompt lookup 1.50 x; 60 s left"
    assert err == ""


def test_a_log_file_is_never_silent_for_long(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SILENCE", 0.05)
    monkeypatch.setattr(progress, "_BEAT", 0.01)
    lines = []
    with Progress() as shown, counting(7, "masks", "unused") as count:
        shown.begin("predictions")
        count()
        while len(lines) < 3:
            time.sleep(0.02)
            lines += capsys.readouterr().out.splitlines()
    assert lines[-1] == "[   0 s] predictions, 1 of 7 masks"


def in_terminal(script: str) -> str:
    """Return what a script shows in a terminal of 140 columns."""
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 140))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=terminal, stderr=terminal, env=environment())
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(controller, 4096):
            shown += part
    except OSError:  # the end of a terminal on Linux
        pass
    os.close(controller)
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        (WHOLE, ("trials, 1 of 4 trials", "1 of 100 s", "1.20 to 1.80")),
        (STAGE, ("continuations, 1 of 4 prompts", "█")),  # without a budget
    ],
)
def test_a_terminal_shows_one_bar_with_the_state(script: str, parts: tuple[str, ...]) -> None:
    text = in_terminal(script)
    assert any(all(part in bar for part in parts) for bar in text.split("\r"))
    if script == WHOLE:
        assert "trial 0: 1.50 x\r\n" in text
        assert "[" not in text.partition("trial 0")[2].partition("\n")[0]  # the bar shows the state
