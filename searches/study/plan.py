"""The plan of a study: every part of a composed configuration, built and checked, and the settings that identify it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from layerskip import DraftPlan, PromptSet, Sampling, Target, UnsupportedModel
from layerskip.config import methods
from layerskip.decoding.checkpoint_settings import check_settings
from layerskip.decoding.drafter import drafter_classes
from layerskip.decoding.tree import tree_model
from layerskip.device.memory import within_memory
from layerskip.drafters.registry import build_drafter
from layerskip.drafters.retrieval import Datastore
from layerskip.files import digest, short_name
from layerskip.models.loading import WHEELS, load_draft
from layerskip.models.packing import uses_packing
from layerskip.models.positions import check_positions
from layerskip.models.skip_view import copies_bytes
from searches.app.checks import InputError, check_list, check_seed
from searches.backends.backend import Backend, Workload
from searches.backends.layerskip import LayerskipBackend
from searches.backends.selection import make_backend, supported_space
from searches.engines.race import chosen_engines
from searches.predict.preparation import ScanSettings
from searches.space.search_space import SearchSpace
from searches.study.objective import MeasureSettings
from searches.study.study import StudySettings
from searches.training.texts import refuse_answers

_WITHOUT_EFFECT = ("outputs", "study", "tracking", "backend", "workload", "worker", "engines")
"""Parts of the configuration that do not change the results of trials, or that :func:`describe` describes itself."""


@dataclass(frozen=True)
class Plan:
    """Every part of a study's configuration, built: all prompts, and the space without methods that it cannot run."""

    settings: StudySettings
    measuring: MeasureSettings
    scanning: ScanSettings
    sampling: Sampling
    target: Target
    backend: Backend
    workload: Workload
    prompts: PromptSet
    space: SearchSpace
    seed: int
    outputs: Path
    engines: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: DictConfig) -> Plan:
        """Build and check all parts, the cheap ones first, so that mistakes in them are reported at once."""
        check_seed(config.seed)
        settings, measuring, scanning = (instantiate(config[part]) for part in ("study", "measure", "scan"))
        sampling: Sampling = instantiate(config.sampling)
        prompts: PromptSet = instantiate(config.prompts)
        prompts.split()  # refuses a set that is too small for held-out prompts
        target: Target = instantiate(config.target)
        check_settings(target, sampling)
        engines = chosen_engines(config.engines)
        if engines and not sampling.greedy:
            raise InputError("engines: are measured greedily; sampling=greedy")
        backend, workload = make_backend(config, target)
        if engines and not (isinstance(backend, LayerskipBackend) and target.device.type == "cpu"):
            raise InputError("engines: are measured beside backend=layerskip on a CPU")
        if workload.concurrency != 1:  # one prompt measured again would be alone in the engine
            measuring = replace(measuring, drift=math.inf)
        check_prompts(prompts, target, measuring.max_new_tokens)
        _resolve(config)
        space = instantiate(config.space, layers=target.layers)
        _print_left_out(space)
        if isinstance(backend, LayerskipBackend):
            space = drop_unsupported(space, target)
            _check_drafters(space, target)
        space = supported_space(space, backend)
        for method, field, names in _given_paths(config):
            for name in names if field == "datastore" else ():
                refuse_answers(f"space.ranges.{method}.{field}", str(name), target, prompts)
        return cls(
            settings=settings,
            measuring=measuring,
            scanning=scanning,
            sampling=sampling,
            target=target,
            backend=backend,
            workload=workload,
            prompts=prompts,
            space=space,
            seed=config.seed,
            outputs=Path(config.outputs),
            engines=engines,
        )


def check_prompts(prompts: PromptSet, target: Target, max_new_tokens: int) -> None:
    """Check that a chat template accepts all turns of all prompts, and that the model has enough positions for them."""
    for item in prompts:
        messages = item.messages()
        for followup in item.followups:
            messages += [{"role": "assistant", "content": "..."}, {"role": "user", "content": followup}]
        count = len(target.encode(messages, item.field)) + max_new_tokens * len(item.followups)
        try:
            check_positions(target.model, count, count + max_new_tokens)
        except UnsupportedModel as error:
            raise InputError(f"{item.field}: {error}") from None


def _resolve(config: DictConfig) -> None:
    """Make folders absolute, so that choices hold from any working directory."""

    def absolute(name: str) -> str:
        return str(Path(name).resolve()) if name not in WHEELS and Path(name).exists() else name

    for method, field, names in _given_paths(config):
        check_list(f"space.ranges.{method}.{field}", names)
        config.space.ranges[method][field] = [absolute(str(name)) for name in names]


def _given_paths(config: DictConfig) -> list[tuple[str, str, Any]]:
    given = config.space.ranges or {}
    return [
        (method.name, field.name, given[method.name][field.name])
        for method in methods().values()
        if isinstance(given.get(method.name), DictConfig)
        for field in method.fields
        if field.path and field.name in given[method.name]
    ]


