"""What does a composed configuration ask for? Every part of a study made and checked, and everything that names it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from layerskip import PromptSet, Sampling, SpeculativeConfig, Target, UnsupportedModel
from layerskip.config import kinds
from layerskip.decoding.tree import tree_model
from layerskip.device.memory import out_of_memory
from layerskip.drafters.datastore import Datastore
from layerskip.drafters.registry import build_drafter
from layerskip.files import digest
from layerskip.models.loading import load_draft
from layerskip.models.packing import packs
from layerskip.models.positions import most_positions
from layerskip.models.wheels import WHEELS
from searches.app.checks import InputError, check_list, check_seed
from searches.predict.preparation import ScanSettings
from searches.space.search_space import SearchSpace
from searches.study.objective import MeasureSettings
from searches.study.study import StudySettings
from searches.training.bridge_settings import BridgingSettings
from searches.training.bridge_store import BridgeStore
from searches.training.datastores import refuse_answers
from searches.training.training_texts import begun_like, check_drafted

_BRIDGED = ("space.bridges", "space.ranks", "space.draft_heads", "space.widths")
_LISTS = {"eagle": "eagle_heads", "medusa": "medusa_heads", "draft_model": "drafts", "cross_tokenizer": "cross_drafts"}
"""What a kind chooses from, and is nothing without."""
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
    bridge_store: BridgeStore | None
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
        check_prompts(prompts, target, measuring.max_new_tokens)
        _make_absolute(config)
        space = instantiate(config.space, layers=target.layers)
        _say_missing(space)
        space = _opened(supported(space, target), target)
        bridging: BridgingSettings = instantiate(config.bridging)  # refuses bad fields even of a space without bridges
        like = begun_like("bridging.begin_like", bridging.begin_like, prompts)
        store: BridgeStore | None = None
        if space.bridged:
            _check_bridged(space, target)
            width = max(space.widths, default=0) if "mlp" in space.bridges else 0
            store = BridgeStore(target, sampling, bridging, Path(config.outputs), config.seed, like, width)
            space = replace(space, bridge_store=store)
        for name in space.datastores:
            refuse_answers("space.datastores", name, target, prompts)
        outputs = Path(config.outputs)
        return cls(settings, measuring, scanning, sampling, target, prompts, space, store, config.seed, outputs)


def check_prompts(prompts: PromptSet, target: Target, max_new_tokens: int) -> None:
    """Refuse prompts that a target has no template or no positions for.

    Raises:
        PromptError: the chat template refuses one.
        InputError: one is too long.
    """
    most = most_positions(target.model)
    for item in prompts:
        count = len(target.encode(item.messages()))
        if most is not None and count + max_new_tokens > most:
            raise InputError(
                f"prompts: {item.id} has {count} tokens; with measure.max_new_tokens={max_new_tokens} that is beyond the "
                f"{most} positions that the model has learnt"
            )


def _make_absolute(config: DictConfig) -> None:
    """Name folders by where they lie: a study's choices and what it exports mean the same ones from anywhere."""

    def placed(name: str) -> str:
        return str(Path(name).resolve()) if name not in WHEELS and Path(name).exists() else name

    for listed in (*_LISTS.values(), "datastores"):
        check_list(f"space.{listed}", config.space[listed])
        config.space[listed] = [placed(str(name)) for name in config.space[listed]]


def _say_missing(space: SearchSpace) -> None:
    """Name the kinds that are asked for and have nothing to draft with, and what would put them in."""
    listed = space.heads | space.models
    missing = [f"{kind} (space.{_LISTS[kind]} is empty)" for kind in space.chosen if kind in listed and not listed[kind]]
    if missing:
        print(f"space.kinds: left out: {', '.join(missing)}", flush=True)


def _opened(space: SearchSpace, target: Target) -> SearchSpace:
    """The space, once every head and draft model in it was loaded: one that cannot be used is refused now, not mid-study.

    Draft models stay loaded, as a study would load them all anyway: each is among what it tries first.

    Raises:
        InputError: memory does not hold one of them.
        ConfigError: one does not fit the target.
        TargetError: one cannot be loaded.
        UnsupportedModel: one cannot be decoded with.
    """
    for kind, names in (space.heads | space.models).items():
        for name in names if kind in space.arms else ():
            # Chains, as trees that a target cannot verify are left out by now, and may leave a head that works.
            head = kind in space.heads
            config = SpeculativeConfig(kind, head=name, candidates=1) if head else SpeculativeConfig(kind, draft=name)
            try:
                build_drafter(config, target)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                raise InputError(f"space.{_LISTS[kind]}: {name} does not fit into memory beside the rest") from error
    return space


