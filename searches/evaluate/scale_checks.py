"""What is left of a study in its database, its MLflow store and its folders, and the criteria for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient

from layerskip import SpeculativeConfig
from searches.evaluate.criteria import Count
from searches.evaluate.landscape import Landscape
from searches.evaluate.planted import CLOSE
from searches.evaluate.scale_fleet import FINISHED as ENDED_WELL
from searches.evaluate.scale_scenario import Scenario
from searches.evaluate.scale_services import Database
from searches.evaluate.scale_worker import COORDINATION, PROCESSOR, SECONDS, TRIALS

_ROWS = 1000  # runs per page of MLflow
_FINISHED = ("COMPLETE", "PRUNED")
_DISK_FULL = "2: error: outputs: cannot write"
_REFUSED = (
    "2: error: tracking.uri: cannot open",
    "2: error: study.storage: cannot open",
)  # workers that start during an outage
_EXPECTED_ENDS = (ENDED_WELL, _DISK_FULL, *_REFUSED)


def inspect(name: str, database: Database, tracking: str) -> dict[str, Any]:
    """Count a study's trials by state, its MLflow runs, and the rows by which its workers agree.

    Args:
        name: of the study.
        database: holds it.
        tracking: URI of its MLflow store.
    """
    client = MlflowClient(tracking)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs: list[Any] = []
    token = None
    while True:
        page = client.search_runs(experiments, f"tags.study = '{name}'", max_results=_ROWS, page_token=token)
        runs += page
        if not (token := page.token):
            break
    by_trial = Counter(int(run.data.tags["trial_number"]) for run in runs if run.data.tags["role"] == "trial")
    return {
        "trials": database.states(name),
        "runs": dict(Counter(run.info.status for run in runs)),
        "study_runs": sum(run.data.tags["role"] == "study" for run in runs),
        "trials_with_one_run": sum(by_trial[number] == 1 for number in database.finished(name) or ()),
        "trial_runs": by_trial.total(),
        "rows": database.states(f"{name}-workers"),
    }


def winner(name: str, outputs: Sequence[Path], landscape: Landscape) -> dict[str, Any]:
    """Return the exported configuration and its true speedup; the exports are those of all machines that wrote one."""
    files = [folder / name / "best.json" for folder in outputs]
    exports = [json.loads(file.read_text(encoding="utf-8"))["config"] for file in files if file.exists()]
    configs = {SpeculativeConfig.from_dict(fields) for fields in exports}
    if len(configs) != 1:
        return {"exports": len(configs)}
    (config,) = configs
    return {"exports": 1, "config": config.to_dict(), "label": config.label(), "true_speedup": landscape.speedup(config)}


def times_per_trial(files: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Return the mean seconds of a trial by kind of work, over the workers that ended by themselves.

    Returns:
        ``seconds`` of the clock and of the ``processor``, each by kind.
    """
    workers = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    trials = sum(worker[TRIALS] for worker in workers) or 1
    totals = {clock: Counter[str]() for clock in (SECONDS, PROCESSOR)}
    for worker in workers:
        for clock, total in totals.items():
            total.update(worker[clock])
    return {clock: {kind: seconds / trials for kind, seconds in total.items()} for clock, total in totals.items()}


def judge(name: str, scenario: Scenario, row: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> list[Count]:
    """Return the criteria of a scenario.

    Args:
        name: of the scenario.
        scenario: its settings.
        row: what was found.
        rows: what was found in the scenarios before it.
    """
    trials, runs = row["trials"], row["runs"]
    finished = sum(trials.get(state, 0) for state in _FINISHED)
    asked = {kind: getattr(scenario, kind) for kind in ("kills", "restarts")}
    asked |= {kind: int(bool(getattr(scenario, kind))) for kind in ("database_gone", "tracking_gone")}
    asked |= {"full_disks": int(scenario.full_disk)}
    counts = [
        Count("trials finished, of those asked for", finished, scenario.n_trials, least=1, most=1),
        Count("finished trials lost", row["lost"], finished, most=0),
        Count("trials left running", trials.get("RUNNING", 0), sum(trials.values()), most=0),
        Count("finished trials with exactly one MLflow run", row["trials_with_one_run"], finished, least=1),
        Count("further MLflow runs of trials", row["trial_runs"] - row["trials_with_one_run"], row["trial_runs"], most=0),
        Count("MLflow runs left running", runs.get("RUNNING", 0), sum(runs.values()), most=0),
        Count("MLflow runs of the study", row["study_runs"], 1, least=1, most=1),
        Count("rows of workers left live", row["rows"].get("RUNNING", 0), sum(row["rows"].values()), most=0),
        Count("exported winners", row["winner"]["exports"], 1, least=1, most=1),
    ]
    counts += [Count(f"{kind} that happened", row["faults"].get(kind, 0), of, least=1) for kind, of in asked.items() if of]
    ends = row["ends"]
    failed = sum(count for end, count in ends.items() if not end.startswith(_EXPECTED_ENDS))
    counts.append(Count("workers that ended with an error", failed, sum(ends.values()), most=0))
    if scenario.full_disk:
        full = sum(count for end, count in ends.items() if end.startswith(_DISK_FULL))
        counts.append(Count("workers that a full disk ended", full, 1, least=1, most=1))
    if scenario.like is not None:
        like = rows[scenario.like]
        speedups = [found["winner"].get("true_speedup", 0.0) for found in (row, like)]
        alike = min(speedups) >= CLOSE * max(speedups) > 0
        counts.append(Count(f"winner as fast as that of {scenario.like}", int(alike), 1, least=1))
        if scenario.most_share is not None:
            took, whole = round(row["seconds"]), round(like["seconds"])
            counts.append(Count(f"seconds, of those of {scenario.like}", took, whole, most=scenario.most_share))
    if scenario.most_coordination is not None:
        coordination = row["per_trial"][SECONDS].get(COORDINATION, 0.0)
        spent, most = (round(1000 * seconds) for seconds in (coordination, scenario.most_coordination))
        counts.append(Count("milliseconds of coordination per trial, of those allowed", spent, most, most=1))
    return [Count(f"{name}: {count.name}", count.times, count.of, count.least, count.most) for count in counts]
