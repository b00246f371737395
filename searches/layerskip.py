"""The study: search a target's fastest lossless decoding, confirm it on held-out prompts, export it.

``python -m searches.layerskip`` with Hydra overrides; the same command again goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from optuna.storages import BaseStorage
from tqdm import tqdm

from layerskip import Export, PromptSet, Sampling, SkipMask, SpeculativeConfig, Target, UnsupportedModel
from layerskip.datastore import Datastore
from layerskip.environment import environment
from layerskip.files import digest
from layerskip.tree import tree_model

from . import report
from .application import InputError, run  # first: it sets the environment that the imports below read
from .bench import ModelBench
from .finals import Finals, measure_finals
from .foresight import ScanSettings, foresee
from .objective import MeasureSettings, Objective, check_seed
from .oracle import ScanOracle
from .prior import Prior
from .proposals import propose, propose_lookups
from .space import SearchSpace
from .stability import SeedStability, across_seeds
from .standings import incumbent, ranking
from .study import (
    SETTINGS,
    StudySettings,
    add_foresight,
    finished,
    locked,
    open_database,
    open_journal,
    open_study,
    prepare,
    run_trials,
    study_id,
    without_password,
)
from .tracking import Tracker

_LEAST_FREE_BYTES = 64 * 2**20
_WITHOUT_EFFECT = ("outputs", "study", "tracking")
"""Parts of the configuration that do not change what a trial measures."""


@dataclass(frozen=True)
class Plan:
    """A composed study: every part of its configuration, made."""

    settings: StudySettings
    measuring: MeasureSettings
    scanning: ScanSettings
    sampling: Sampling
    target: Target
    prompts: PromptSet
    space: SearchSpace
    seed: int
    outputs: Path

    @classmethod
    def of(cls, config: DictConfig) -> Plan:
        """Make the parts, the cheap ones first, so that a mistake in them is told at once."""
        check_seed(config.seed)
        settings, measuring, scanning = (instantiate(config[part]) for part in ("study", "measure", "scan"))
        sampling: Sampling = instantiate(config.sampling)
        prompts: PromptSet = instantiate(config.prompts)
        prompts.split()  # refuses a set that is too small to hold anything out
        target: Target = instantiate(config.target)
        for item in prompts:
            target.encode(item.messages())  # a chat template that refuses one shall do so now
        space = supported(instantiate(config.space, layers=target.layers), target)
        space = replace(space, datastores=[open_datastore(name, target, prompts) for name in space.datastores])
        return cls(settings, measuring, scanning, sampling, target, prompts, space, config.seed, Path(config.outputs))


def open_datastore(name: str, target: Target, prompts: PromptSet) -> str:
    """A datastore's absolute path.

    Raises:
        InputError: it holds the target's answers to prompts of the study.
        ConfigError: it cannot be used.
    """
    known = set(Datastore.load(name, target).about.get("prompts", ())) & {item.id for item in prompts}
    if known:
        raise InputError(f"space.datastores: {name} holds the target's own answers to {len(known)} of the study's prompts")
    return str(Path(name).resolve())


def supported(space: SearchSpace, target: Target) -> SearchSpace:
    """The space without the kinds that a target which otherwise decodes cannot verify, said in a line."""
    trees = [kind for kind in space.arms if kind in ("retrieval", "token_recycling", "lookahead")]
    siblings = ["siblings"] if "layer_skip" in space.arms and space.siblings else []
    if not trees and not siblings:
        return space
    try:
        tree_model(target.model)
    except UnsupportedModel as error:
        print(f"space.kinds: {', '.join(trees + siblings)} left out: {error}")
        return replace(space, kinds=[kind for kind in space.arms if kind not in trees], siblings=0)
    return space


def search(config: DictConfig) -> Finals:
    """Run a composed study to its end; see ``conf/layerskip.yaml``."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    plan = Plan.of(config)
    flat = describe(config, plan.target, plan.prompts)
    name = plan.settings.name or default_name(config, flat)
    folder = plan.outputs / name
    check_space(folder)
    database, tracker = _connect(config, plan.settings.storage)
    with locked(folder):
        storage = database or open_journal(Path(plan.settings.storage or folder / "journal.log"))
        study = open_study(name, storage, instantiate(config.pruner), flat)
        # A resumed sampler must not draw once more what it drew before.
        study.sampler = instantiate(config.sampler, seed=config.seed + len(study.trials))
        described = environment(plan.target.device) | {"prompts_digest": plan.prompts.digest}
        tracker.open_study(name, study_id(study), flat, described)
        tracker.log_text(_composed(config), "config.yaml")
        try:
            return _search(plan, study, tracker, folder)
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                tracker.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise


