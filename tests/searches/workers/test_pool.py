"""Claims and shared work of several processes, on storages of several kinds, with workers that die or stop."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from searches.workers import pool as pools
from searches.workers.pool import LeaseLost, WorkerPool, has_ended, of_kind, start_of, this_process
from tests.searches.workers import members
from tests.searches.workers.members import member, started, wait_until


def test_one_worker_at_a_time_holds_a_claim_and_each_piece_of_work_is_done_once(database: str, tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    with contextlib.ExitStack() as stack:
        for process in [stack.enter_context(started(members.work_together, database, tmp_path)) for _ in range(3)]:
            process.join(60)
            assert process.exitcode == 0
    assert (tmp_path / "number").read_text() == "12"
    assert sorted((tmp_path / "lines").read_text().splitlines()) == members.PIECES
    (values,) = {path.read_text() for path in tmp_path.glob("values-*")}  # the same of all workers
    assert [name for name, _ in ast.literal_eval(values)] == members.PIECES
    with member(database) as pool:
        assert pool.share("piece 3", lambda: pytest.fail("done before"))[0] == "piece 3"


@pytest.mark.parametrize("sees", [True, False])
def test_the_claim_of_a_killed_worker_passes_on(
    database: str, tmp_path: Path, sees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine at once; on another one after some beats."""
    if not sees:
        monkeypatch.setattr(pools, "has_ended", lambda _: False)
    with member(database) as pool, started(members.hold, database, tmp_path / "held") as process:
        wait_until((tmp_path / "held").exists)
        assert len(pool.snapshot().live) == 2
        process.kill()
        with pool.claim("thing"):
            states = {row.number: row.state for row in of_kind(pool.board.rows(), "worker")}
        assert list(states.values()).count(TrialState.FAIL) == 1
        assert states[pool.worker] == TrialState.RUNNING
        assert pool.snapshot().live == {pool.worker}


def test_a_slow_holder_keeps_its_claim(database: str, tmp_path: Path) -> None:
    patience = 20  # beats, which a busy machine needs
    held = started(members.hold, database, tmp_path / "held", 1.6, patience)
    with member(database, patience=patience) as pool, held as process:
        wait_until((tmp_path / "held").exists)
        with pool.claim("thing"):  # 32 beats later
            process.join(30)
        assert process.exitcode == 0
        assert all(row.state != TrialState.FAIL for row in of_kind(pool.board.rows(), "worker"))


def test_a_worker_that_was_stopped_takes_the_value_of_the_one_that_replaced_it(database: str, tmp_path: Path) -> None:
    with member(database) as pool, started(members.stop_in_a_piece, database, tmp_path / "held") as process:
        wait_until((tmp_path / "held").exists)
        assert pool.share("piece", lambda: "in time") == "in time"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
        process.join(30)
        assert process.exitcode == 0
        first, *again = [row.state for row in of_kind(pool.board.rows(), "worker") if row.number != pool.worker]
        assert first == TrialState.FAIL
        assert again in ([], [TrialState.COMPLETE])  # it joins again if it beats before it ends
    assert (tmp_path / "value").read_text() == "in time"


def test_a_holder_notices_that_it_was_presumed_dead(database: str) -> None:
    with member(database, beat=60) as pool, pool.claim("thing"):
        pool.check("thing")
        pool.board.finish(pool.worker, TrialState.FAIL)
        with pytest.raises(LeaseLost):
            pool.check("thing")


def test_an_error_in_shared_work_leaves_it_to_the_next(database: str) -> None:
    with member(database) as pool:
        with pytest.raises(ZeroDivisionError):
            pool.share("piece", lambda: 1 / 0)
        assert pool.share("piece", lambda: "done") == "done"


def test_of_workers_that_leave_the_last_finds_no_others(database: str) -> None:
    """Two that are interrupted at the same time do not both leave the end of the study to the other."""
    with member(database, beat=60) as first, member(database, beat=60) as last:
        assert first.leave()
        first._beat()  # one that was under way
        assert not last.leave()
        assert not first.leave()
    assert not [row for row in last.board.rows() if row.state == TrialState.RUNNING]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WorkerPool, WorkerPool]]:
    """Two workers in this process, which beat when they are told to."""
    monkeypatch.setattr(pools, "_LONGEST_PAUSE", 0.05)
    storage = InMemoryStorage()
    with (
        WorkerPool(storage, "study", "", 60, patience=2) as one,
        WorkerPool(storage, "study", "", 60) as other,
    ):
        yield one, other


def _claims(pool: WorkerPool) -> list[TrialState]:
    return [row.state for row in of_kind(pool.board.rows(), "claim")]


def test_a_worker_that_was_presumed_dead_in_a_line_stands_in_it_anew(pair: tuple[WorkerPool, WorkerPool]) -> None:
    one, other = pair
    before, held = other.worker, threading.Event()

    def hold() -> None:
        with other.claim("thing"):
            held.set()

    waiting = threading.Thread(target=hold)
    with one.claim("thing"):
        waiting.start()
        wait_until(lambda: len(_claims(one)) == 2)
        one.board.finish(before, TrialState.FAIL)
        wait_until(lambda: len(_claims(one)) == 3)
        assert not held.is_set()
    waiting.join()
    assert held.is_set()
    assert other.worker > before
    assert _claims(one) == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]


def test_an_interrupt_in_a_line_gives_up_the_place(
    pair: tuple[WorkerPool, WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    monkeypatch.setattr(other, "wait", mock.Mock(side_effect=KeyboardInterrupt))
    with one.claim("thing"):
        with pytest.raises(KeyboardInterrupt), other.claim("thing"):
            pytest.fail("it is held")
        assert _claims(one) == [TrialState.RUNNING, TrialState.FAIL]


def test_a_worker_that_cannot_reach_the_storage_leaves_the_end_to_others(pair: tuple[WorkerPool, WorkerPool]) -> None:
    with mock.patch.object(InMemoryStorage, "set_trial_state_values", side_effect=ConnectionRefusedError):
        assert pair[0].leave()


def test_a_process_ends_for_all_that_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = this_process() | {"pid": child.pid, "started": start_of(child.pid)}
        assert not has_ended(identity)
        assert not has_ended(this_process())
        assert has_ended(identity | {"started": "1"})  # its number was given to another process
        child.kill()
    assert has_ended(identity)
    assert not has_ended(identity | {"machine": "another"})  # it cannot be seen from here
    assert start_of(child.pid) == ""
    monkeypatch.setattr(pools, "_machine", lambda: "")  # an unknown one
    assert not has_ended(identity)
