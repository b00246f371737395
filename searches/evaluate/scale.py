"""Workers on one study: how much faster several are, and what is left of a study after faults.

Usage: ``python -m searches.evaluate.scale [only=[faults]] [field=value]``

Workers are processes of the real program on a real PostgreSQL. Their back end is simulated and sleeps in place of decoding,
so that sixteen of them run on few cores and the best configuration is known. A scenario runs one study. While it runs,
workers are killed with SIGKILL, servers are stopped, a disk fills up, or a clock is wrong. Afterwards the trials, the MLflow
runs, the rows of the workers and the exports are counted, with queries of this program's own.

The same command resumes: finished scenarios are kept until the program changes. The exit code is 4 if a criterion was
missed.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient
from omegaconf import DictConfig, OmegaConf

from layerskip import load_target
from layerskip.files import digest, write_json
from searches.app.application import NOT_CONFIRMED, run
from searches.app.checks import InputError, check_list, check_seed, check_whole
from searches.app.record_header import program_sources, record_header
from searches.app.resume_log import ResultLog
from searches.evaluate import criteria
from searches.evaluate.criteria import Count
from searches.evaluate.expected_rounds import TOKENS
from searches.evaluate.gpu_programs import quoted
from searches.evaluate.landscape import Landscape
from searches.evaluate.scale_checks import inspect, judge, times_per_trial, winner
from searches.evaluate.scale_fleet import Fleet
from searches.evaluate.scale_scenario import Scenario
from searches.evaluate.scale_services import Database, TrackingServer, database, small_disk
from searches.evaluate.scale_worker import clock_library
from searches.evaluate.simulated_backend import SimulatedBackend, save_random_model
from searches.evaluate.simulated_decoder import PREFILL_STEPS

_SCHEMA = "layerskip.scale/1"
_SIZES = ("drawn_prompts", "trial_prompts", "survivor_prompts", "held_out_prompts")
_DISK_MEGABYTES = 200
_EXPERIMENT = "scale"


def measure_scale(config: DictConfig) -> dict[str, Any]:
    """Run the scenarios and return the record. See ``conf/scale.yaml``.

    Raises:
        SystemExit: a criterion was missed; exit code 4.
    """
    scenarios = _scenarios(config)
    outputs = (Path(config.outputs) / "scale").resolve()
    model = outputs / "model"
    save_random_model(model, config.layers)
    target = load_target(str(model), dtype="float32", device="cpu")
    path = Path(config.record or Path(config.outputs) / "scale.json")
    record = record_header(_SCHEMA, target) | {"config": OmegaConf.to_container(config, resolve=True), "scenarios": {}}
    record["target"]["name"] = model.name  # its folder differs from run to run
    rows, counts = record["scenarios"], list[Count]()
    sizes = [config[name] for name in ("seed", "layers", *_SIZES)]
    log = ResultLog(outputs / f"{digest([sizes, program_sources()])[:12]}.jsonl")
    for name, scenario in scenarios.items():
        key = f"{name} {digest(asdict(scenario))[:12]}"
        if key not in log:
            shutil.rmtree(outputs / name, ignore_errors=True)  # of a run that was interrupted, or of other settings
            with database() as server:  # a new one each time, as its size slows it down
                log.add(key, run_scenario(name, scenario, config, server, outputs / name, model))
        rows[name] = log[key]
        counts += judge(name, scenario, rows[name], rows)
        record["counts"] = [asdict(count) | {"share": count.share, "passed": count.passed} for count in counts]
        write_json(path, record)
        print(f"{name}: {rows[name]['seconds']:.1f} s, {rows[name]['winner'].get('label', 'no winner')}", flush=True)
    print(criteria.table(counts))
    print(f"wrote {path}")
    if not all(count.passed for count in counts):
        sys.exit(NOT_CONFIRMED)
    return record


def _scenarios(config: DictConfig) -> dict[str, Scenario]:
    """Return the chosen scenarios, checked."""
    check_seed(config.seed)
    check_whole("layers", config.layers, 6)
    for field in _SIZES:
        check_whole(field, config[field], 10)
    if config.only is not None:
        check_list("only", config.only, [str(name) for name in config.scenarios], or_empty=False)
    names = [str(name) for name in config.scenarios if config.only is None or name in config.only]
    scenarios = {name: Scenario(**OmegaConf.to_container(config.scenarios[name])) for name in names}  # type: ignore[arg-type]
    for place, (name, scenario) in enumerate(scenarios.items()):
        if scenario.like is not None and scenario.like not in names[:place]:
            raise InputError(f"scenarios.{name}.like: {scenario.like} is none of the scenarios that run before it")
        if scenario.hours_ahead:
            clock_library()
    return scenarios


def run_scenario(
    name: str, scenario: Scenario, config: DictConfig, storage: Database, folder: Path, model: Path
) -> dict[str, Any]:
    """Run one scenario and return what was found after it.

    Args:
        name: of the scenario and its study.
        scenario: its settings.
        config: configuration ``conf/scale.yaml``.
        storage: takes the study.
        folder: of everything that is written.
        model: folder of the target.
    """
    folder.mkdir(parents=True)
    store = f"sqlite:///{folder / 'mlflow.db'}"
    client = MlflowClient(store)
    client.search_experiments()  # creates the tables, which takes seconds
    landscape = Landscape.draw(config.seed, config.layers)
    with contextlib.ExitStack() as stack:
        server, disk, tracking = None, None, store
        if scenario.tracking_gone:
            server = TrackingServer(store, folder / "artifacts")
            stack.callback(server.close)
            tracking = server.url
        else:  # without a server, artifacts would go to the machine whose worker creates the experiment
            client.create_experiment(_EXPERIMENT, artifact_location=(folder / "artifacts").as_uri())
        if scenario.full_disk:
            disk = folder / "disk"
            stack.enter_context(small_disk(disk, _DISK_MEGABYTES))
        overrides = (
            "target=local",
            f"target.path={quoted(str(model))}",
            "target.dtype=float32",
            "target.device=cpu",
            f"backend._target_={SimulatedBackend.__module__}.{SimulatedBackend.__qualname__}",
            f"+backend.seed={config.seed}",
            f"+backend.pace={_pace(landscape, scenario, config)}",
            "prompts._target_=searches.evaluate.workload.draw_prompts",
            f"+prompts.count={config.drawn_prompts}",
            f"+prompts.seed={config.seed}",
            "space.kinds=[none,layer_skip,prompt_lookup]",
            "scan=none",
            f"measure.prompts={config.trial_prompts}",
            f"measure.survivor_prompts={config.survivor_prompts}",
            "measure.survivor_repeats=0",
            f"measure.held_out_prompts={config.held_out_prompts}",
            "measure.held_out_repeats=1",
            f"seed={config.seed}",
            f"study.name={name}",
            f"study.n_trials={scenario.n_trials}",
            f"study.storage={quoted(storage.url)}",
            f"tracking.uri={quoted(tracking)}",
            f"tracking.experiment={_EXPERIMENT}",
        )
        fleet = Fleet(scenario, name, folder, overrides, storage, server, random.Random(config.seed), disk)
        seconds = fleet.run()
        places = [*fleet.outputs, *([] if disk is None else [disk])]
        return {
            "settings": asdict(scenario),
            "seconds": seconds,
            "faults": dict(fleet.done),
            "ends": dict(fleet.ends),
            "lost": len(fleet.lost),
            **inspect(name, storage, tracking),
            "winner": winner(name, places, landscape),
            "per_trial": times_per_trial(fleet.times),
        }


def _pace(landscape: Landscape, scenario: Scenario, config: DictConfig) -> float:
    """Return the real seconds of sleep per simulated second of a trial."""
    steps = 2 * config.trial_prompts * (statistics.fmean(TOKENS) + PREFILL_STEPS)
    return float(scenario.trial_seconds / (steps * landscape.profile.verify_seconds[0]))


if __name__ == "__main__":
    run("scale", measure_scale)