def _connect(config: DictConfig, storage: str | None) -> tuple[BaseStorage | None, Tracker]:
    """Reach what may be out of reach before anything is written here."""
    track = functools.partial(Tracker, config.tracking.uri, Path(config.outputs), config.tracking.experiment)
    remote = track() if config.tracking.uri is not None else None
    database = open_database(storage) if storage is not None and "://" in storage else None
    return database, remote or track()


def _composed(config: DictConfig) -> str:
    """The composed configuration as YAML, its databases without passwords."""
    shown = config.copy()
    for part, name in (("study", "storage"), ("tracking", "uri")):
        if shown[part][name] is not None:
            shown[part][name] = without_password(str(shown[part][name]))
    return OmegaConf.to_yaml(shown, resolve=True)


def _search(plan: Plan, study: optuna.Study, tracker: Tracker, folder: Path) -> Finals:
    tune, held_out = plan.prompts.split()
    measuring, settings = plan.measuring, plan.settings
    start = time.monotonic()
    oracle = _foresee(plan, tune, folder)
    proposed = _propose(oracle, plan)
    add_foresight(study, time.monotonic() - start)
    prepare(study, plan.space, proposed)
    for trial in finished(study):
        tracker.record(trial)
    print(f"study {study.study_name}: {len(finished(study))} of {settings.n_trials} trials are there", flush=True)
    bench = ModelBench(plan.target, plan.sampling, measuring.max_new_tokens)
    prior = None if oracle is None else Prior(oracle)
    with tqdm(total=settings.n_trials, initial=len(finished(study)), unit="trial", disable=None) as bar:
        objective = Objective(bench, plan.space, tune, measuring, plan.seed, bar.refresh, prior)

        def on_trial(trial: optuna.trial.FrozenTrial) -> None:
            tracker.record(trial)
            bar.update()
            bar.set_postfix_str(f"best {incumbent(study):.3f} x")

        try:
            run_trials(study, objective, settings, on_trial)
        except KeyboardInterrupt:
            bar.close()
            print(report.summary(study, None))
            raise
    final_prompts = held_out.take(measuring.held_out_prompts)
    rounds = len(final_prompts) * measuring.held_out_repeats
    with tqdm(total=rounds, unit="prompt", desc="held-out", disable=None) as bar:
        finals = measure_finals(study, bench, final_prompts, measuring, plan.seed, folder, bar.update)
    _publish(plan, study, tracker, finals, oracle, folder, final_prompts)
    return finals


def _foresee(plan: Plan, tune: PromptSet, folder: Path) -> ScanOracle | None:
    """An oracle, where layer skipping is searched and scanning is asked for."""
    scanning, measuring = plan.scanning, plan.measuring
    if not scanning.enabled or "layer_skip" not in plan.space.arms:
        return None
    prompts = tune.take(scanning.prompts)
    return foresee(
        plan.target, prompts, plan.sampling, measuring.max_new_tokens, plan.space, scanning, plan.outputs, folder, plan.seed
    )


def _propose(oracle: ScanOracle | None, plan: Plan) -> list[SpeculativeConfig]:
    if oracle is None:
        return []
    with tqdm(total=plan.scanning.proposals.asked(plan.space), unit="mask", desc="scan", disable=None) as bar:
        also = oracle.similar_masks(plan.space.skippable)
        found = propose(oracle, plan.space, plan.scanning.proposals, bar.update, also)
    lookups = propose_lookups(oracle, plan.space, plan.scanning.proposals.lookups)
    configs = [prediction.config for prediction in (*lookups, *found)]
    if found and plan.space.siblings:
        configs.insert(len(lookups) + 1, replace(found[0].config, siblings=plan.space.siblings))
    return configs