def supported(space: SearchSpace, target: Target) -> SearchSpace:
    """The space without the drafts that a target which otherwise decodes cannot verify, said in a line."""
    trees = [kind for kind in space.arms if kinds()[kind].trees_only]
    trees += ["trees of eagle"] if "eagle" in space.arms else []
    trees += ["siblings"] if "layer_skip" in space.arms and space.siblings else []
    if not trees:
        return space
    try:
        tree_model(target.model)
    except UnsupportedModel as error:
        print(f"space.kinds: {', '.join(trees)} left out: {error}")
        return replace(space, trees=False, siblings=0)
    return space


def _check_bridged(space: SearchSpace, target: Target) -> None:
    """Refuse bridges and draft heads of sizes that no model has room for, which the space alone does not know."""
    for rank in space.ranks:
        if rank > target.hidden:
            raise InputError(f"space.ranks: {rank} is not within 0 (a full map) and {target.hidden}")
    others = space.cross_drafts if "cross_tokenizer" in space.arms else ()
    for owner in (target, *(load_draft(target, name, same_tokenizer=False) for name in others)):
        for size in filter(None, space.draft_heads):
            check_drafted("space.draft_heads", size, owner)


def describe(config: DictConfig, target: Target, prompts: PromptSet, bridged: bool = False) -> dict[str, Any]:
    """Everything that changes what a trial measures, flat and with plain values."""
    parts = {k: v for k, v in OmegaConf.to_container(config, resolve=True).items() if k not in _WITHOUT_EFFECT}  # type: ignore[union-attr]
    flat = {key: value for key, value in _flatten(parts).items() if not key.endswith("_target_")}
    if not bridged:  # a study without bridges is what it was before there were any
        flat = {key: value for key, value in flat.items() if not key.startswith(("bridging.", *_BRIDGED))}
    if "mlp" not in config.space.bridges:  # nor does one without MLPs change as they join
        flat.pop("space.widths", None)
    flat.pop("target.pack_weights", None)  # what came of it counts
    if packs(target.model):
        flat["target.packed_weights"] = True
    flat.pop("scan.text_bytes", None)  # what it leaves out, the scans' own folder tells
    flat |= {"sampler": config.sampler._target_.rpartition(".")[2], "pruner": config.pruner._target_.rpartition(".")[2]}
    return flat | {
        "target.digest": target.digest,
        "target.dtype": target.dtype,
        "target.device": target.device.type,
        "target.layers": target.layers,
        "prompts.digest": prompts.digest,
        "space.datastores.digests": [Datastore.load(name, target).about["digest"] for name in config.space.datastores],
        "space.heads.digests": [_head_digest(name) for name in (*config.space.eagle_heads, *config.space.medusa_heads)],
        "space.drafts.digests": [
            load_draft(target, name, kind == "draft_model").digest  # loaded by now
            for kind in ("draft_model", "cross_tokenizer")
            for name in (config.space[_LISTS[kind]] if kind in config.space.kinds else ())
        ],
    }


def _head_digest(folder: str) -> str:
    """What a trained head is, whatever lies in its folder tomorrow."""
    try:
        files = [file for ending in ("safetensors", "bin") for file in sorted(Path(folder).glob(f"*.{ending}"))]
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else ""
    except OSError as error:
        raise InputError(f"space: cannot read the head {folder}: {error}") from None


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for name, part in value.items() for k, v in _flatten(part, f"{prefix}.{name}" if prefix else name).items()}


def default_name(config: DictConfig, flat: dict[str, Any]) -> str:
    """A study's name: the same command gives the same, and a command that measures something else another."""
    target = Path(config.target.get("name") or config.target.path).name.removesuffix(".gguf")
    return f"{target}-{flat['sampler'].removesuffix('Sampler').lower()}-seed{config.seed}-{digest(flat)[:6]}"
