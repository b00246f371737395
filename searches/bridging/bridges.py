"""What are bridges worth? Agreement against draft cost for masks left empty and bridged, and what the best really decode at.

``python -m searches.bridges`` fits and trains bridges for some masks on the target's own texts, scans the continuations of
prompts that nothing was fitted to, foretells speedups from a cost profile, then decodes held-out prompts with the best
configurations that skip emptily, few sub-layers or as many as are bridged, and the best that are bridged. What wins there by
the rule of a study's finals, plain decoding perhaps, is exported. It works on any target that can be scanned; what is
fitted, trained and scanned is kept, and the same command goes on.
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
from searches.bridging.comparison import EMPTY, FITTED, MLP, TRAINED, BridgePoints
from searches.bridging.eagle import CHAIN, eagle_beside, eagle_configs
from searches.bridging.finals import Contest, choose, contest, named
from searches.predict.preparation import ScanSettings
from searches.report.study_report import verdict
from searches.study.bench import ModelBench
from searches.study.objective import MeasureSettings
from searches.training.learner import check_learning
from searches.training.training_texts import begun_like, check_drafted

_BUDGETS = ("calibration_bytes", "training_bytes", "remembered_bytes")
_NUMBERS = (
    "depth",
    "contenders",
    "tokens",
    "max_new_tokens",
    "batch",
    *_BUDGETS,
)

_LEARNING = ("tokens", "texts_per_step", "learning_rate", "unroll", *_BUDGETS)

_SHORT = 2  # short empty skips that are scanned for each contender


def bridges(config: DictConfig) -> dict[str, Any]:
    """Fit, train, scan and measure; see ``conf/bridges.yaml``."""
    _check(config)
    measuring: MeasureSettings = instantiate(config.measure)
    scanning: ScanSettings = instantiate(config.scan)
    sampling: Sampling = instantiate(config.sampling)
    everything: PromptSet = instantiate(config.prompts)
    tune, held_out = everything.split()
    like = begun_like("begin_like", config.begin_like, everything)
    target: Target = instantiate(config.target)
    for size in config.vocabularies:
        check_drafted("vocabularies", size, target)
    masks = [_mask(text, target) for text in config.masks or _runs(target.layers)]
    head = None if config.eagle_head is None else str(config.eagle_head)
    others = _heads(head, target) if head else {}
    work = BridgePoints(config, target, sampling, scanning, tune.take(measuring.prompts), measuring.max_new_tokens, like)
    points = [point for mask in masks for point in work.points(mask)]
    work.log_fits()  # of those that were there already, too
    short = [mask for mask in work.short_skips(_SHORT * int(config.contenders)) if mask not in masks]
    skips = [point for mask in short for point in work.points(mask, bridged=False)]
    chosen = choose([*points, *skips], int(config.contenders))
    prompts = held_out.take(measuring.held_out_prompts)
    bench = ModelBench(target, sampling, measuring.max_new_tokens)
    with tqdm(total=len(prompts) * measuring.held_out_repeats, unit="prompt", desc="held-out", disable=None) as bar:
        found = contest(chosen, others, bench, prompts, measuring, config.seed, work.folder, bar.update)
    spent, winner = _seconds([*points, *skips], work, found), found.finals.winner
    evidence = dict(winner.held_out) | {"prompts_digest": prompts.digest, "max_new_tokens": measuring.max_new_tokens}
    where, search = environment(target), {"seconds": sum(spent.values())}
    Export(Export.describe(target), winner.config, sampling, evidence, where, search).save(work.folder / "best.json")
    record = record_header("layerskip.bridges/1", target) | {
        "prompts": {"scanned": len(tune.take(measuring.prompts)), "held_out": len(prompts), "digest": held_out.digest},
        "max_new_tokens": measuring.max_new_tokens,
        "texts": len(work.continuations),
        "trained": {**config.trained, "seconds": config.max_seconds},
        "learning": {name: config[name] for name in _LEARNING},
        "profile": work.profile.to_dict(),
        "points": [_recorded(point) for point in points],
        "short_skips": [_recorded(point) for point in skips],
        "eagle": eagle_beside(head, target, work.scanned, found.rows) if head else None,
        "measured": found.measured(),
        "over_empty": found.over_empty(),
        "winner": named(winner.config),
        "seconds": spent,
    }
    path = Path(config.record or Path(config.outputs) / "bridges.json")
    write_json(path, record)
    draw(record, path.with_suffix(".png"))
    print(table(record))
    print(f"\n{verdict(found.finals)}\nwrote {work.folder / 'best.json'}, {path} and {path.with_suffix('.png')}")
    return record


def _heads(head: str, target: Target) -> dict[str, SpeculativeConfig]:
    """Who drafts with an EAGLE head; refuses now what cannot draft, but for trees that the target cannot verify."""
    found = {}
    for name, config in eagle_configs(head).items():
        try:
            build_drafter(config, target)
        except UnsupportedModel as error:
            if name == CHAIN:
                raise
            print(f"{name}: left out: {error}")
            continue
        found[name] = config
    return found


def _check(config: DictConfig) -> None:
    check_seed(config.seed)
    check_whole("siblings", config.siblings, 0)
    for name in _NUMBERS:
        check_whole(name, config[name])
    check_learning(config)
    check_number("max_seconds", config.max_seconds, or_zero=True)
    check_list("kinds", config.kinds, FITTED)
    if MLP in config.kinds and (not isinstance(config.trained, Mapping) or config.trained.get("kind") != MLP):
        raise InputError("kinds: mlp is as wide as what is trained, and trained.kind is none")
    if isinstance(config.trained, Mapping):
        check_whole("trained.width", config.trained.get("width", 0), 0)
    check_list("vocabularies", config.vocabularies)
    for size in config.vocabularies:
        check_whole("vocabularies", size)
    if config.masks is not None:
        check_list("masks", config.masks)


def _recorded(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point for a record, without the place of its parts."""
    return {**point, "config": named(SpeculativeConfig.from_dict(point["config"]))}


