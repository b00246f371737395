"""MLflow runs that mirror a study: one run per study and one nested run per finished trial, without duplicates.

The study is the source of truth. A trial's run is written from the study after the trial has finished. Once the store was
opened, none of its errors ends a program: what a store does not take is written later, or when the study is resumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlflow.entities import RunTag
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from optuna.trial import FrozenTrial

from layerskip import PromptSet
from searches.app.interrupt import is_interrupt
from searches.tracking.runs import MEASURED, PARENT, Store, StudyRun, TrialRuns, dataset_of, metrics_now
from searches.tracking.store import PATIENCE, Outbox, is_of_store, open_experiment, reason

_NOTE = "mlflow.note.content"  # the tag that MLflow shows as the description of a run
_BEST = "best"
_TRIALS = "trials"  # the metric of the study's run that is written last
_MODEL = "model"  # the artifacts of the registered model
_REGISTERED = "registered_export"  # the tag with the digest of the export that was registered
_WATCH_SECONDS = 30.0  # between two metrics of the system, so that they cost a measurement nothing
_STOP_SECONDS = 5.0  # that metrics of the system may take to end


class Tracker:
    """Writer of the runs of one study into an experiment of a store, as :func:`open_experiment` opens or creates them."""

    def __init__(self, uri: str | None, folder: Path, experiment: str) -> None:
        client, self.uri, identifier = open_experiment(uri, folder, experiment)
        self._store, self._outbox = Store(client, identifier), Outbox(self.uri)

    @property
    def run_id(self) -> str | None:
        """The identifier of the study's run; None if the store was not reached."""
        return self._run.id

    def open_study(
        self,
        name: str,
        identity: str,
        params: Mapping[str, Any],
        tags: Mapping[str, Any],
        role: str = "study",
        prompts: PromptSet | None = None,
        texts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Create the run of a study or, by its ``role``, of something else, or resume it.

        ``identity`` distinguishes it from others of its name. ``params`` are flat settings, which every trial's run repeats,
        because MLflow's filters drop parent runs. ``prompts`` become its dataset, ``texts`` its artifacts, by name.
        """
        given = {key: str(value)[:500] for key, value in params.items()}
        own = {key: str(value) for key, value in tags.items()}
        dataset = None if prompts is None else dataset_of(prompts)
        self._run = StudyRun(self._store, name, identity, role, given, own, texts, dataset)
        self._trials = TrialRuns(self._run)
        self._send({})

    def reconcile(self, trials: Sequence[FrozenTrial]) -> None:
        """Delete incomplete and doubled runs of trials, and write those that are missing; nobody else may write any."""
        self._trials.is_tidy = False
        self.record(*trials)

    def record(self, *trials: FrozenTrial) -> None:
        """Write the runs of finished trials, unless they exist."""
        self._send({("trial", trial.number): partial(self._trials.write, trial) for trial in trials})

    def log(self, metrics: Mapping[str, float], step: int = 0) -> None:
        logged = metrics_now(metrics, step)
        self._send({object(): lambda: self._store.log(self._run.current(), logged)})

    def conclude(
        self,
        winner: str,
        sentence: str,
        trial: int | None,
        metrics: Mapping[str, float],
        files: Sequence[tuple[Path, str | None]] = (),
        again: bool = True,
    ) -> None:
        """Write the result of a finished study: tags and the description of its run, and the tag ``best`` of the winner's.

        ``sentence`` is the verdict, ``trial`` the number of the winner's trial, if any; earlier winners lose the tag.
        ``metrics`` hold the number of ``trials``: only ``again`` replaces a complete result of as many. ``files`` are
        artifacts with their folders.
        """
        run, logged = self._run, metrics_now(metrics)

        def write() -> None:
            client, run_id = self._store.client, run.current()
            if not again and client.get_run(run_id).data.metrics.get(_TRIALS) == metrics[_TRIALS]:
                return
            for path, folder in files:
                client.log_artifact(run_id, str(path), folder)
            tags = {"winner": winner, "verdict": sentence, _NOTE: sentence}
            client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
            for best in run.tagged(f"{_BEST} = 'true'"):
                client.delete_tag(best.info.run_id, _BEST)
            for best in [] if trial is None else run.tagged(f"trial_number = '{trial}'"):
                client.set_tag(best.info.run_id, _BEST, "true")
            self._store.log(run_id, logged)  # last: they show that nothing is missing

        self._send({"result": write})

    def register(self, export: Path) -> None:
        """Register an export's file as the version ``best`` of a model with the study's name, unless it was."""
        run, digest = self._run, hashlib.sha256(export.read_bytes()).hexdigest()

        def write() -> None:
            from searches.tracking import best_model  # MLflow's models take a second to import

            client, run_id = self._store.client, run.current()
            if client.get_run(run_id).data.tags.get(_REGISTERED) == digest:
                return
            with tempfile.TemporaryDirectory() as place:
                best_model.save(export, Path(place, _MODEL))
                client.log_artifacts(run_id, place)
            name = re.sub("[/:]", "-", run.name)  # which MLflow refuses
            try:
                client.create_registered_model(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            version = client.create_model_version(name, f"runs:/{run_id}/{_MODEL}", run_id)
            client.set_registered_model_alias(name, best_model.ALIAS, version.version)
            client.set_tag(run_id, _REGISTERED, digest)

        self._send({"model": write})

    def log_file(self, path: Path) -> None:
        self._send({("file", path): lambda: self._store.client.log_artifact(self._run.current(), str(path))})

    @contextlib.contextmanager
    def closing(self, leave: Callable[[], bool] = lambda: False, worker: str | None = None) -> Iterator[None]:
        """Close the study's run after a block, also if it raises, unless others work on the study (``leave``).

        Within the block, MLflow logs the use of processor, memory and GPU, apart for each ``worker`` of several.
        """
        try:
            with self._watching(worker):
                yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error is the one to report
                if not leave():
                    self.finish("KILLED" if is_interrupt(error) else "FAILED")
            raise
        self.finish(patience=PATIENCE)

    @contextlib.contextmanager
    def _watching(self, worker: str | None) -> Iterator[None]:
        if self.run_id is None:  # the store is away
            yield
            return
        monitor: Any = SystemMetricsMonitor(  # type: ignore[no-untyped-call]
            self.run_id, _WATCH_SECONDS, resume_logging=True, node_id=worker, tracking_uri=self.uri
        )

        def stop() -> None:
            monitor.finish()
            with contextlib.suppress(Exception):  # of the store
                monitor.publish_metrics(monitor.aggregate_metrics())  # all that a short program has
                monitor.mlflow_logger.flush()

        monitor.start()
        try:
            yield
        finally:
            stopping = threading.Thread(target=stop, daemon=True)  # a store that hangs must not keep the program
            stopping.start()
            stopping.join(_STOP_SECONDS)

    def finish(self, status: str = "FINISHED", patience: float | None = None) -> None:
        """Close the study's run as ``FINISHED``, ``KILLED`` or ``FAILED``; wait ``patience`` seconds for an outage's end."""
        self._send({"status": lambda: self._store.client.set_terminated(self._run.current(), status)}, patience)

    def _send(self, writes: Mapping[Hashable, Callable[[], object]], patience: float | None = None) -> None:
        self._run.is_checked = False
        for key, write in {"run": self._run.current, **writes}.items():
            self._outbox.put(key, write)
        self._outbox.send(patience)

    def log_benchmark(self, record: Mapping[str, Any], texts: Mapping[str, str], file: Path) -> None:
        """Write the runs of a benchmark, one run and one nested run per contender, unless the store fails."""
        client, store = self._store.client, self._store
        tags = {"role": "benchmark", "date": record["date"]} | {k: str(v) for k, v in record["environment"].items()}
        params = {key: str(record["target"][key]) for key in ("name", "dtype")}
        try:
            run_id = store.create("benchmark", tags)
            for name, result in record["results"].items():
                child = store.create(name, {PARENT: run_id, "role": "contender", "contender": name})
                metrics = {key: result[key] for key in MEASURED}
                store.log(child, metrics_now(metrics), params)
                client.set_terminated(child)
            for name, text in texts.items():
                client.log_text(run_id, text, name)
            client.log_artifact(run_id, str(file))
            client.set_terminated(run_id)
        except Exception as error:
            if not is_of_store(error):
                raise
            print(f"tracking.uri: the benchmark is incomplete in the store: {reason(error, self.uri)}", flush=True)
