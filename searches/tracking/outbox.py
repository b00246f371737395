"""Writes to a tracking store that may fail at any time: they are kept, and written when the store takes them again."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Hashable

from searches.app.interrupt import defer_interrupt, is_interrupt
from searches.app.retry import is_unreachable
from searches.app.urls import without_password
from searches.tracking.experiment import reason

PATIENCE = 10.0  # seconds after the beginning of an outage for which the end of a program waits
_QUICK = 1.0  # seconds of a failed attempt that is repeated at once
_SHARE = 10  # a longer one is repeated after so many times its seconds, so that a store that hangs costs a tenth at most
_LONGEST = 20.0  # seconds after which a failing attempt leaves the other writes for the next
_PAUSE = 0.5  # seconds between two attempts at the end


class Outbox:
    """The writes that a store has not taken yet. An error of the store is printed once, not raised.

    Args:
        uri: of the store.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._writes: dict[Hashable, Callable[[], object]] = {}
        self._lost_since: float | None = None
        self._next_attempt = 0.0

    def put(self, key: Hashable, write: Callable[[], object]) -> None:
        """Keep a write, which can be repeated, in the place of an earlier one of the same key."""
        self._writes[key] = write

    def send(self, patience: float | None = None) -> None:
        """Try all writes.

        Args:
            patience: seconds of an outage for whose end is waited; None tries once, and leaves a store alone for a while
                that took long to fail.
        """
        if patience is None and time.monotonic() < self._next_attempt:
            return
        while self._attempt() and time.monotonic() < (self._lost_since or 0.0) + (patience or 0.0):
            time.sleep(_PAUSE)

    @defer_interrupt()
    def _attempt(self) -> bool:
        """Try all writes; return whether the store cannot be reached."""
        start, failure = time.monotonic(), None
        for key, write in list(self._writes.items()):
            try:
                write()
                del self._writes[key]
            except Exception as error:
                if is_interrupt(error) or not is_of_store(error):
                    raise
                failure = error
                if is_unreachable(error) or time.monotonic() - start > _LONGEST:
                    break
        if failure is None:
            if self._lost_since is not None:
                print("tracking.uri: the store is back; nothing is missing in it", flush=True)
            self._lost_since = None
            return False
        if self._lost_since is None:
            self._lost_since = start
            print(
                f"tracking.uri: cannot write to {without_password(self._uri)}: {reason(failure, self._uri)}; "
                "the program goes on, and what is missing is written when the store is back, or by the same command",
                flush=True,
            )
        seconds = time.monotonic() - start
        self._next_attempt = start + seconds * (1 + _SHARE) if seconds > _QUICK else 0.0
        return is_unreachable(failure)


def is_of_store(error: BaseException) -> bool:
    """Return whether an error comes from a tracking store, its artifacts, or the way to it; others are defects."""
    frames = traceback.walk_tb(error.__traceback__)
    return is_unreachable(error) or any(str(frame.f_globals.get("__name__")).startswith("mlflow.") for frame, _ in frames)
