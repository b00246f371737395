"""The opening of a study: its storage, its workers, and the type of device that it measures on."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from omegaconf import DictConfig, OmegaConf
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from layerskip import SpeculativeConfig, Target
from layerskip.export import PROVISIONAL
from layerskip.files import digest, read_json
from layerskip.models.environment import machine
from searches.app.checks import InputError, check_folder
from searches.connections import sqlite_url, without_password
from searches.study.finals import Finalist, Finals
from searches.study.storage import locked, open_database, open_journal
from searches.study.study import StudySettings
from searches.tracking.tracker import Tracker
from searches.workers.pool import ALONE, WorkerPool, Workers

JOINED = "works on study "
"""In the line that a worker prints when it joins, before the name of the study."""
_DATABASE = "study.db"
_JOURNAL = "journal.log"


def is_database(storage: str | None) -> bool:
    """Return whether a storage is a database or a server, on which several processes may work."""
    return storage is not None and "://" in storage


def storage_url(settings: StudySettings, folder: Path) -> str:
    """Return the URL of the database of a study that several processes work on: by default SQLite in the study's folder.

    Raises:
        InputError: the storage is a journal file.
    """
    if settings.storage is None and (folder / _JOURNAL).exists():
        raise InputError(f"study.name: {folder / _JOURNAL} is for one process; choose another name for several workers")
    if settings.storage is not None and not is_database(settings.storage):
        raise InputError(
            f"study.storage: {settings.storage} is a journal file, which is for one process; "
            "several workers need a database, such as sqlite:///study.db"
        )
    return settings.storage or sqlite_url(folder / _DATABASE)


def is_shared(settings: StudySettings, worker: int | None, folder: Path) -> bool:
    """Return whether other processes may work on a study: it has a numbered worker, a database, or had one in its folder."""
    in_folder = settings.storage is None and (folder / _DATABASE).exists()
    return worker is not None or in_folder or is_database(settings.storage)


def device_type(target: Target) -> str:
    """Return the type of the target's device, as far as speeds depend on it: a GPU, or a processor and its threads."""
    about = machine(target)
    return str(about["device_name"]) + (f", {about['threads']} threads" if about["device"] == "cpu" else "")


def place(outputs: Path, name: str, settings: StudySettings, device: str, shared: bool) -> tuple[str, Path]:
    """Return the name of a study in its storage, and its folder; devices of mixed types have a study and a folder each."""
    if shared and settings.devices == "mixed":
        name = f"{name}/{re.sub('[^A-Za-z0-9]+', '-', device).strip('-')}"
    check_folder("study.name", str(outputs / name))
    return name, outputs / name


@contextlib.contextmanager
def joined(
    name: str, folder: Path, settings: StudySettings, database: BaseStorage | None, device: str, shared: bool
) -> Iterator[tuple[BaseStorage, Workers]]:
    """Open the storage of a study, and join its workers if it may have others.

    The folder is locked if no other process may work on the study. ``database`` is None if the storage is a file in it.

    Raises:
        InputError: another process works on the study, which is in a file, or the study measures on another type of device.
    """
    if not shared:
        with locked(folder):
            yield open_journal(Path(settings.storage or folder / _JOURNAL), not settings.storage), ALONE
        return
    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it warns of every connection that breaks
    storage = database or open_database(storage_url(settings, folder))
    with WorkerPool(storage, name, device) as pool:
        first = pool.share("device", lambda: device)
        if first != device:
            raise InputError(
                f"study.devices: study {name} measures on {first}, and this is {device}; "
                "study.devices=mixed keeps the results of each type apart"
            )
        print(f"worker {pool.name} {JOINED}{name}", flush=True)
        yield storage, pool


def share_finals(pool: Workers, trials: Sequence[FrozenTrial], measure: Callable[[Callable[[], None]], Finals]) -> Finals:
    """Return the finals of a study with some finished trials, which one of its workers measures and publishes.

    ``measure`` does both. It calls its argument from time to time, which raises an error if another worker does them now.
    """
    name = f"finals {digest([trial.number for trial in trials])[:16]}"

    def work() -> dict[str, Any]:
        finals = measure(partial(pool.check, name))
        fields = {field.name: getattr(finals, field.name) for field in dataclasses.fields(finals)}
        return fields | {"finalists": [vars(row) | {"config": row.config.to_dict()} for row in finals.finalists]}

    fields = pool.share(name, work)
    rows = (row | {"config": SpeculativeConfig.from_dict(row["config"])} for row in fields["finalists"])
    return Finals(**fields | {"finalists": tuple(Finalist(**row) for row in rows)})


def is_exported(path: Path, study: str, trials: int) -> bool:
    """Return whether an export of a study with a number of finished trials exists."""
    search = (read_json(path) or {}).get("search") or {}
    return (search.get("study"), search.get("trials"), bool(search.get(PROVISIONAL))) == (study, trials, False)


def connect(config: DictConfig, storage: str | None) -> tuple[BaseStorage | None, Tracker]:
    """Connect to remote services first: one of them may be unreachable, and nothing has been written yet."""
    track = partial(Tracker, config.tracking.uri, Path(config.outputs), config.tracking.experiment)
    remote = track() if config.tracking.uri is not None else None
    database = open_database(storage) if storage is not None and is_database(storage) else None
    return database, remote or track()


def composed(config: DictConfig) -> str:
    """Return the composed configuration as YAML, without the passwords of its databases."""
    shown = config.copy()
    for part, name in (("study", "storage"), ("tracking", "uri")):
        if shown[part][name] is not None:
            shown[part][name] = without_password(str(shown[part][name]))
    return OmegaConf.to_yaml(shown, resolve=True)
