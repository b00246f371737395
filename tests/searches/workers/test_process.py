"""The identity of processes, by which others on the machine see that they have ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from searches.workers import pool
from searches.workers.pool import has_ended, start_of, this_process

pytestmark = pytest.mark.system


@pytest.fixture
def _unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A system that does not tell which machine this is."""

    def refuse(path: str) -> str:
        raise OSError

    pool._machine.cache_clear()
    monkeypatch.setattr(os, "readlink", refuse)
    yield
    pool._machine.cache_clear()


def _identity(pid: int) -> dict[str, object]:
    return this_process() | {"pid": pid, "started": start_of(pid)}


def test_a_process_ends_for_all_that_see_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = _identity(child.pid)
        assert not has_ended(identity)
        assert not has_ended(this_process())
        assert has_ended(identity | {"started": "1"})  # its number was given to another process
        child.kill()
    assert has_ended(identity)
    assert not has_ended(identity | {"machine": "another"})  # it cannot be seen from here
    assert start_of(child.pid) == ""


@pytest.mark.usefixtures("_unknown")
def test_nothing_is_known_to_have_ended_on_an_unknown_machine() -> None:
    assert this_process()["machine"] == ""
    assert not has_ended(this_process() | {"started": "1"})
