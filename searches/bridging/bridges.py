"""Comparison of skip masks with and without bridges: agreement, draft cost, and speedup of the best on held-out prompts.

Body of ``python -m searches.bridges``. The program

1. fits and trains bridges for some masks on texts of the target,
2. scans the continuations of other prompts and predicts speedups from a cost profile,
3. decodes held-out prompts with the best empty skips, short ones included, and the best bridged skips, and
4. exports the winner by the rule of a study's finals, which may be plain decoding.

Works on any target that can be scanned. The same command resumes: fitted, trained and scanned results are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from matplotlib.figure import Figure
from omegaconf import DictConfig
from tqdm import tqdm

from layerskip import Export, MaskError, PromptSet, Sampling, SkipMask, SpeculativeConfig, Target, UnsupportedModel
from layerskip.drafters.registry import build_drafter
from layerskip.files import write_json
from layerskip.models.environment import environment
from searches.app.checks import InputError, check_list, check_number, check_seed, check_whole
from searches.app.record_header import record_header
from searches.backends.layerskip import LayerskipBackend
from searches.bridging.comparison import EMPTY, FITTED, MLP, TRAINED, BridgePoints
from searches.bridging.eagle import CHAIN, eagle_configs, eagle_point
from searches.bridging.finals import BridgeFinals, choose_finalists, measure_finalists, without_folders
from searches.predict.preparation import ScanSettings
from searches.report.study_report import verdict
from searches.study.bench import ModelBench
from searches.study.objective import MeasureSettings
from searches.training.trainer import check_learning
from searches.training.training_texts import check_draft_vocabulary, opening_texts

_BUDGETS = ("calibration_bytes", "training_bytes", "remembered_bytes")
_NUMBERS = ("depth", "contenders", "tokens", "max_new_tokens", "batch", *_BUDGETS)
_LEARNING = ("tokens", "texts_per_step", "learning_rate", "unroll", *_BUDGETS)
_SHORT_SKIPS = 2  # scanned for each contender


def bridges(config: DictConfig) -> dict[str, Any]:
    """Compare bridges and return the record. See ``conf/bridges.yaml``."""
    _check(config)
    measuring: MeasureSettings = instantiate(config.measure)
    scanning: ScanSettings = instantiate(config.scan)
    sampling: Sampling = instantiate(config.sampling)
    prompts: PromptSet = instantiate(config.prompts)
    tune, held_out = prompts.split()
    openings = opening_texts("begin_like", config.begin_like, prompts)
    target: Target = instantiate(config.target)
    for size in config.vocabularies:
        check_draft_vocabulary("vocabularies", size, target)
    masks = [_mask(text, target) for text in config.masks or _runs(target.layers)]
    head = None if config.eagle_head is None else str(config.eagle_head)
    others = _heads(head, target) if head else {}
    tune, held_out_set = tune.take(measuring.prompts), held_out.take(measuring.held_out_prompts)
    work = BridgePoints(config, target, sampling, scanning, tune, measuring.max_new_tokens, openings)
    points = [point for mask in masks for point in work.points(mask)]
    work.log_fits()  # fits of earlier runs, too
    short = [mask for mask in work.short_skips(_SHORT_SKIPS * int(config.contenders)) if mask not in masks]
    short_points = [point for mask in short for point in work.points(mask, bridged=False)]
    finalists = choose_finalists([*points, *short_points], int(config.contenders))
    bench = ModelBench(LayerskipBackend(target), sampling, measuring.max_new_tokens)
    with tqdm(total=len(held_out_set) * measuring.held_out_repeats, unit="prompt", desc="held-out", disable=None) as bar:
        result = measure_finalists(finalists, others, bench, held_out_set, measuring, config.seed, work.folder, bar.update)
    seconds, winner = _seconds([*points, *short_points], work, result), result.finals.winner
    evidence = dict(winner.held_out) | {"prompts_digest": held_out_set.digest, "max_new_tokens": measuring.max_new_tokens}
    machine, search = environment(target), {"seconds": sum(seconds.values())}
    Export(Export.describe(target), winner.config, sampling, evidence, machine, search).save(work.folder / "best.json")
    record = record_header("layerskip.bridges/1", target) | {
        "prompts": {"scanned": len(tune), "held_out": len(held_out_set), "digest": held_out.digest},
        "max_new_tokens": measuring.max_new_tokens,
        "texts": len(work.continuations),
        "trained": {**config.trained, "seconds": config.max_seconds},
        "learning": {name: config[name] for name in _LEARNING},
        "profile": work.profile.to_dict(),
        "points": [_recorded(point) for point in points],
        "short_skips": [_recorded(point) for point in short_points],
        "eagle": eagle_point(head, target, work.scanned, result.rows) if head else None,
        "measured": result.measured(),
        "over_empty": result.over_empty(),
        "winner": without_folders(winner.config),
        "seconds": seconds,
    }
    path = Path(config.record or Path(config.outputs) / "bridges.json")
    write_json(path, record)
    draw(record, path.with_suffix(".png"))
    print(table(record))
    print(f"\n{verdict(result.finals)}\nwrote {work.folder / 'best.json'}, {path} and {path.with_suffix('.png')}")
    return record


def _heads(head: str, target: Target) -> dict[str, SpeculativeConfig]:
    """Return the configurations of an EAGLE head. Trees are left out if the target cannot verify them.

    Raises:
        UnsupportedModel: the head cannot draft for the target.
    """
    configs = {}
    for name, config in eagle_configs(head).items():
        try:
            build_drafter(config, target)
        except UnsupportedModel as error:
            if name == CHAIN:
                raise
            print(f"{name}: left out: {error}")
            continue
        configs[name] = config
    return configs


def _check(config: DictConfig) -> None:
    check_seed(config.seed)
    check_whole("siblings", config.siblings, 0)
    for name in _NUMBERS:
        check_whole(name, config[name])
    check_learning(config)
    check_number("max_seconds", config.max_seconds, or_zero=True)
    check_list("kinds", config.kinds, FITTED)
    if MLP in config.kinds and (not isinstance(config.trained, Mapping) or config.trained.get("kind") != MLP):
        raise InputError("kinds: mlp takes its width from trained.width, so it needs trained.kind=mlp")
    if isinstance(config.trained, Mapping):
        check_whole("trained.width", config.trained.get("width", 0), 0)
    check_list("vocabularies", config.vocabularies)
    for size in config.vocabularies:
        check_whole("vocabularies", size)
    if config.masks is not None:
        check_list("masks", config.masks)


def _recorded(point: Mapping[str, Any]) -> dict[str, Any]:
    """Return a point for the record."""
    return {**point, "config": without_folders(SpeculativeConfig.from_dict(point["config"]))}


def _seconds(points: Sequence[Mapping[str, Any]], work: BridgePoints, result: BridgeFinals) -> dict[str, float]:
    """Return the seconds of each part of the work, earlier runs included. Fits exclude the time of reading their texts."""
    seconds = dict.fromkeys(("continuation", "texts", "profile", "reading", "fitting", "training", "scanning"), 0.0)
    seconds["screening"] = work.screening_seconds
    for name, spent in work.shared.items():
        seconds[name.partition(" ")[0]] += spent
    for point in points:
        if point["tokens"] is None:
            fit = point["fit"]
            reading = fit.get("reading_seconds", 0.0)
            seconds["reading"] += reading
            seconds["scanning"] += fit.get("scan_seconds", 0.0)
            part = "training" if point["bridge"] == TRAINED else "fitting"
            seconds[part] += fit.get("wall_seconds", fit["seconds"]) - reading
    return seconds | {"decoding": result.finals.seconds}


def _runs(layers: int) -> list[str]:
    """Return contiguous runs from the third layer on, of seven lengths, up to the third layer from the end."""
    most = layers - 4
    lengths = dict.fromkeys(max(1, round(most * share)) for share in (0.27, 0.42, 0.58, 0.69, 0.81, 0.92, 1.0))
    return [f"layers:2-{1 + length}" for length in lengths if most > 0]


def _mask(text: str, target: Target) -> SkipMask:
    try:
        mask = SkipMask.parse(str(text), target.layers)
    except MaskError as error:
        raise InputError(f"masks: {text!r}: {error}") from None
    if not mask.gaps:
        raise InputError(f"masks: {text!r}: it skips nothing")
    return mask


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown tables."""
    lines = [
        "| skipped | bridge | draft vocabulary | draft cost | agreement | predicted | fitted in s |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in record["points"]:
        size = "all tokens" if point["tokens"] is None else f"{point['tokens']} tokens"
        fitted = "" if point["bridge"] == EMPTY else f"{point['fit']['seconds']:.1f}"
        lines.append(
            f"| {point['mask']} | {point['bridge']} | {size} | {point['draft_cost']:.2f} | {point['agreement']:.2f} "
            f"| {point['predicted']:.2f} | {fitted} |"
        )
    lines += ["", "| measured on held-out prompts | speedup | 95 % interval | predicted | output |", "|---|---|---|---|---|"]
    for name, measured in record["measured"].items():
        label = SpeculativeConfig.from_dict(measured["config"]).label()
        predicted = "" if measured["predicted"] is None else f"{measured['predicted']:.2f}"
        lines.append(
            f"| {name}: {label} | {measured['speedup']:.2f} | {measured['low']:.2f} to {measured['high']:.2f} | {predicted} "
            f"| {measured['losslessness'].replace('_', '-')} |"
        )
    ratios = dict(record["over_empty"] or {})
    empty = ratios.pop("empty", None)
    for name, ratio in ratios.items():
        lines += ["", f"{name} over {empty}: {ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"]
    seconds = ", ".join(f"{name} {spent:.0f}" for name, spent in record["seconds"].items())
    lines += ["", f"Seconds: {seconds}; {sum(record['seconds'].values()):.0f} in total."]
    return "\n".join(lines)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Save a plot of agreement against draft cost."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    points = record["points"]
    for kind in dict.fromkeys(point["bridge"] for point in points):
        for size in dict.fromkeys(point["tokens"] for point in points):
            if size is not None and kind != TRAINED:
                continue
            some = sorted((p["draft_cost"], p["agreement"]) for p in points if (p["bridge"], p["tokens"]) == (kind, size))
            label = kind if size is None else f"{kind}, head of {size} tokens"
            axes.plot(*zip(*some, strict=True), marker="o", ms=4, ls="-" if size is None else ":", label=label)
    if record["eagle"] is not None:
        axes.plot([record["eagle"]["draft_cost"]], [record["eagle"]["agreement"]], "k*", ms=10, label="EAGLE head")
    axes.set(xlabel="draft pass / plain pass", ylabel="first drafted token accepted", ylim=(0, 1), xlim=(0, None))
    axes.set_title(f"{record['target']['name']}: bridges for skipped layers")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
