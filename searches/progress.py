"""Progress of a program: one bar in a terminal, lines in a log file.

Stages of a program count their steps with :func:`counting`. Within a :class:`Progress`, its bar or its lines show them;
otherwise each stage has a bar or lines of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

_SILENCE = 15.0  # seconds without a line, after which one says what is going on
_STEP = 3.0  # seconds without a line, after which one says what was counted
_BEAT = 1.0  # seconds between two updates
_running: list[Progress] = []


class Progress:
    """Progress of a program with several stages; a context in which it is shown.

    The bar shows the seconds that the program may take, or else counted steps. ``started`` is on the clock of
    ``time.monotonic``, earlier runs included; ``leader`` describes the best result so far, if any.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.started, self.leader = time.monotonic(), ""
        self._seconds, self._stage, self._spoken = seconds, "", time.monotonic()
        self._steps = 0, 0, ""  # done, in all, what they are
        self._ended, self._lock = threading.Event(), threading.RLock()
        parts = "{n:.0f} of {total:.0f} s" if seconds else "{elapsed}"
        self._bar = tqdm(total=seconds, disable=None, dynamic_ncols=True, bar_format=f"{{desc}} {{bar}} {parts}{{postfix}}")
        self._beats = threading.Thread(target=self._beat, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        _running.append(self)
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        _running.remove(self)
        self._ended.set()
        self._beats.join()
        self._bar.close()

    @property
    def spent(self) -> float:
        """Seconds since the start, those of earlier runs included."""
        return time.monotonic() - self.started

    def begin(self, stage: str) -> None:
        """Name the stage that begins."""
        with self._lock:
            self._stage = stage
        self._show()

    def say(self, line: str) -> None:
        """Print a line."""
        with self._lock:
            if self._bar.disable:
                print(line, flush=True)
            else:
                tqdm.write(line)  # above the bar
            self._spoken = time.monotonic()

    def step(self, line: str) -> None:
        """Print what was finished, and in a log file also the time, the leader and the seconds that are left."""
        self.say(self._with_state(f"{self._stage}: {line}") if self._bar.disable else line)

    @contextlib.contextmanager
    def counting(self, total: int, unit: str, done: int = 0) -> Iterator[Callable[[], object]]:
        """Yield a function that counts one of ``total`` steps, of which some are done."""

        def count() -> None:
            nonlocal done
            done += 1
            self._steps = done, max(done, total), unit  # on a noisy machine, some steps are repeated
            if self._bar.disable:
                self._show(_STEP)

        self._steps = done, max(done, total), unit
        try:
            yield count
        finally:
            self._steps = 0, 0, ""

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT):
            self._show()

    def _show(self, silence: float | None = None) -> None:
        """Draw the bar, or print a line after some seconds of silence."""
        with self._lock:
            done, total, unit = self._steps
            now = ", ".join(filter(None, (self._stage, unit and f"{done} of {total} {unit}"))) or "loading"
            if not self._bar.disable:
                if self._seconds is None:
                    self._bar.n, self._bar.total = done, total
                else:
                    self._bar.n = min(self._seconds, self.spent)
                self._bar.set_description_str(now, refresh=False)
                self._bar.set_postfix_str(self.leader and f"leader {self.leader}")
            elif time.monotonic() - self._spoken >= (_SILENCE if silence is None else silence):
                self.say(self._with_state(now))

    def _with_state(self, line: str) -> str:
        left = f"{max(0.0, self._seconds - self.spent):.0f} s left" if self._seconds else ""
        return f"[{self.spent:4.0f} s] " + "; ".join(filter(None, (line, self.leader and f"leader {self.leader}", left)))


@contextlib.contextmanager
def counting(total: int, unit: str, stage: str) -> Iterator[Callable[[], object]]:
    """Yield a function that counts one of ``total`` steps, by the name ``unit``, of a stage of a program."""
    with contextlib.ExitStack() as shown:
        if not _running:
            shown.enter_context(Progress()).begin(stage)
        yield shown.enter_context(_running[-1].counting(total, unit))


def say(line: str) -> None:
    """Print a line, above the bar of the running program if there is one."""
    if _running:
        _running[-1].say(line)
    else:
        print(line, flush=True)
