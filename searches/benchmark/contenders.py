"""Contenders of a benchmark: our configurations, an export, and transformers' own decoding methods."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from layerskip import (
    DraftPlan,
    Export,
    PromptSet,
    Sampling,
    SpeculativeConfig,
    Target,
    UnsupportedModel,
    save_draft_checkpoint,
)
from layerskip.files import short_name
from layerskip.measure.measure import Decoder
from layerskip.models.loading import DTYPES, MIXED, NATIVE, load_target
from searches.app.checks import InputError, check_list
from searches.backends.engine_process import interpreter
from searches.benchmark.peers import Peer
from searches.engines.peer import EnginePeer
from searches.study.machine import CostTimer
from searches.training.texts import refuse_answers_of

BASELINE = "plain"
CONTEXT = 256  # tokens before those by which the costs of cascades are measured


class Contenders(NamedTuple):
    """All decoders of a benchmark, the peer that each of ours is compared with, and our configurations, each by name."""

    decoders: dict[str, Decoder | Peer | EnginePeer]
    rivals: dict[str, str]
    configs: dict[str, SpeculativeConfig]


def check_rows(config: DictConfig) -> None:
    """Refuse contenders and peers that are neither mappings nor null, and unknown fields of peers."""
    known = {kind: {field.name for field in dataclasses.fields(kind) if field.init} for kind in (Peer, EnginePeer)}
    for group in ("contenders", "peers"):
        for name, row in config[group].items():
            if row is not None and not isinstance(row, DictConfig):
                raise InputError(f"{group}.{name}: {row!r} is not a configuration; null leaves the row out")
            fields = known[EnginePeer if row is not None and "engine" in row else Peer] - {"target", "folder"}
            if group == "peers" and row is not None and (unknown := [str(key) for key in row if key not in fields]):
                raise InputError(f"peers.{name}.{unknown[0]}: is not one of {', '.join(sorted(fields))}")


def fill_defaults(config: DictConfig, target: Target) -> None:
    """Fill in what depends on the target: the layers that draft models and self-drafts skip, and the draft model's folder.

    The folder's name identifies the target and the mask, so an existing draft model can be used again.
    """
    layers = target.layers
    if config.draft_mask is None and config.draft_folder is None:
        first = min(2, layers - 1)
        config.draft_mask = f"layers:{first}-{first + max(1, layers // 3) - 1}"
    if config.draft_folder is None:
        name = f"{Path(target.name).name}-{target.digest[:8]}-{target.dtype}-without-{config.draft_mask}"
        config.draft_folder = str(Path(config.outputs) / "drafts" / short_name(re.sub(r"[^\w.-]+", "_", name)))
    skip = config.contenders.get("layer_skip")
    if skip is not None and skip.mask is None:
        skip.mask = f"layers:{layers // 2}-{layers - 1}"


def build_contenders(
    config: DictConfig, target: Target, prompts: PromptSet, sampling: Sampling, opened: contextlib.ExitStack
) -> Contenders:
    """Build the contenders of a benchmark. Those that cannot decode with the target are left out with a message.

    The configuration has its defaults filled in (:func:`fill_defaults`). Datastores must not contain answers of the prompts.
    ``opened`` ends the processes of engines.
    """
    own, peers = _present(config.contenders), _present(config.peers)
    drafts = [part.get("draft_model") for row in (*own.values(), *peers.values()) for part in (row, *row.get("members", ()))]
    export = None if config.config is None else Export.load(config.config, target)
    if config.draft_mask and config.draft_folder in drafts and not Path(config.draft_folder).exists():
        save_draft_checkpoint(target, DraftPlan.parse(config.draft_mask, target.layers), Path(config.draft_folder))
    rivals, configs = {BASELINE: "transformers"}, {BASELINE: SpeculativeConfig()}
    targets: dict[str, Target] = {}
    for name, row in own.items():
        fields: Any = OmegaConf.to_container(row, resolve=True)
        if (rival := fields.pop("rival", None)) is not None:
            check_list(f"contenders.{name}.rival", [rival], list(map(str, config.peers)))
            rivals[name] = rival
        if (dtype := fields.pop("dtype", None)) is not None:
            check_list(f"contenders.{name}.dtype", [dtype], (*DTYPES, MIXED, NATIVE))
            targets[name] = load_target(target.name, target.revision, dtype, str(target.device))
        configs[name] = SpeculativeConfig.from_dict(fields)
        refuse_answers_of(f"contenders.{name}", configs[name], target, prompts)
    if export is not None:
        configs["export"] = export.config
        refuse_answers_of("config", export.config, target, prompts)
    decoders: dict[str, Decoder | Peer | EnginePeer] = {}
    timer, draft_costs = CostTimer(target, sampling, CONTEXT, config.seed), dict[str, float]()
    verify_costs = cache(timer.verify_costs)
    for name, ours in list(configs.items()):
        try:
            if name in own and ours.members:  # costs that the configuration does not give are measured
                if "verify_cost" not in own[name]:
                    ours = replace(ours, verify_cost=verify_costs())
                if ours.verify_cost and "draft_cost" not in own[name]:
                    ours = replace(ours, draft_cost=timer.draft_costs(ours.members, draft_costs))
                configs[name] = ours
            decoders[name] = Decoder.of(targets.get(name, target), ours)
        except UnsupportedModel as error:
            if name == BASELINE:
                raise
            print(f"contenders.{name}: left out: {error}")
            del configs[name]
    for name, row in peers.items():
        try:
            if "engine" in row:
                engine = EnginePeer(target, Path(config.outputs) / "engines", **row)
                decoders[name] = opened.enter_context(contextlib.closing(engine))
            else:
                decoders[name] = Peer(target, **row)
        except UnsupportedModel as error:
            print(f"peers.{name}: left out: {error}")
    present = {name: rival for name, rival in rivals.items() if name in decoders and rival in decoders}
    return Contenders(decoders, present, configs)


def _present(group: DictConfig) -> dict[str, Any]:
    """Return the rows that are not null. Rows without their draft model, head or engine are left out with a message."""
    present, not_installed = {}, []
    for name, row in group.items():
        if row is None:
            continue
        missing = [str(part) for part in row if OmegaConf.is_missing(row, str(part))]
        missing += [part for part in ("draft_model", "head") if row.get(part, "") is None]
        if "engine" in row and interpreter(str(row.engine), row.get("python")) is None:
            not_installed.append(str(name))
        elif missing:
            print(f"{name!s}: left out: it has no {missing[0]}")
        else:
            present[str(name)] = row
    if not_installed:
        print(f"{', '.join(not_installed)}: left out: not installed; make engines installs them")
    return present