def _print_left_out(space: SearchSpace) -> None:
    """Print the chosen methods that have no head or model to draft with, and the fields that would provide one."""
    missing = [
        f"{method.name} (space.ranges.{method.name}.{field.name} is empty)"
        for method in methods().values()
        if space.methods is None or method.name in space.methods
        for field in method.fields
        if field.required and not space.values(method.name, field.name)
    ]
    if missing:
        print(f"space.methods: left out: {', '.join(missing)}", flush=True)


def _check_drafters(space: SearchSpace, target: Target) -> None:
    """Load every head and draft model, so that an unusable one is refused at the start; draft models stay loaded."""
    for method in map(methods().__getitem__, space.available_methods):
        for field in (field for field in method.fields if field.required):
            for name in space.values(method.name, field.name):
                config = space.nearest(method.name, {field.name: name})
                if within_memory(partial(build_drafter, config, target)) is None:
                    raise InputError(f"space.ranges.{method.name}.{field.name}: {name} does not fit into memory")


def drop_unsupported(space: SearchSpace, target: Target) -> SearchSpace:
    """Return the space without methods, and without tree drafts, that the target cannot have; print which are left out."""
    space = replace(space, copies_bytes=partial(copies_bytes, target.model))
    classes, available = drafter_classes(), space.available_methods
    refused = {name: reason for name in available if (reason := classes[name].unsupported(target))}
    if "quantized" in available and "quantized" not in refused:
        texts = space.values("quantized", "weights")
        over = [space.over_memory([DraftPlan.parse(text, space.layers)]) for text in texts]
        refused |= {"quantized": over[-1]} if all(over) else {}
    if refused:
        print("".join(f"space.methods: {name} left out: {reason}\n" for name, reason in refused.items()), end="")
        space = replace(space, methods=tuple(name for name in available if name not in refused))
        if set(space.available_methods) == {"none"} != set(available):
            raise InputError(f"space.methods: the target supports none of {', '.join(refused)}")
    chosen = [methods()[method] for method in space.available_methods]
    trees = [method.name for method in chosen if method.trees_only]
    others = [method.name for method in chosen if "top_k" in method and not method.trees_only]
    trees += [f"trees of {name}" for name in others if space.values(name, "top_k")[1] > 1]
    if not trees:
        return space
    try:
        tree_model(target.model)
    except UnsupportedModel as error:
        print(f"space.methods: {', '.join(trees)} left out: {error}")
        return replace(space, trees=False)
    return space


def describe(config: DictConfig, target: Target, prompts: PromptSet, backend: Backend | None = None) -> dict[str, Any]:
    """Return everything that changes the measurements of a trial, flat and plain; by default of this library."""
    engine = None if isinstance(backend, LayerskipBackend) else backend
    parts = {k: v for k, v in _plain(config).items() if k not in _WITHOUT_EFFECT}
    if engine is not None:
        parts |= {"backend": {"name": engine.name, **engine.describe()}, "workload": _plain(config.get("workload"))}
    flat = {key: value for key, value in flatten(parts).items() if not key.endswith("_target_")}
    flat.pop("target.pack_weights", None)  # what came of it counts
    flat.pop("sampler.registry_root", None)  # where the sampler lies
    if uses_packing(target.model):
        flat["target.packed_weights"] = True
    flat |= {"sampler": config.sampler._target_.rpartition(".")[2], "pruner": config.pruner._target_.rpartition(".")[2]}
    return flat | {
        "target.digest": target.digest,
        "target.dtype": target.dtype,
        "target.device": target.device.type,
        "target.layers": target.layers,
        "prompts.digest": prompts.digest,
        "space.digests": [
            _path_digest(method, field, str(name), target, engine is None)
            for method, field, names in _given_paths(config)
            for name in (names if config.space.methods is None or method in config.space.methods else ())
        ],
    }


def _path_digest(method: str, field: str, name: str, target: Target, loads: bool) -> str:
    """Return the digest of what a field names; an empty one of a folder without weights, as for a name on the hub.

    ``loads`` tells whether this program loads draft models, not an engine.
    """
    if field == "datastore":
        return str(Datastore.load(name, target).about["digest"])
    if field == "draft_model" and loads:
        return load_draft(target, name, method == "draft_model").digest
    try:
        files = [file for ending in ("safetensors", "bin") for file in sorted(Path(name).glob(f"*.{ending}"))]
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else ""
    except OSError as error:
        raise InputError(f"space: cannot read the head {name}: {error}") from None


def _plain(config: Any) -> dict[str, Any]:
    return dict(OmegaConf.to_container(config, resolve=True)) if config else {}  # type: ignore[arg-type]


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by dotted names."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for name, part in value.items() for k, v in flatten(part, f"{prefix}.{name}" if prefix else name).items()}


def default_name(config: DictConfig, flat: dict[str, Any]) -> str:
    """Return a study's name. Commands that measure the same give the same name, and other commands other names."""
    target = Path(config.target.get("name") or config.target.path).name.removesuffix(".gguf")
    return f"{short_name(target)}-{flat['sampler'].removesuffix('Sampler').lower()}-seed{config.seed}-{digest(flat)[:6]}"