def _publish(
    plan: Plan,
    study: optuna.Study,
    tracker: Tracker,
    finals: Finals,
    oracle: ScanOracle | None,
    folder: Path,
    prompts: PromptSet,
) -> None:
    """Write the report and the export, and log both."""
    winner, target = finals.winner, plan.target
    spent = report.search_seconds(study, finals)
    found = {"study": study.study_name, "trials": len(finished(study)), "seconds": spent, "mlflow_run_id": tracker.run_id}
    evidence = dict(winner.held_out) | {"prompts_digest": prompts.digest, "max_new_tokens": plan.measuring.max_new_tokens}
    where = environment(target.device)
    export = Export(Export.describe(target), winner.config, plan.sampling, evidence, where, search=found)
    export.save(folder / "best.json")
    stable = oracle.stability(2 * len(plan.space.skippable)) if oracle is not None else None
    scan_seconds = oracle.scan_seconds if oracle is not None else None
    text = report.summary(study, finals, stable, _compare_seeds(study, plan, folder), scan_seconds)
    (folder / "report.md").write_text(text, encoding="utf-8")
    singles = oracle.single_agreements() if oracle is not None else None
    report.draw(study, finals, target.layers, folder / "report.png", singles)
    for name in ("report.md", "report.png", "best.json"):
        tracker.log_file(folder / name)
    tracker.log(
        tracker.run_id,
        {
            "held_out_speedup": winner.held_out["speedup"],
            "held_out_speedup_low": winner.held_out["speedup_low"],
            "held_out_speedup_high": winner.held_out["speedup_high"],
            "held_out_tokens_per_second": winner.held_out["tokens_per_second"],
            "search_seconds": spent,
            "trials": len(finished(study)),
        },
    )
    tracker.tag({"winner": winner.config.label(), "verdict": report.verdict(finals)})
    tracker.finish()
    print(text)
    print(f"wrote {folder / 'best.json'} and {folder / 'report.png'}; compare runs with:")
    print(f"  mlflow ui --backend-store-uri {without_password(tracker.uri)}")


def _compare_seeds(study: optuna.Study, plan: Plan, folder: Path) -> SeedStability | None:
    """How like the best mask is to those that the same study chose with other seeds."""
    masks = [standing.config.mask for standing in ranking(study) if standing.config.kind == "layer_skip"]
    if not masks:
        return None
    mask, sublayers = SkipMask.parse(masks[0], plan.target.layers), 2 * len(plan.space.skippable)
    return across_seeds(folder, study.user_attrs[SETTINGS], mask, sublayers)


def describe(config: DictConfig, target: Target, prompts: PromptSet) -> dict[str, Any]:
    """Everything that changes what a trial measures, flat and with plain values."""
    parts = {k: v for k, v in OmegaConf.to_container(config, resolve=True).items() if k not in _WITHOUT_EFFECT}  # type: ignore[union-attr]
    flat = {key: value for key, value in _flatten(parts).items() if not key.endswith("_target_")}
    flat |= {"sampler": config.sampler._target_.rpartition(".")[2], "pruner": config.pruner._target_.rpartition(".")[2]}
    return flat | {
        "target.digest": target.digest,
        "target.dtype": target.dtype,
        "target.device": target.device.type,
        "target.layers": target.layers,
        "prompts.digest": prompts.digest,
        "space.datastores.digests": [Datastore.load(name, target).about["digest"] for name in config.space.datastores],
    }


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for name, part in value.items() for k, v in _flatten(part, f"{prefix}.{name}" if prefix else name).items()}


def default_name(config: DictConfig, flat: dict[str, Any]) -> str:
    """A study's name: the same command gives the same, and a command that measures something else another."""
    target = Path(config.target.get("name") or config.target.path).name.removesuffix(".gguf")
    return f"{target}-{flat['sampler'].removesuffix('Sampler').lower()}-seed{config.seed}-{digest(flat)[:6]}"


def check_space(folder: Path) -> None:
    """Refuse to start on a disk that is as good as full.

    Raises:
        InputError: less than 64 MB are free.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        raise InputError(f"outputs: {place} cannot be written to")
    stats = os.statvfs(place)
    if stats.f_bavail * stats.f_frsize < _LEAST_FREE_BYTES:
        raise InputError(f"outputs: {place} has no space left; {_LEAST_FREE_BYTES // 2**20} MB are needed")


if __name__ == "__main__":
    run("layerskip", search)
