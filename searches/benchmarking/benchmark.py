"""Named configurations and peers side by side: what is how fast, on these prompts, on this machine, today?

``python -m searches.benchmark`` measures them in one run, interleaved prompt by prompt; ``config=best.json`` adds an export,
and takes the prompts that no search sees. It prints a table, writes JSON and logs to MLflow; interrupted, it prints a table
of what was measured, and keeps nothing. A drafter's memory is that of its weights, caches and tables beside what the target
has; mapped files and the caches of transformers' own methods are not counted.
On CUDA, what decoding takes at its peak beside all that is loaded is told too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from layerskip import (
    AcceptRule,
    Export,
    Measurement,
    PromptSet,
    Sampling,
    SkipMask,
    SpeculativeConfig,
    Target,
    UnsupportedModel,
    save_draft_checkpoint,
)
from layerskip.costs.tree_timing import TreeTiming, time_tree
from layerskip.files import write_json
from layerskip.measure.measure import Decoder, Task, interleave
from layerskip.measure.measurement import Sample
from searches.app.checks import InputError, check_flag, check_seed, check_whole
from searches.app.interrupt import is_interrupt
from searches.app.record_header import record_header
from searches.benchmarking.peers import Peer
from searches.benchmarking.table import table
from searches.space.choices import DraftCost
from searches.study.cascade_costs import Timer
from searches.study.objective import MeasureSettings
from searches.tracking.tracker import Tracker
from searches.training.datastores import refuse_answers_of

BASELINE = "plain"


def benchmark(config: DictConfig) -> dict[str, Any]:
    """Measure all contenders of a composed benchmark; see ``conf/benchmark.yaml``."""
    sampling: Sampling = instantiate(config.sampling)
    measuring: MeasureSettings = instantiate(config.measure)
    prompts: PromptSet = instantiate(config.prompts)
    if config.config is not None:  # prompts that it was chosen on would flatter it
        _, prompts = prompts.split()
    prompts = prompts.take(measuring.prompts)
    check_seed(config.seed)
    check_flag("allow_lossy", config.allow_lossy)
    check_whole("tree.tokens", config.tree.tokens, 0)
    check_whole("tree.context", config.tree.context)
    _check_rows(config)
    target: Target = instantiate(config.target)
    _fit_depth(config, target.layers)
    if config.draft_folder is None:
        made = f"{Path(target.name).name}-{target.digest[:8]}-{target.dtype}-without-{config.draft_mask}"
        config.draft_folder = str(Path(config.outputs) / "drafts" / re.sub(r"[^\w.-]+", "_", made))
    contenders, rivals, configs = _contenders(config, target, prompts, sampling)
    tracker = Tracker(config.tracking.uri, Path(config.outputs), config.tracking.experiment)
    timing = _time_tree(config, target, sampling)
    task = Task(sampling, measuring.max_new_tokens, config.seed)
    rows: list[Mapping[str, Sample]] = []
    held = dict.fromkeys(contenders, 0)
    repeats = measuring.repeats

    def record_of(repeats: int, count: int) -> dict[str, Any]:
        return record_header("layerskip.benchmark/1", target) | {
            "sampling": sampling.to_dict(),
            "max_new_tokens": task.max_new_tokens,
            "repeats": repeats,
            "prompts": {"name": prompts.name, "count": count, "digest": prompts.digest},
            "configs": {name: found.to_dict() for name, found in configs.items()},
            "results": {
                name: _result(rows, name, rivals.get(name), _members(name, configs))
                | {"lossless": name not in configs or configs[name].lossless, "drafter_bytes": held[name]}
                for name in contenders
            },
            "verification": None if timing is None else timing.to_dict(),
        }

    try:
        with tqdm(total=len(prompts) * repeats, unit="prompt", disable=None) as bar:
            for row in interleave(target, prompts, contenders, task, repeats):
                rows.append(row)
                held |= {name: max(held[name], contender.held_bytes()) for name, contender in contenders.items()}
                bar.update()
    except BaseException as error:
        if is_interrupt(error) and rows:
            begun = record_of(-(-len(rows) // len(prompts)), min(len(rows), len(prompts)))
            of = f"{len(rows)} of {len(prompts) * repeats} measurements of a prompt"
            print(f"{table(begun)}\n\nInterrupted after {of}; no record is written.")
        raise
    record = record_of(repeats, len(prompts))
    text = table(record)
    print(text)
    path = Path(config.record or Path(config.outputs) / "benchmark.json")
    write_json(path, record)
    print(f"wrote {path}")
    tracker.log_benchmark(record, {"benchmark.md": text, "config.yaml": OmegaConf.to_yaml(config, resolve=True)}, path)
    return record


def _check_rows(config: DictConfig) -> None:
    known = {field.name for field in dataclasses.fields(Peer) if field.init} - {"target"}
    for group in ("contenders", "peers"):
        for name, row in config[group].items():
            if row is not None and not isinstance(row, DictConfig):
                raise InputError(f"{group}.{name}: {row!r} describes no way to decode; null leaves the row out")
            if group == "peers" and row is not None and (unknown := [str(key) for key in row if key not in known]):
                raise InputError(f"peers.{name}.{unknown[0]}: is not one of {', '.join(sorted(known))}")


def _fit_depth(config: DictConfig, layers: int) -> None:
    """Fill in what was left to the depth of the model: what the draft model and the self-drafts leave out."""
    if config.draft_mask is None and config.draft_folder is None:
        first = min(2, layers - 1)
        config.draft_mask = f"layers:{first}-{first + max(1, layers // 3) - 1}"
    skip, early = config.contenders.get("layer_skip"), config.peers.get("transformers_early_exit")
    if skip is not None and skip.mask is None:
        skip.mask = f"layers:{layers // 2}-{layers - 1}"
    if early is not None and early.exit_layer is None:
        early.exit_layer = layers // 2


def _time_tree(config: DictConfig, target: Target, sampling: Sampling) -> TreeTiming | None:
    """What trees cost to verify, where they are asked about and can be."""
    if not config.tree.tokens:
        return None
    try:
        return time_tree(target, config.tree.context, config.tree.tokens, sampling, seed=config.seed)
    except UnsupportedModel as error:
        print(f"tree: left out: {error}")
        return None


def _contenders(
    config: DictConfig, target: Target, prompts: PromptSet, sampling: Sampling
) -> tuple[dict[str, Decoder | Peer], dict[str, str], dict[str, SpeculativeConfig]]:
    """Everyone who takes part, who is compared with whom, and what our own are."""
    contenders: dict[str, Decoder | Peer] = {BASELINE: Decoder.of(target, SpeculativeConfig())}
    configs = {BASELINE: SpeculativeConfig()}
    own, others = _present(config.contenders), _present(config.peers)
    export = None if config.config is None else Export.load(config.config, target)
    peers, timer = set(others), Timer(target, sampling, config.tree.context, config.seed)
    verifying, drafting = cache(timer.verifying), partial(timer.drafting, known={})
    cascades: dict[str, Mapping[str, Any]] = {}
    rivals: dict[str, str] = {BASELINE: "transformers"} if "transformers" in peers else {}
    parts = [part for fields in (*own.values(), *others.values()) for part in (fields, *fields.get("members", ()))]
    used = [part.get("draft") for part in parts]
    if config.draft_mask and config.draft_folder in used:
        _ensure_draft(config, target)
    for name, fields in own.items():
        values: dict[str, Any] = dict(OmegaConf.to_container(fields, resolve=True))  # type: ignore[arg-type]
        rival = values.pop("rival", None)
        if rival is not None and rival not in config.peers:
            raise InputError(f"contenders.{name}.rival: {rival!r} is not one of {', '.join(map(str, config.peers))}")
        if rival in peers:
            rivals[name] = rival
        costs = {key: values.pop(key, None) for key in ("verify_cost", "draft_cost")}
        said = {key: cost for key, cost in costs.items() if cost is not None}
        if values.get("kind") == "cascade":
            cascades[name], said = said, {}
        configs[name] = SpeculativeConfig.from_dict(values | said)
        refuse_answers_of(f"contenders.{name}", configs[name], target, prompts)
    if export is not None:
        configs["export"] = export.config
        _say_found(export, target, sampling)
        refuse_answers_of("config", export.config, target, prompts)
    for name, found in list(configs.items()):
        try:
            if name in cascades:
                found = configs[name] = _told(found, cascades[name], verifying, drafting)
            contenders[name] = Decoder.of(target, found)
        except UnsupportedModel as error:
            print(f"contenders.{name}: left out: {error}")
            del configs[name]
            rivals.pop(name, None)
            continue
        if config.allow_lossy and found.lossless and name != BASELINE:
            for rule in ("threshold", "typical"):
                beside = f"{name}_{rule}"
                if beside in configs:
                    raise InputError(f"contenders.{beside}: allow_lossy=true gives {name} a row of that name")
                configs[beside] = dataclasses.replace(found, accept=AcceptRule(rule))
                contenders[beside] = Decoder.of(target, configs[beside])
    for name, fields in others.items():
        try:
            contenders[name] = Peer(target, **fields)
        except UnsupportedModel as error:
            print(f"peers.{name}: left out: {error}")
            rivals = {own: rival for own, rival in rivals.items() if rival != name}
    return contenders, rivals, configs


def _say_found(export: Export, target: Target, sampling: Sampling) -> None:
    """Say where what is measured is not what the export was found for."""
    found = {"target": export.target["name"], "dtype": export.target["dtype"], "sampling": export.sampling.to_dict()}
    here = {"target": target.name, "dtype": target.dtype, "sampling": sampling.to_dict()}
    for name, value in found.items():
        if value != here[name]:
            print(f"config: was found with {name} {value}, and is measured with {here[name]}", flush=True)


def _told(
    config: SpeculativeConfig,
    said: Mapping[str, Any],
    verifying: Callable[[], tuple[float, ...]],
    drafting: DraftCost,
) -> SpeculativeConfig:
    """A cascade that knows what drafts and their verification cost here, as far as that was not said."""
    costs = dict(said)
    if "verify_cost" not in costs:
        costs["verify_cost"] = list(verifying())
    if costs["verify_cost"] and config.lossless and "draft_cost" not in costs:
        costs["draft_cost"] = list(drafting(config.members))
    return SpeculativeConfig.from_dict(config.to_dict() | costs)


def _present(group: DictConfig) -> dict[str, Any]:
    """Those that are not left out, with null or, said in a line, for want of a draft model or a head."""
    found = {}
    for name, fields in group.items():
        wanting = [part for part in ("draft", "head") if fields is not None and fields.get(part, "") is None]
        if wanting:
            print(f"{name!s}: left out, for want of a {wanting[0]}")
        elif fields is not None:
            found[str(name)] = fields
    return found


def _ensure_draft(config: DictConfig, target: Target) -> None:
    """Cut the draft model out of the target, unless an earlier run did; the folder's name says out of which and how."""
    folder = Path(config.draft_folder)
    if not folder.exists():
        save_draft_checkpoint(target, SkipMask.parse(config.draft_mask, target.layers), folder)


