"""Workers of small studies, run in processes that tests kill."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from layerskip import SpeculativeConfig
from layerskip.measure.measurement import Sample
from searches.space.search_space import SearchSpace
from searches.study.objective import Objective
from searches.study.storage import open_database
from searches.study.study import StudySettings, run_trials
from searches.workers.pool import WorkerPool
from tests.searches.known import PROMPTS, SETTINGS, Known
from tests.searches.programs import FORKS

NAME = "study"
BEAT = 0.05  # seconds
_ALL_LIVE = 1000  # beats; on a busy machine, processes stand still for some
PIECES = [f"piece {number}" for number in range(5)]
SPACE = SearchSpace(6, methods=["none", "prompt_lookup"])


class Slow(Known):
    """The known bench, in which decoding a prompt takes a moment."""

    def compare(self, *arguments: Any) -> Iterator[dict[str, Sample]]:
        for row in super().compare(*arguments):
            time.sleep(0.005)
            yield row


def member(place: str, beat: float = BEAT, patience: int = 4) -> WorkerPool:
    """Return a worker of the study."""
    return WorkerPool(open_database(place), NAME, "device", beat, patience)


@contextlib.contextmanager
def started(work: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    """Run a function in a process, which is killed at the end."""
    process = FORKS.Process(target=work, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def wait_until(done: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def work_together(place: str, folder: Path) -> None:
    """Add one to a number in a file, which needs a lock, and share pieces of work; write down what was found."""
    number, lines = folder / "number", folder / "lines"
    with member(place, patience=_ALL_LIVE) as pool:

        def work(name: str) -> list[str]:
            with lines.open("a") as file:
                file.write(f"{name}\n")
            time.sleep(0.02)
            return [name, pool.name]

        for _ in range(4):
            with pool.claim("number"):
                before = int(number.read_text())
                time.sleep(0.01)
                number.write_text(str(before + 1))
        values = dict(pool.share_all(PIECES, work))
    (folder / f"values-{os.getpid()}").write_text(repr(sorted(values.items())))


def hold(place: str, held: Path, seconds: float = 60.0, patience: int = 4) -> None:
    """Hold the claim ``thing``, and say so by a file."""
    with member(place, patience=patience) as pool, pool.claim("thing"):
        held.touch()
        time.sleep(seconds)


def stop_in_a_piece(place: str, held: Path) -> None:
    """Begin a piece of work and stop the process in the middle of it."""
    with member(place, beat=60) as pool:  # a thread that is stopped in a transaction would lock the database

        def work() -> str:
            held.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
            return "late"

        held.with_name("value").write_text(pool.share("piece", work))


def study_in(storage: BaseStorage, seed: int = 0) -> optuna.Study:
    """Open the study."""
    sampler = optuna.samplers.RandomSampler(seed)
    return optuna.create_study(
        study_name=NAME, storage=storage, sampler=sampler, pruner=optuna.pruners.NopPruner(), direction="maximize",
        load_if_exists=True,
    )  # fmt: skip


def search(place: str, trials: int, record: Path) -> None:
    """Run trials of the study until it has enough, and append the numbers of those that finished here to a file."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with member(place, beat=0.2, patience=30) as pool:
        study = study_in(pool.board._storage, pool.seed)
        objective = Objective(Slow({}), SPACE, PROMPTS, SETTINGS, seed=0)

        def on_trial(trial: FrozenTrial) -> None:
            with record.open("a") as lines:
                lines.write(f"{trial.number}\n")

        starts = [SpeculativeConfig("prompt_lookup", length) for length in (2, 3, 4)]
        run_trials(study, objective, StudySettings(n_trials=trials), on_trial, starts, pool=pool)
