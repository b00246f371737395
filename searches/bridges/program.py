"""Comparison of skip masks with and without bridges: agreement, draft cost, and speedup of the best on held-out prompts.

The program

1. fits and trains bridges for some masks on texts of the target,
2. scans the continuations of other prompts and predicts speedups from a cost profile,
3. decodes held-out prompts with the best empty skips, short ones included, and the best bridged skips, and
4. exports the winner by the rule of a study's finals, which may be plain decoding.

Works on any target that can be scanned. The same command resumes: fitted, trained and scanned results are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from layerskip import Export, MaskError, PromptSet, Sampling, SkipMask, SpeculativeConfig, StopRule, Target, UnsupportedModel
from layerskip.drafters.registry import build_drafter
from layerskip.files import write_json
from layerskip.heads.eagle import EagleHead, load_eagle, read_modules
from layerskip.heads.feature_store import extract_features
from layerskip.heads.readout import Readout
from layerskip.heads.training import Batch, predict_tokens, stored_modules
from layerskip.models.environment import environment
from layerskip.texts.continuations import Continuation
from searches.app.checks import InputError, check_list, check_number, check_seed, check_whole
from searches.backends.layerskip import LayerskipBackend
from searches.bridges.finals import BridgeFinals, choose_finalists, measure_finalists, without_folders
from searches.bridges.points import EMPTY, FITTED, MLP, TRAINED, BridgePoints
from searches.predict.preparation import ScanSettings
from searches.report.markdown import verdict
from searches.results import record_header
from searches.study.bench import BASELINE, ModelBench, Row
from searches.study.objective import MeasureSettings
from searches.train.texts import check_draft_vocabulary, opening_texts
from searches.train.trainer import check_learning

_BUDGETS = ("calibration_bytes", "training_bytes", "remembered_bytes")
_NUMBERS = ("depth", "contenders", "tokens", "max_new_tokens", "batch", *_BUDGETS)
_LEARNING = ("tokens", "texts_per_step", "learning_rate", "unroll", *_BUDGETS)
_SHORT_SKIPS = 2  # scanned for each contender
CHAIN = "eagle"


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
    work.log_fits()  # also fits of earlier runs
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
    print(table(record))
    print(f"\n{verdict(result.finals)}\nwrote {work.folder / 'best.json'} and {path}")
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
    maximum = layers - 4
    lengths = dict.fromkeys(max(1, round(maximum * share)) for share in (0.27, 0.42, 0.58, 0.69, 0.81, 0.92, 1.0))
    return [f"layers:2-{1 + length}" for length in lengths if maximum > 0]


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


def eagle_configs(head: str) -> dict[str, SpeculativeConfig]:
    """Return the configurations of a head that are measured, by name: chains with a confidence threshold, and trees."""
    return {
        CHAIN: SpeculativeConfig("eagle", 4, head=head, stop=StopRule("threshold", 0.5), top_k=1),
        "eagle_tree": SpeculativeConfig("eagle", 3, head=head, top_k=4, tree_tokens=8, min_token_prob=0.05),
    }


def eagle_point(folder: str, target: Target, scanned: Sequence[Continuation], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the point of an EAGLE head for comparison with bridged masks.

    Args:
        folder: folder of the head.
        target: target of the head.
        scanned: continuations on which masks are scanned.
        rows: measured held-out prompts, :data:`CHAIN` among the configurations.

    Returns:
        ``agreement`` of the first drafted token, restricted as in decoding to the head's tokens and those in the text so
        far; ``draft_cost``, the measured time of a drafted token in steps of plain decoding, including its share of reading
        the target's features; ``training_seconds`` and training ``positions``, None if unknown.
    """
    path = Path(folder) / "head.json"  # published EAGLE checkpoints have none
    training = json.loads(path.read_text(encoding="utf-8"))["training"] if path.is_file() else {}
    samples, plain = [row[CHAIN] for row in rows], [row[BASELINE] for row in rows]
    step = sum(s.decode_seconds for s in plain) / max(1, sum(s.decoded_tokens for s in plain))
    drafted = sum(r.drafted for sample in samples for r in sample.stats.rounds)
    return {
        "draft_cost": sum(s.draft_seconds for s in samples) / max(1, drafted) / step,
        "agreement": first_token_agreement(load_eagle(folder, target).float(), target, scanned),
        "training_seconds": training.get("seconds"),
        "positions": training.get("positions"),
    }


@torch.no_grad()
def first_token_agreement(head: EagleHead, target: Target, continuations: Sequence[Continuation]) -> float:
    """Return how often the first drafted token of a head is the target's, over all positions where a draft can start."""
    modules = stored_modules(head.shape.modules, *read_modules(target))
    embeddings, readout = target.model.get_input_embeddings(), Readout(target, None)
    excluded = torch.zeros(target.vocabulary, dtype=torch.bool, device=target.device)
    if head.tokens is not None:
        excluded[:] = True
        excluded[head.tokens] = False
    right = total = 0
    for continuation in continuations:
        text = extract_features(target, (*continuation.prompt, *continuation.tokens), len(continuation.prompt), modules)
        for prediction in predict_tokens(head, embeddings, Batch.of([text], head), 1):
            logits = readout(prediction.hidden.to(target.model.dtype))
            places = (prediction.mask[0].nonzero()[:, 0] + 2).tolist()  # row i predicts token i + 2
            for place, row, token in zip(places, logits, prediction.tokens.tolist(), strict=True):
                start = place - text.begin - 1
                if not 0 <= start < continuation.starts or continuation.limit(start) < 1:
                    continue
                unseen = excluded.clone()
                unseen[text.tokens[:place].to(target.device)] = False
                right += int(row[: target.vocabulary].masked_fill(unseen, -float("inf")).argmax()) == token
                total += 1
    return right / max(1, total)