def _seconds(points: Sequence[Mapping[str, Any]], work: BridgePoints, found: Contest) -> dict[str, float]:
    """What each kind of work took, by those that did it, today or before; a fit without what reading its texts took."""
    spent = dict.fromkeys(("continuation", "texts", "profile", "reading", "fitting", "training", "scanning"), 0.0)
    spent["screening"] = work.screening_seconds
    for name, seconds in work.shared.items():
        spent[name.partition(" ")[0]] += seconds
    for point in points:
        if point["tokens"] is None:
            fit = point["fit"]
            spent["reading"] += (reading := fit.get("reading_seconds", 0.0))
            spent["scanning"] += fit.get("scan_seconds", 0.0)
            part = "training" if point["bridge"] == TRAINED else "fitting"
            spent[part] += fit.get("wall_seconds", fit["seconds"]) - reading
    return spent | {"decoding": found.finals.seconds}


def _runs(layers: int) -> list[str]:
    """Contiguous runs from the third layer on, of seven lengths, up to all but the outermost layers."""
    most = layers - 4
    lengths = dict.fromkeys(max(1, round(most * share)) for share in (0.27, 0.42, 0.58, 0.69, 0.81, 0.92, 1.0))
    return [f"layers:2-{1 + length}" for length in lengths if most > 0]


def _mask(text: str, target: Target) -> SkipMask:
    try:
        mask = SkipMask.parse(str(text), target.layers)
    except MaskError as error:
        raise InputError(f"masks: {text!r}: {error}") from None
    if not mask.gaps:
        raise InputError("masks: one of them skips nothing")
    return mask


def table(record: Mapping[str, Any]) -> str:
    """A record as Markdown."""
    lines = [
        "| skipped | bridge | drafts from | draft cost | agreement | predicted | fitted in s |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in record["points"]:
        size = "all tokens" if point["tokens"] is None else f"{point['tokens']} tokens"
        fitted = "" if point["bridge"] == EMPTY else f"{point['fit']['seconds']:.1f}"
        lines.append(
            f"| {point['mask']} | {point['bridge']} | {size} | {point['draft_cost']:.2f} | {point['agreement']:.2f} "
            f"| {point['predicted']:.2f} | {fitted} |"
        )
    lines += ["", "| measured on held-out prompts | x plain | 95 % interval | predicted | output |", "|---|---|---|---|---|"]
    for name, found in record["measured"].items():
        label = SpeculativeConfig.from_dict(found["config"]).label()
        predicted = "" if found["predicted"] is None else f"{found['predicted']:.2f}"
        lines.append(
            f"| {name}: {label} | {found['speedup']:.2f} | {found['low']:.2f} to {found['high']:.2f} | {predicted} "
            f"| {found['losslessness'].replace('_', '-')} |"
        )
    ratios = dict(record["over_empty"] or {})
    empty = ratios.pop("empty", None)
    for name, ratio in ratios.items():
        lines += ["", f"{name} over {empty}: {ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"]
    took = ", ".join(f"{name} {seconds:.0f}" for name, seconds in record["seconds"].items())
    lines += ["", f"Seconds: {took}; {sum(record['seconds'].values()):.0f} in all."]
    return "\n".join(lines)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Save a picture: agreement against draft cost."""
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
    axes.set_title(f"{record['target']['name']}: what stands in for skipped layers")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
