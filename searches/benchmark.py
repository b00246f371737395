"""Named configurations and peers side by side: what is how fast, on these prompts, on this machine, today?

``python -m searches.benchmark`` measures them in one run, interleaved prompt by prompt; ``config=best.json`` adds an export,
and takes the prompts that no search sees. It prints a table, writes JSON and logs to MLflow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from layerskip import (
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
from layerskip.files import write_json
from layerskip.measure import Contender, Decoder, Task, interleave
from layerskip.measurement import Sample
from layerskip.tree_timing import TreeTiming, time_tree

from .application import InputError, check_whole, run
from .datastore import refuse_answers
from .heading import heading
from .objective import MeasureSettings, check_seed
from .peers import Peer
from .tracking import Tracker

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
    check_whole("tree.tokens", config.tree.tokens, 0)
    check_whole("tree.context", config.tree.context)
    target: Target = instantiate(config.target)
    _fit_depth(config, target.layers)
    if config.draft_folder is None:
        made = f"{Path(target.name).name}-{target.dtype}-without-{config.draft_mask}"
        config.draft_folder = str(Path(config.outputs) / "drafts" / re.sub(r"[^\w.-]+", "_", made))
    contenders, rivals, configs = _contenders(config, target, prompts)
    tracker = Tracker(config.tracking.uri, Path(config.outputs), config.tracking.experiment)
    timing = _time_tree(config, target, sampling)
    task = Task(sampling, measuring.max_new_tokens, config.seed)
    rows: list[Mapping[str, Sample]] = []
    repeats = measuring.repeats
    with tqdm(total=len(prompts) * repeats, unit="prompt", disable=None) as bar:
        for row in interleave(target, prompts, contenders, task, repeats):
            rows.append(row)
            bar.update()
    record = heading("layerskip.benchmark/1", target) | {
        "sampling": sampling.to_dict(),
        "max_new_tokens": task.max_new_tokens,
        "repeats": repeats,
        "prompts": {"name": prompts.name, "count": len(prompts), "digest": prompts.digest},
        "configs": {name: found.to_dict() for name, found in configs.items()},
        "results": {
            name: _result(rows, name, rivals.get(name), _members(name, configs))
            | {"lossless": name not in configs or configs[name].lossless}
            for name in contenders
        },
        "verification": None if timing is None else timing.to_dict(),
    }
    text = table(record)
    print(text)
    path = Path(config.record or Path(config.outputs) / "benchmark.json")
    write_json(path, record)
    print(f"wrote {path}")
    tracker.log_benchmark(record, {"benchmark.md": text, "config.yaml": OmegaConf.to_yaml(config, resolve=True)}, path)
    return record


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
    config: DictConfig, target: Target, prompts: PromptSet
) -> tuple[dict[str, Contender], dict[str, str], dict[str, SpeculativeConfig]]:
    """Everyone who takes part, who is compared with whom, and what our own are."""
    contenders: dict[str, Contender] = {BASELINE: Decoder.of(target, SpeculativeConfig())}
    configs = {BASELINE: SpeculativeConfig()}
    own, others = _present(config.contenders), _present(config.peers)
    export = None if config.config is None else Export.load(config.config, target).config
    peers = set(others)
    rivals: dict[str, str] = {BASELINE: "transformers"} if "transformers" in peers else {}
    used = [fields.get("draft") for fields in (*own.values(), *others.values())]
    if config.draft_mask and config.draft_folder in used:
        _ensure_draft(config, target)
    for name, fields in own.items():
        values: dict[str, Any] = dict(OmegaConf.to_container(fields, resolve=True))  # type: ignore[arg-type]
        rival = values.pop("rival", None)
        if rival is not None and rival not in config.peers:
            raise InputError(f"contenders.{name}.rival: {rival!r} is not one of {', '.join(map(str, config.peers))}")
        if rival in peers:
            rivals[name] = rival
        configs[name] = SpeculativeConfig.from_dict(values)
        _check_datastores(f"contenders.{name}", configs[name], target, prompts)
    if export is not None:
        configs["export"] = export
        _check_datastores("config", export, target, prompts)
    for name, found in configs.items():
        contenders[name] = Decoder.of(target, found)
    for name, fields in others.items():
        contenders[name] = Peer(target, **fields)
    return contenders, rivals, configs


def _check_datastores(owner: str, config: SpeculativeConfig, target: Target, prompts: PromptSet) -> None:
    """No drafter shall find the answers that it is measured on."""
    named = {owner: config} | {f"{owner}.members.{place}": member for place, member in enumerate(config.members)}
    for field, found in named.items():
        if found.datastore:
            refuse_answers(f"{field}.datastore", found.datastore, target, prompts)


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


def table(record: Mapping[str, Any]) -> str:
    """A record as Markdown: all prompts, then kind of work by kind of work, then the conditions."""
    lines = [
        "| decoding | tokens/s | x plain | 95 % interval | acceptance | tokens/round | drafting | memory | output "
        "| x rival (transformers) |",
        "|" + "---|" * 10,
    ]
    results = record["results"]
    for name, found in results.items():
        rival = found.get("rival")
        against = f"{rival['speedup']:.2f} ({rival['low']:.2f} to {rival['high']:.2f})" if rival else ""
        drafts = record["configs"].get(name, {"kind": "none"})["kind"] != "none"
        acceptance = f"{found['acceptance_rate']:.2f}" if drafts else ""
        drafting = f"{found['draft_share']:.0%}" if drafts else ""
        output = found["losslessness"]["verdict"].replace("_", "-") if found["lossless"] else "lossy"
        memory = (found["peak_memory_bytes"] - found["baseline_peak_memory_bytes"]) / 2**20
        lines.append(
            f"| {name} | {found['tokens_per_second']:.1f} | {found['speedup']:.2f} "
            f"| {found['speedup_low']:.2f} to {found['speedup_high']:.2f} | {acceptance} "
            f"| {found['tokens_per_round']:.2f} | {drafting} | {memory:+.0f} MB "
            f"| {output} | {against} |"
        )
    kinds = sorted({kind for found in results.values() for kind in found["speedup_by_category"]})
    lines += ["", f"| x plain, by kind of work | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for name, found in results.items():
        shown = [f"{found['speedup_by_category'][kind]:.2f}" for kind in kinds]
        lines.append(f"| {_marked(name, found)} | {' | '.join(shown)} |")
    lines += _rounds(results, kinds) + _cascades(results, kinds)
    if (found := record.get("verification")) is not None:  # older records have none
        timing = TreeTiming(**found)
        lines += [
            "",
            f"Verifying a tree of {timing.tokens} tokens takes {timing.ratio:.2f} times what a chain of as many takes, "
            f"{timing.chain_seconds * 1000:.1f} ms behind {timing.context} tokens.",
        ]
    where, versions = record["environment"], record["environment"]["versions"]
    prompts = record["prompts"]
    lines += [
        "",
        f"{record['target']['name']} in {record['target']['dtype']} on {where['device']} ({where['device_name']}, "
        f"{where['threads']} threads), {prompts['count']} prompts ({prompts['name']}) x {record['repeats']}, "
        f"{record['max_new_tokens']} new tokens, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"{record['date']}.",
    ]
    return "\n".join(lines)


def _marked(name: str, found: Mapping[str, Any]) -> str:
    return name if found["lossless"] else f"{name} (lossy)"


def _rounds(results: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """Tokens per round, which hang on the drafter and the prompts, not on the machine; older records do not say."""
    rows = []
    for name, found in results.items():
        if (counts := found.get("tokens_per_round_by_category")) and found["tokens_per_round"] > 1:
            rows.append(f"| {_marked(name, found)} | {' | '.join(f'{counts[kind]:.2f}' for kind in kinds)} |")
    return ["", f"| tokens per round | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|", *rows] if rows else []


def _cascades(results: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """How many times as fast as its members a cascade is, prompt beside prompt."""

    def said(ratio: Mapping[str, float]) -> str:
        return f"{ratio['speedup']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"

    rows = []
    for name, found in results.items():
        for member, against in found.get("members", {}).items():
            shown = [said(against), *(said(against["by_category"][kind]) for kind in kinds)]
            rows.append(f"| {name} x {member} | {' | '.join(shown)} |")
    head = ["", f"| a cascade x its member | all | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|"]
    return [*head, *rows] if rows else []


if __name__ == "__main__":
    run("benchmark", benchmark)
