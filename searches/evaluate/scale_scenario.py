"""A scenario of ``searches.evaluate.scale``: how many workers, how much work, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass

from searches.app.checks import InputError, check_flag, check_number, check_whole


@dataclass(frozen=True)
class Scenario:
    """One study and its faults. Counts of 0 leave a fault out.

    Args:
        workers: number of processes at a time.
        n_trials: number of finished trials at the end.
        trial_seconds: seconds that a trial sleeps until its first look, if it decodes as slowly as plain decoding.
        machines: number of machines that the workers are taken to be on. Each has an outputs folder of its own, and does not
            see which processes of the others have ended.
        beat_seconds: seconds between two signs of life of a worker.
        kills: number of workers that are killed with SIGKILL at random moments, and replaced.
        restarts: number of times that the database is stopped at random moments, for up to 3 seconds. Every other time it
            stops as after a power cut.
        database_gone: seconds for which the database is stopped once, after half of the trials.
        tracking_gone: seconds for which the MLflow server is stopped once, after a third of the trials; 0 tracks in a SQLite
            file, without a server.
        hours_ahead: hours by which the clock of the first worker is ahead.
        full_disk: whether the disk of the first worker fills up after the first trial.
        like: name of the scenario with the same study, whose winner must be about as fast; None compares nothing.
        most_share: largest share of that scenario's seconds; None sets no limit.
        most_coordination: largest number of seconds of a trial in which a worker agrees with others; None sets no limit.
        limit_seconds: seconds after which the workers are taken to hang.
    """

    workers: int
    n_trials: int
    trial_seconds: float
    machines: int = 1
    beat_seconds: float = 1.0
    kills: int = 0
    restarts: int = 0
    database_gone: float = 0.0
    tracking_gone: float = 0.0
    hours_ahead: float = 0.0
    full_disk: bool = False
    like: str | None = None
    most_share: float | None = None
    most_coordination: float | None = None
    limit_seconds: float = 1800.0

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("n_trials", 1), ("machines", 1), ("kills", 0), ("restarts", 0)):
            check_whole(f"scenarios.{name}", getattr(self, name), least)
        for name in ("trial_seconds", "limit_seconds", "beat_seconds"):
            check_number(f"scenarios.{name}", getattr(self, name))
        for name in ("database_gone", "tracking_gone", "hours_ahead"):
            check_number(f"scenarios.{name}", getattr(self, name), or_zero=True)
        check_flag("scenarios.full_disk", self.full_disk)
        if self.full_disk and self.workers < 2:
            raise InputError("scenarios.workers: a full disk ends one worker, and another one must go on")
