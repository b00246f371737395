"""Points of the bridge comparison: agreement, draft cost and predicted speedup of masks with every kind of bridge."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

from layerskip import PromptSet, Sampling, SkipMask, StopRule, Target, UnsupportedModel
from layerskip.bridges.fit import Calibration
from layerskip.costs.cost_model import CostProfile, DraftExtras
from layerskip.decoding.tree import tree_model
from layerskip.files import digest
from layerskip.models.bridge import Bridges, BridgeShape, save_bridges
from layerskip.models.draft_head import save_draft_tokens
from layerskip.models.environment import environment
from layerskip.models.packing import uses_packing
from layerskip.scan.replay import Branching, Counts
from layerskip.scan.scan import Scanner
from layerskip.scan.text_batch import TextCache
from layerskip.texts.continuations import Continuation, continue_prompts
from searches.app.checks import InputError
from searches.predict.mask_search import MaskSearch
from searches.predict.preparation import Preparation, ScanSettings, make_scanner
from searches.predict.scan_predictor import ContextCosts, DraftChoices, ScanPredictor
from searches.results import ResultLog
from searches.space.search_space import SearchSpace
from searches.tracking.tracker import Tracker
from searches.train.bridge_training import BridgeTexts, BridgeTrainer, acceptance_rates, calibrate, parse_bridge_shape
from searches.train.texts import continuations_of, drafted_tokens, texts_identity, write_texts
from searches.train.trainer import TrainingCheckpoint, TrainingDiverged

EMPTY, TRAINED = "empty", "trained"
MLP = "mlp"
FITTED = ("mean", "linear", MLP)  # in closed form; an MLP is fitted to the residual of its linear map
_TRAINING = ("steps", "max_seconds", "texts_per_step", "training_bytes", "learning_rate", "unroll")
_SIBLING_DEPTH = 4  # longest draft whose cost is profiled with siblings
_EDGE = 2  # first and last layers that are kept
_LENGTHS = range(1, 5)  # layers of a run that may pay without a bridge
_SCREENED = 400  # masks at most


class BridgePoints:
    """Fitted, trained and scanned bridges of masks; all results are kept in :attr:`folder`.

    Args:
        config: configuration ``conf/bridges.yaml``.
        target: the target.
        sampling: how the target's texts and continuations are decoded.
        scanning: settings of scans and of the cost profile.
        prompts: prompts whose continuations are scanned.
        max_new_tokens: tokens of each continuation.
        openings: openings of every other training text.

    Attributes:
        shared: seconds of the results that all programs share in the outputs folder, whichever program made them.

    Raises:
        InputError: a bridge of this kind cannot be trained, or the target cannot be scanned.
    """

    def __init__(
        self,
        config: DictConfig,
        target: Target,
        sampling: Sampling,
        scanning: ScanSettings,
        prompts: PromptSet,
        max_new_tokens: int,
        openings: Sequence[str],
    ) -> None:
        self.config, self.target = config, target
        self.shared: dict[str, float] = {}

        def add_shared(name: str, seconds: float, _: float) -> None:
            self.shared[name] = seconds

        self._shape(SkipMask.parse("layers:0", target.layers), TRAINED)  # checks the settings early
        outputs = Path(config.outputs)
        with tqdm(total=len(prompts), unit="prompt", desc="continuations", disable=None) as bar:
            continuations = continue_prompts(
                target,
                prompts,
                sampling,
                max_new_tokens,
                config.seed,
                outputs / "continuations",
                on_prompt=bar.update,
                report_cost=add_shared,
            )
        scanned = [each for each in continuations if each.starts > 0 and each.limit(0) > 0]
        if not scanned:
            raise InputError("prompts: every continuation ends at once, so there is nothing to scan")
        siblings = int(config.siblings)
        try:
            if siblings:
                tree_model(target.model)
        except UnsupportedModel as error:
            print(f"siblings: left out: {error}")
            siblings = 0
        scanner = make_scanner(target, scanned, sampling, int(config.depth), siblings)
        if scanner is None:
            raise InputError("target: there is not enough memory to scan")
        self.scanner: Scanner = scanner
        self.scanned: tuple[Continuation, ...] = scanner.continuations
        texts = write_texts(config, target, sampling, openings, add_shared)
        self.continuations = continuations_of(texts)
        self.heads: dict[int, Tensor] = {}
        for size in config.vocabularies:
            tokens = drafted_tokens(target, texts, int(size))
            if tokens is not None:
                self.heads[len(tokens)] = tokens
        longest, branching = max(int(config.depth), _SIBLING_DEPTH * (1 + siblings)), scanner.runners > 0
        preparation = Preparation(target, sampling, outputs, add_shared)
        profile = preparation.cost_profile(self.scanned, longest, bridged=True, branching=branching)
        self.profile: CostProfile = ContextCosts(profile, self.scanned).average
        self.stops = (StopRule(), *(StopRule("threshold", float(value)) for value in scanning.thresholds))
        self._choices = DraftChoices((1, int(config.depth)), self.stops, tuple(range(self.scanner.runners + 1)))
        identity = {
            "recipe": 9,
            "packed_weights": uses_packing(target.model),
            "width": self._width,  # wider MLPs leave room for fewer texts
            "vocabularies": list(config.vocabularies),
            "texts": texts_identity(config, target, sampling, openings),
            "calibration_bytes": config.calibration_bytes,
            "trained": OmegaConf.to_container(config.trained),
            "training": [config[name] for name in _TRAINING],
            "scanned": [dataclasses.astuple(continuation) for continuation in self.scanned],
            "depth": config.depth,
            "siblings": self.scanner.runners,
            "stops": [stop.to_dict() for stop in self.stops],
        }
        self.folder = outputs / f"bridges-{digest(identity)[:12]}"
        self._scans = ResultLog(self.folder / "scans.jsonl")
        self._screenings = ResultLog(self.folder / "screenings.jsonl")
        self._tracker = Tracker(config.tracking.uri, outputs, config.tracking.experiment)
        self._identity = digest(identity)
        self._memory = TextCache(int(config.remembered_bytes)) if config.max_seconds else None

    @functools.cached_property
    def calibration(self) -> Calibration:
        """States of the texts for closed forms; computed when first needed, because a resumed run may not need them."""
        budget = int(self.config.calibration_bytes)
        return calibrate(self.target, self.continuations, budget, "calibration_bytes", self._memory, self._width)

    @property
    def _width(self) -> int:
        """Width of the widest MLP that is fitted; 0 for none."""
        trained = self.config.trained
        has_mlp = isinstance(trained, Mapping) and (MLP in self.config.kinds or self.config.max_seconds)
        return int(trained.get("width", 0)) if has_mlp else 0

    def points(self, mask: SkipMask, bridged: bool = True) -> list[dict[str, Any]]:
        """Return the points of a mask: empty and with every kind of bridge, with all tokens and with every draft head.

        Args:
            mask: the mask.
            bridged: whether bridges are fitted; otherwise the mask stays empty.
        """
        points = []
        kinds = (*self.config.kinds, *((TRAINED,) if self.config.max_seconds else ())) if bridged else ()
        for kind in (EMPTY, *kinds):
            name = f"{mask.format()} {kind}"
            if name not in self._scans:
                try:
                    self._scans.add(name, self._scan(mask, kind))
                except TrainingDiverged as error:
                    print(f"{kind} for {mask.format()} is left out: {error}")
                    continue
                if kind != EMPTY:
                    self.log_fits()  # now, because the next fit takes minutes
            scan, empty = self._scans[name], self._scans[f"{mask.format()} {EMPTY}"]
            agreement, without = (each["heads"][0]["rates"][0] for each in (scan, empty))
            helps = kind == EMPTY or agreement > without
            if not helps:
                print(f"{kind} for {mask.format()} drafts no better ({agreement:.2f}) than empty skips ({without:.2f})")
            points += [self._point(mask, kind, scan["fit"] | {"helps": helps}, row) for row in scan["heads"]]
        return points

    def short_skips(self, maximum: int) -> list[SkipMask]:
        """Return the best short empty skips; see :func:`short_skips`."""
        predictor = ScanPredictor(self.scanner, self.profile, self._choices, self.folder / "short")
        return short_skips(predictor, self.scanner.depth, maximum, self._screenings)

    @property
    def screening_seconds(self) -> float:
        """Seconds of screening short skips, earlier runs included."""
        return float(sum(self._screenings[name] for name in self._screenings))

    def log_fits(self) -> None:
        """Log all fits and their agreement to MLflow."""
        fits = []
        for name in self._scans:
            mask, _, kind = name.rpartition(" ")
            if kind != EMPTY:
                empty, bridged = (self._scans[f"{mask} {which}"]["heads"][0]["rates"][0] for which in (EMPTY, kind))
                fit = {"mask": mask, "kind": kind, "fit_seconds": self._scans[name]["fit"]["seconds"]}
                fits.append(fit | {"agreement_empty": empty, "agreement_bridged": bridged})
        machine = environment(self.target)
        self._tracker.open_study(self.folder.name, self._identity, {"target": self.target.name}, machine, role="bridges")
        with self._tracker.closing():
            self._tracker.log_fits(fits)

    def _shape(self, mask: SkipMask, kind: str) -> BridgeShape:
        if kind in (TRAINED, MLP):
            return parse_bridge_shape("trained", self.config.trained, self.target, mask)
        return BridgeShape.of(self.target, mask, kind)

    def _bridge_folder(self, mask: SkipMask, kind: str) -> Path:
        return self.folder / f"{mask.format().replace(':', '-').replace(';', '_').replace(',', '.')}-{kind}"

    def _scan(self, mask: SkipMask, kind: str) -> dict[str, Any]:
        """Fit the bridges of a mask and count its rounds for every draft head, draft length and stop rule."""
        bridges, fit = (None, {"seconds": 0.0, "positions": 0}) if kind == EMPTY else self._fitted(mask, kind)
        start, rows = time.monotonic(), []
        for tokens in (None, *self.heads.values()):
            (scan,) = self.scanner.scan([mask], bridges=[bridges], tokens=tokens, floor=self._choices.floor)
            counts = []
            for rule, (length, stop, branching) in self._choices.combinations(self.scanner.depth, self.profile.longest):
                total = sum(self.scanner.counts(scan, length, stop, branching), Counts())
                counts.append([length, rule, branching.siblings, total.to_list()])
            size = None if tokens is None else len(tokens)
            rows.append({"tokens": size, "rates": acceptance_rates(scan), "counts": counts})
        return {"fit": fit | {"scan_seconds": time.monotonic() - start}, "heads": rows}

    def _fitted(self, mask: SkipMask, kind: str) -> tuple[Bridges, dict[str, Any]]:
        """Fit or train bridges and save them.

        Returns:
            The bridges for decoding, and the seconds and number of positions of the fit. The seconds of reading all texts
            belong to no single fit; they are reported with the first one.
        """
        shape, start = self._shape(mask, kind), time.monotonic()
        known = "calibration" in vars(self)
        calibration = self.calibration
        reading = 0.0 if known else time.monotonic() - start
        if kind == TRAINED:
            trainer = self._trained(shape, mask)
            bridges = trainer.bridges
            positions = sum(continuation.starts for continuation in self.continuations)
            about = {"seconds": trainer.seconds, "steps": trainer.step, "positions": positions}
            about["wall_seconds"] = trainer.seconds + trainer.evaluation_seconds
        else:
            fit = calibration.fit(shape)
            bridges = fit.bridges
            about = {"seconds": fit.seconds, "positions": fit.rows, "wall_seconds": fit.seconds}
        about |= {"reading_seconds": reading, "wall_seconds": about["wall_seconds"] + reading}
        folder = self._bridge_folder(mask, kind)
        save_bridges(folder, bridges, self.target, {"asked": self._identity}, calibration.digest)
        return bridges.for_decoding(self.target), about

    def _trained(self, shape: BridgeShape, mask: SkipMask) -> BridgeTrainer:
        tokens = max(self.heads.values(), key=len, default=None)
        identity = digest([self._identity, shape.to_dict()])
        folder = self._bridge_folder(mask, TRAINED)
        self._tracker.open_study(folder.name, identity, shape.to_dict(), environment(self.target), role="training")
        with self._tracker.closing():
            checkpoint = TrainingCheckpoint(folder / "training.pt", identity)
            texts = BridgeTexts(self.target, self.continuations, tokens, lambda: self.calibration, self._memory)
            trainer = BridgeTrainer(self.config, shape, texts, checkpoint, self.scanner)
            trainer.train(self._tracker)
        return trainer

    def _point(self, mask: SkipMask, kind: str, fit: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the point of one scan, with its best draft length, stop rule and number of siblings."""
        size = row["tokens"]
        shape = None if kind == EMPTY else self._shape(mask, kind)
        extras = DraftExtras.of(shape, 0 if size is None else self.target.vocabulary - size)
        speedups = [
            self.profile.speedup(Counts.from_list(counts), mask, self.stops[rule], extras, Branching(siblings))
            for _, rule, siblings, counts in row["counts"]
        ]
        choices = [(speedup, *choice[:3]) for speedup, choice in zip(speedups, row["counts"], strict=True)]
        best, length, rule, siblings = max(choices)
        fields: dict[str, Any] = {"method": "layer_skip", "mask": mask.format(), "num_speculative_tokens": length}
        fields["stop"] = self.stops[rule].to_dict()
        if siblings:
            fields["siblings"] = siblings
        if shape is not None:
            fields["bridge"] = str(self._bridge_folder(mask, kind).resolve())
        if size is not None:
            fields["draft_head"] = self._head(size)
        return {
            "mask": mask.format(),
            "bridge": kind,
            "tokens": size,
            "draft_cost": self.profile.draft_seconds(mask, extras) / self.profile.verify_seconds[0],
            "agreement": row["rates"][0],
            "rates": row["rates"],
            "predicted": best,
            "fit": fit,
            "config": fields,
        }

    def _head(self, size: int) -> str:
        folder = self.folder / f"head-{size}"
        if not (folder / "head.json").exists():
            save_draft_tokens(folder, self.heads[size], self.target, {"asked": self._identity})
        return str(folder.resolve())


def short_skips(predictor: ScanPredictor, depth: int, maximum: int, screenings: ResultLog) -> list[SkipMask]:
    """Return the single sub-layers and short runs with the highest expected speedup as empty skips, best first.

    The bridged masks are chosen for their speedup with bridges, so the best empty skips need a search of their own.

    Args:
        predictor: screens the masks.
        depth: longest draft length.
        maximum: number of masks.
        screenings: receives the seconds of screening.
    """
    edge = _EDGE if predictor.layers > 2 * _EDGE else 0
    lengths = {"layer_skip": {"num_speculative_tokens": (1, depth)}}
    space = SearchSpace(predictor.layers, ["layer_skip"], edge, edge, lengths)
    logged = 0.0

    def log_seconds() -> None:
        nonlocal logged
        if predictor.screening_seconds > logged:
            screenings.add(str(len(screenings)), predictor.screening_seconds - logged)
            logged = predictor.screening_seconds

    search = MaskSearch(predictor, space, _SCREENED, log_seconds)
    search.screen(search.single(*part) for part in search.sublayers())
    search.screen_runs((first, first + length) for length in _LENGTHS for first in space.skippable)
    return search.best_masks(maximum)