def _members(name: str, configs: Mapping[str, SpeculativeConfig]) -> list[str]:
    """The contenders that a cascade is made of, as far as they take part by themselves."""
    return [other for other, config in configs.items() if name in configs and config in configs[name].members]


def _result(rows: list[Mapping[str, Sample]], name: str, rival: str | None, members: Sequence[str]) -> dict[str, Any]:
    found = Measurement.of(rows, BASELINE, name).to_dict()
    seconds = found["prefill_seconds"] + found["decode_seconds"]
    found["end_to_end_tokens_per_second"] = found["tokens"] / seconds
    risen = [sample.decoding_bytes for row in rows if (sample := row[name]).decoding_bytes is not None]
    found["decoding_bytes"] = max(risen, default=None)
    if rival is not None:
        found["rival"] = {"name": rival} | _ratio(Measurement.of(rows, rival, name))
    if members:
        found["members"] = {other: _beside(Measurement.of(rows, other, name)) for other in members}
    return found


def _ratio(measurement: Measurement) -> dict[str, float]:
    low, high = measurement.interval()
    return {"speedup": measurement.speedup, "low": low, "high": high}


def _beside(measurement: Measurement) -> dict[str, Any]:
    return _ratio(measurement) | {"by_category": {kind: _ratio(part) for kind, part in measurement.by_category.items()}}
