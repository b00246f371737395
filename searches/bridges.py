"""What are bridges worth? Agreement against draft cost for masks left empty and bridged, and what the best really decode at.

``python -m searches.bridges`` fits and trains bridges for some masks on the target's own texts, scans the continuations of
prompts that nothing was fitted to, foretells speedups from a cost profile, then decodes held-out prompts with the best
configurations that skip emptily and the best that are bridged. It works on any target that can be scanned; what is fitted,
trained and scanned is kept, and the same command goes on.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

from layerskip import Export, MaskError, Measurement, Sampling, SkipMask, SpeculativeConfig, StopRule, Target
from layerskip.bridge import KIND, Bridges, BridgeShape
from layerskip.bridge_fit import Calibration
from layerskip.costs import Aids, CostProfile
from layerskip.draft_head import KIND as HEAD
from layerskip.drafters.build import build_drafter
from layerskip.environment import environment
from layerskip.files import digest, write_json
from layerskip.heads import save_head
from layerskip.passages import Passage, continue_prompts
from layerskip.replay import Counts
from layerskip.scan import Scanner

from .application import InputError, run
from .bench import BASELINE, ModelBench
from .bridging import BridgeLearner, calibrate, rates
from .foresight import ScanSettings, cost_profile
from .kept import Kept
from .objective import MeasureSettings, check_seed
from .oracle import Choices
from .tracking import Tracker
from .written import asked_texts, drafted_tokens, passages_of, write_texts

EMPTY, TRAINED = "empty", "trained"
_NUMBERS = ("depth", "contenders", "tokens", "max_new_tokens", "batch", "steps", "texts_per_step", "unroll")


def bridges(config: DictConfig) -> dict[str, Any]:
    """Fit, train, scan and measure; see ``conf/bridges.yaml``."""
    check_seed(config.seed)
    for name in _NUMBERS:
        if isinstance(config[name], bool) or not isinstance(config[name], int) or config[name] < 1:
            raise InputError(f"{name}: {config[name]!r} is not a whole number of at least 1")
    measuring: MeasureSettings = instantiate(config.measure)
    scanning: ScanSettings = instantiate(config.scan)
    sampling: Sampling = instantiate(config.sampling)
    tune, held_out = instantiate(config.prompts).split()
    target: Target = instantiate(config.target)
    masks = [_mask(text, target) for text in config.masks or _runs(target.layers)]
    if config.eagle_head is not None:
        build_drafter(SpeculativeConfig("eagle", head=str(config.eagle_head)), target)  # refuses now what cannot draft
    work = _Work(config, target, sampling, scanning, tune.take(measuring.prompts), measuring.max_new_tokens)
    points = [point for mask in masks for point in work.points(mask)]
    chosen = _choose(points, int(config.contenders))
    configs = {name: work.config_of(point) for name, point in chosen.items()}
    if config.eagle_head is not None:
        configs["eagle"] = SpeculativeConfig("eagle", 3, head=str(config.eagle_head), candidates=1)
    prompts = held_out.take(measuring.held_out_prompts)
    bench = ModelBench(target, sampling, measuring.max_new_tokens)
    rows = []
    with tqdm(total=len(prompts) * measuring.repeats, unit="prompt", desc="held-out", disable=None) as bar:
        for row in bench.compare(configs, prompts, measuring.repeats, config.seed):
            rows.append(row)
            bar.update()
    measured = {}
    for name, found in configs.items():
        measurement = Measurement.of(rows, BASELINE, name)
        low, high = measurement.interval()
        measured[name] = {
            "config": _named(found),
            "speedup": measurement.speedup,
            "low": low,
            "high": high,
            "predicted": chosen[name]["predicted"] if name in chosen else None,
            "acceptance_rate": measurement.to_dict()["acceptance_rate"],
            "losslessness": measurement.to_dict()["losslessness"]["verdict"],
        }
    if "bridged 1" in configs:
        evidence = Measurement.of(rows, BASELINE, "bridged 1").to_dict() | {"prompts_digest": prompts.digest}
        where = environment(target.device)
        Export(Export.describe(target), configs["bridged 1"], sampling, evidence, where).save(work.folder / "best.json")
        print(f"wrote {work.folder / 'best.json'}, the best that is bridged")
    record = {
        "schema": "layerskip.bridges/1",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "target": Export.describe(target),
        "environment": environment(target.device),
        "prompts": {"scanned": len(tune.take(measuring.prompts)), "held_out": len(prompts), "digest": held_out.digest},
        "max_new_tokens": measuring.max_new_tokens,
        "fitted_to": work.fitted_to,
        "trained": {**config.trained, "seconds": config.max_seconds},
        "profile": work.profile.to_dict(),
        "points": [point | {"config": _named(work.config_of(point))} for point in points],
        "eagle": _eagle(config.eagle_head, rows),
        "measured": measured,
    }
    path = Path(config.record or Path(config.outputs) / "bridges.json")
    write_json(path, record)
    draw(record, path.with_suffix(".png"))
    print(table(record))
    print(f"wrote {path} and {path.with_suffix('.png')}")
    return record


def _named(config: SpeculativeConfig) -> dict[str, Any]:
    """A configuration for a record, what it was trained by named without the place."""
    fields = config.to_dict()
    return fields | {name: Path(fields[name]).name for name in ("bridge", "draft_head", "head") if name in fields}


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


class _Work:
    """What there is to fit to and to scan, and where everything is kept."""

    def __init__(
        self,
        config: DictConfig,
        target: Target,
        sampling: Sampling,
        scanning: ScanSettings,
        prompts: Any,
        max_new_tokens: int,
    ) -> None:
        self.config, self.target = config, target
        outputs = Path(config.outputs)
        texts = write_texts(config, target, sampling)
        self.passages = passages_of(texts)
        self.heads: dict[int, Tensor] = {}
        for size in config.vocabularies:
            tokens = drafted_tokens(target, texts, int(size))
            if tokens is not None:
                self.heads[len(tokens)] = tokens
        with tqdm(total=len(prompts), unit="prompt", desc="continuations", disable=None) as bar:
            continued = continue_prompts(
                target, prompts, sampling, max_new_tokens, config.seed, outputs / "continuations", bar.update
            )
        self.scanned: tuple[Passage, ...] = tuple(passage for passage in continued if passage.starts > 0)
        self.scanner = Scanner(target, self.scanned, sampling, int(config.depth), scanning.max_rows or 256)
        self.profile: CostProfile = cost_profile(
            target, self.scanned, int(config.depth), sampling, scanning.profile_repeats, outputs, bridged=True
        )
        self.stops = (StopRule(), *(StopRule("threshold", float(value)) for value in scanning.thresholds))
        self._choices = Choices((1, int(config.depth)), self.stops)
        asked = {
            "recipe": 1,
            "vocabularies": list(config.vocabularies),
            "texts": asked_texts(config, target, sampling),
            "calibration_bytes": config.calibration_bytes,
            "trained": OmegaConf.to_container(config.trained),
            "training": [config[name] for name in ("steps", "max_seconds", "texts_per_step", "learning_rate", "unroll")],
            "scanned": [dataclasses.astuple(passage) for passage in self.scanned],
            "depth": config.depth,
            "stops": [stop.to_dict() for stop in self.stops],
        }
        self.folder = outputs / f"bridges-{digest(asked)[:12]}"
        self._kept = Kept(self.folder / "scans.jsonl")
        self._shape(SkipMask.parse("layers:0", target.layers), TRAINED)  # refuses now what cannot be trained
        self._tracker = Tracker(config.tracking.uri, outputs, config.tracking.experiment)
        self._asked = digest(asked)
        self._calibration: Calibration | None = None
        self._helps = True  # what was fitted last

    @property
    def calibration(self) -> Calibration:
        """Made when first asked for, as a run that goes on may need none."""
        if self._calibration is None:
            budget = int(self.config.calibration_bytes)
            self._calibration = calibrate(self.target, self.passages, budget, "calibration_bytes")
        return self._calibration

    @property
    def fitted_to(self) -> dict[str, int]:
        """How much there was to learn from."""
        closed = 0 if self._calibration is None else len(self._calibration.starts)
        trained = sum(passage.starts for passage in self.passages)
        return {"texts": len(self.passages), "trained_on": trained, "closed_forms": closed}

    def points(self, mask: SkipMask) -> list[dict[str, Any]]:
        """What is known of a mask, for every kind of bridge and every draft head."""
        found = []
        for kind in (EMPTY, *self.config.kinds, *((TRAINED,) if self.config.max_seconds else ())):
            name = f"{mask.format()} {kind}"
            if name not in self._kept:
                self._kept.add(name, self._scan(mask, kind))
            for row in self._kept[name]["heads"]:
                found.append(self._point(mask, kind, self._kept[name], row))
        return found

    def config_of(self, point: Mapping[str, Any]) -> SpeculativeConfig:
        """The configuration of a point."""
        return SpeculativeConfig.from_dict(dict(point["config"]))

    def _shape(self, mask: SkipMask, kind: str) -> BridgeShape:
        made: Any = self.config.trained if kind == TRAINED else {"kind": kind, "rank": 0, "width": 0}
        return BridgeShape.of(self.target, mask, made["kind"], made["rank"], made["width"])

    def _place(self, mask: SkipMask, kind: str) -> Path:
        return self.folder / f"{mask.format().replace(':', '-').replace(';', '_').replace(',', '.')}-{kind}"

    def _scan(self, mask: SkipMask, kind: str) -> dict[str, Any]:
        if kind != EMPTY:
            self.calibration  # noqa: B018  # what reading all texts takes is nobody's fit
        self._helps = True
        start = time.monotonic()
        own, seconds = None if kind == EMPTY else self._fitted(mask, kind), time.monotonic() - start
        rows = []
        for tokens in (None, *self.heads.values()):
            (scan,) = self.scanner.scan([mask], bridges=[own], tokens=tokens, floor=self._choices.floor)
            counts = [
                [length, number, sum(self.scanner.counts(scan, length, stop), Counts()).to_list()]
                for length in range(int(self.config.depth), 0, -1)
                for number, stop in enumerate(self.stops)
            ]
            right = rates(scan)
            rows.append({"tokens": None if tokens is None else len(tokens), "rates": right, "counts": counts})
        return {"fit_seconds": seconds, "helps": self._helps, "heads": rows}

    def _fitted(self, mask: SkipMask, kind: str) -> Bridges:
        """Bridges, saved; in the target's dtype, as they will decode."""
        shape = self._shape(mask, kind)
        if kind == TRAINED:
            found = self._trained(shape, mask)
        else:
            fit = self.calibration.fit(shape)
            found, self._helps = fit.bridges, fit.helps
            if not fit.helps:
                print(f"{kind} for {shape.mask} drafts no better ({fit.bridged:.2f}) than empty skips ({fit.empty:.2f})")
        save_head(self._place(mask, kind), KIND, shape.to_dict(), found.state_dict(), self.target, {"asked": self._asked})
        return found.to(self.target.model.dtype).requires_grad_(False)

    def _trained(self, shape: BridgeShape, mask: SkipMask) -> Bridges:
        largest = max(self.heads.values(), key=len, default=None)
        identity = digest([self._asked, shape.to_dict()])
        folder = self._place(mask, TRAINED)
        self._tracker.open_study(folder.name, identity, shape.to_dict(), environment(self.target.device), role="training")
        with self._tracker.closing():
            learner = BridgeLearner(
                self.config,
                shape,
                self.target,
                self.passages,
                self.scanner,
                largest,
                folder / "training.pt",
                identity,
                calibration=lambda: self.calibration,
            )
            learner.learn_all(self._tracker)
        return learner.bridges

    def _point(self, mask: SkipMask, kind: str, kept: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """The best draft length and stop rule, by counts and costs."""
        size = row["tokens"]
        shape = None if kind == EMPTY else self._shape(mask, kind)
        aids = Aids.of(shape, 0 if size is None else self.target.vocabulary - size)
        best, length, number = max(
            (self.profile.speedup(Counts.from_list(counts), mask, self.stops[number], aids), length, number)
            for length, number, counts in row["counts"]
        )
        fields: dict[str, Any] = {"kind": "layer_skip", "mask": mask.format(), "draft_length": length}
        fields["stop"] = self.stops[number].to_dict()
        if shape is not None:
            fields["bridge"] = str(self._place(mask, kind).resolve())
        if size is not None:
            fields["draft_head"] = self._head(size)
        return {
            "mask": mask.format(),
            "bridge": kind,
            "tokens": size,
            "draft_cost": self.profile.draft_seconds(mask, aids) / self.profile.verify_seconds[0],
            "agreement": row["rates"][0],
            "rates": row["rates"],
            "predicted": best,
            "fit_seconds": kept["fit_seconds"],
            "helps": kept["helps"],
            "config": fields,
        }

    def _head(self, size: int) -> str:
        folder = self.folder / f"head-{size}"
        if not (folder / "head.json").exists():
            save_head(folder, HEAD, {"tokens": size}, {"tokens": self.heads[size]}, self.target, {"asked": self._asked})
        return str(folder.resolve())


def _choose(points: list[dict[str, Any]], most: int) -> dict[str, dict[str, Any]]:
    """The configurations that are foretold to be fastest, so many of those that skip emptily and of those bridged."""
    chosen = {}
    for name, kinds in (("empty", True), ("bridged", False)):
        some = [point for point in points if (point["bridge"] == EMPTY) is kinds and point["helps"]]
        best: dict[tuple[str, str], dict[str, Any]] = {}
        for point in sorted(some, key=lambda point: -point["predicted"]):
            best.setdefault((point["mask"], point["bridge"]), point)
        for number, point in enumerate(list(best.values())[:most]):
            chosen[f"{name} {number + 1}"] = point
    return chosen


def _eagle(folder: str | None, rows: list[Any]) -> dict[str, Any] | None:
    """An EAGLE head beside them: its first-token agreement where it drafted, and what a drafted token took."""
    if folder is None:
        return None
    about = Path(folder) / "head.json"  # one in its authors' layout has none
    training = json.loads(about.read_text(encoding="utf-8"))["training"] if about.is_file() else {}
    samples = [row["eagle"] for row in rows]
    tried = [r for sample in samples for r in sample.stats.rounds if r.drafted]
    plain = [row[BASELINE] for row in rows]
    each = sum(s.decode_seconds for s in plain) / max(1, sum(s.decoded_tokens for s in plain))
    drafting = sum(s.draft_seconds for s in samples) / max(1, sum(r.drafted for r in tried))
    return {
        "draft_cost": drafting / each,
        "agreement": sum(r.accepted > 0 for r in tried) / max(1, len(tried)),
        "training_seconds": training.get("seconds"),
        "positions": training.get("positions"),
    }


def table(record: Mapping[str, Any]) -> str:
    """A record as Markdown."""
    lines = ["| skipped | bridge | drafts from | draft cost | agreement | predicted |", "|---|---|---|---|---|---|"]
    for point in record["points"]:
        size = "all tokens" if point["tokens"] is None else f"{point['tokens']} tokens"
        lines.append(
            f"| {point['mask']} | {point['bridge']} | {size} | {point['draft_cost']:.2f} | {point['agreement']:.2f} "
            f"| {point['predicted']:.2f} |"
        )
    lines += ["", "| measured on held-out prompts | x plain | 95 % interval | predicted | output |", "|---|---|---|---|---|"]
    for name, found in record["measured"].items():
        label = SpeculativeConfig.from_dict(found["config"]).label()
        predicted = "" if found["predicted"] is None else f"{found['predicted']:.2f}"
        lines.append(
            f"| {name}: {label} | {found['speedup']:.2f} | {found['low']:.2f} to {found['high']:.2f} | {predicted} "
            f"| {found['losslessness'].replace('_', '-')} |"
        )
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


if __name__ == "__main__":
    run("bridges", bridges)
