"""What is a mask worth, left empty and with every kind of bridge? Fitted, trained, scanned and priced, and all is kept."""

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
from layerskip.costs.cost_model import Aids, CostProfile
from layerskip.decoding.tree import tree_model
from layerskip.files import digest
from layerskip.models.bridge import Bridges, BridgeShape, save_bridges
from layerskip.models.draft_head import save_draft_tokens
from layerskip.models.environment import environment
from layerskip.models.packing import packs
from layerskip.scan.replay import Counts
from layerskip.scan.scan import Scanner
from layerskip.scan.text_cache import Memory
from layerskip.scan.trace import Branching
from layerskip.texts.continuations import Continuation, continue_prompts
from searches.app.checks import InputError
from searches.app.resume_log import ResultLog
from searches.bridging.short_skips import short_skips
from searches.predict.oracle import Choices
from searches.predict.preparation import ScanSettings, cost_profile, make_scanner
from searches.predict.scan_oracle import ScanOracle
from searches.tracking.tracker import Tracker
from searches.training.bridge_training import BridgeLearner, calibrate, made_of, rates
from searches.training.learner import Diverged, TrainingFile
from searches.training.training_texts import asked_texts, continuations_of, drafted_tokens, write_texts

EMPTY, TRAINED = "empty", "trained"
MLP = "mlp"
FITTED = ("mean", "linear", MLP)  # in closed form alone, an MLP to what its map leaves
_TRAINING = ("steps", "max_seconds", "texts_per_step", "training_bytes", "learning_rate", "unroll")
_LONG = 4  # drafted tokens with siblings


class BridgePoints:
    """What there is to fit to and to scan, and where everything is kept.

    Args:
        config: of ``conf/bridges.yaml``.
        target: the model.
        sampling: how its texts and continuations are chosen.
        scanning: rows per pass, thresholds, repeats of the profile.
        prompts: whose continuations are scanned.
        max_new_tokens: of each.
        like: what every other text begins like.
    """

    def __init__(
        self,
        config: DictConfig,
        target: Target,
        sampling: Sampling,
        scanning: ScanSettings,
        prompts: PromptSet,
        max_new_tokens: int,
        like: Sequence[str],
    ) -> None:
        self.config, self.target = config, target
        self.shared: dict[str, float] = {}  # the seconds of what the outputs folder has for all programs, whoever made it
        self._shape(SkipMask.parse("layers:0", target.layers), TRAINED)  # refuses now what cannot be trained
        outputs = Path(config.outputs)
        with tqdm(total=len(prompts), unit="prompt", desc="continuations", disable=None) as bar:
            folder = outputs / "continuations"
            continued = continue_prompts(
                target, prompts, sampling, max_new_tokens, config.seed, folder, bar.update, self._use
            )
        scanned = [p for p in continued if p.starts > 0 and p.limit(0) > 0]
        if not scanned:
            raise InputError("prompts: every continuation ends at once, so there is nothing to scan")
        siblings = int(config.siblings)
        try:
            if siblings:
                tree_model(target.model)
        except UnsupportedModel as error:
            print(f"siblings: left out: {error}")
            siblings = 0
        scanner = make_scanner(target, scanned, sampling, int(config.depth), siblings, scanning)
        if scanner is None:  # said before the texts are written, which takes longer
            raise InputError(
                "scan.max_rows, scan.text_bytes: there is not enough memory to scan, so there is nothing to compare"
            )
        self.scanner: Scanner = scanner
        self.scanned: tuple[Continuation, ...] = scanner.continuations
        texts = write_texts(config, target, sampling, like, self._use)
        self.continuations = continuations_of(texts)
        self.heads: dict[int, Tensor] = {}
        for size in config.vocabularies:
            tokens = drafted_tokens(target, texts, int(size))
            if tokens is not None:
                self.heads[len(tokens)] = tokens
        longest = max(int(config.depth), _LONG * (1 + siblings))
        branching = self.scanner.runners > 0
        self.profile: CostProfile = cost_profile(
            target, self.scanned, longest, sampling, scanning, outputs, True, branching, self._use
        )
        self.stops = (StopRule(), *(StopRule("threshold", float(value)) for value in scanning.thresholds))
        self._choices = Choices((1, int(config.depth)), self.stops, tuple(range(self.scanner.runners + 1)))
        asked = {
            "recipe": 9,
            "packed_weights": packs(target.model),
            "width": self._width,  # of what is fitted; wider MLPs leave room for fewer texts
            "vocabularies": list(config.vocabularies),
            "texts": asked_texts(config, target, sampling, like),
            "calibration_bytes": config.calibration_bytes,
            "trained": OmegaConf.to_container(config.trained),
            "training": [config[name] for name in _TRAINING],
            "scanned": [dataclasses.astuple(continuation) for continuation in self.scanned],
            "depth": config.depth,
            "siblings": self.scanner.runners,
            "stops": [stop.to_dict() for stop in self.stops],
        }
        self.folder = outputs / f"bridges-{digest(asked)[:12]}"
        self._screened = scanning.screened_rows
        self._kept = ResultLog(self.folder / "scans.jsonl")
        self._screenings = ResultLog(self.folder / "screenings.jsonl")
        self._tracker = Tracker(config.tracking.uri, outputs, config.tracking.experiment)
        self._asked = digest(asked)
        self._memory = Memory(int(config.remembered_bytes)) if config.max_seconds else None

    @functools.cached_property
    def calibration(self) -> Calibration:
        """Made when first asked for, as a run that goes on may need none."""
        budget = int(self.config.calibration_bytes)
        return calibrate(self.target, self.continuations, budget, "calibration_bytes", self._memory, self._width)

    @property
    def _width(self) -> int:
        """Of the widest MLPs that are fitted; 0 for none."""
        trained = self.config.trained
        learns = isinstance(trained, Mapping) and (MLP in self.config.kinds or self.config.max_seconds)
        return int(trained.get("width", 0)) if learns else 0

    def points(self, mask: SkipMask, bridged: bool = True) -> list[dict[str, Any]]:
        """What is known of a mask, left empty and perhaps for every kind of bridge, and for every draft head."""
        found = []
        kinds = (*self.config.kinds, *((TRAINED,) if self.config.max_seconds else ())) if bridged else ()
        for kind in (EMPTY, *kinds):
            name = f"{mask.format()} {kind}"
            if name not in self._kept:
                try:
                    self._kept.add(name, self._scan(mask, kind))
                except Diverged as error:  # other masks are worth comparing all the same
                    print(f"{kind} for {mask.format()} is left out: {error}")
                    continue
                if kind != EMPTY:
                    self.log_fits()  # now, as the next one takes minutes
            kept, empty = self._kept[name], self._kept[f"{mask.format()} {EMPTY}"]
            agreement, without = (some["heads"][0]["rates"][0] for some in (kept, empty))
            helps = kind == EMPTY or agreement > without
            if not helps:
                print(f"{kind} for {mask.format()} drafts no better ({agreement:.2f}) than empty skips ({without:.2f})")
            for row in kept["heads"]:
                found.append(self._point(mask, kind, kept["fit"] | {"helps": helps}, row))
        return found

    def short_skips(self, most: int) -> list[SkipMask]:
        """As :func:`~searches.bridging.short_skips.short_skips` finds them."""
        screen = self.scanner.sample(self._screened)
        oracle = ScanOracle(self.scanner, screen, self.profile, self._choices, self.folder / "short")
        return short_skips(oracle, self.scanner.depth, most, self._screenings)

    @property
    def screening_seconds(self) -> float:
        """What asking about short skips took, by whichever runs did it."""
        return float(sum(self._screenings[name] for name in self._screenings))

    def _use(self, name: str, seconds: float, here: float) -> None:
        self.shared[name] = seconds

    def log_fits(self) -> None:
        """Let MLflow see what was fitted and trained, and what it is worth."""
        fits = []
        for name in self._kept:
            mask, _, kind = name.rpartition(" ")
            if kind != EMPTY:
                empty, bridged = (self._kept[f"{mask} {which}"]["heads"][0]["rates"][0] for which in (EMPTY, kind))
                fit = {"mask": mask, "kind": kind, "fit_seconds": self._kept[name]["fit"]["seconds"]}
                fits.append(fit | {"agreement_empty": empty, "agreement_bridged": bridged})
        described = environment(self.target)
        self._tracker.open_study(self.folder.name, self._asked, {"target": self.target.name}, described, role="bridges")
        with self._tracker.closing():
            self._tracker.log_fits(fits)

    def _shape(self, mask: SkipMask, kind: str) -> BridgeShape:
        if kind in (TRAINED, MLP):
            return made_of("trained", self.config.trained, self.target, mask)
        return BridgeShape.of(self.target, mask, kind)

    def _place(self, mask: SkipMask, kind: str) -> Path:
        return self.folder / f"{mask.format().replace(':', '-').replace(';', '_').replace(',', '.')}-{kind}"

    def _scan(self, mask: SkipMask, kind: str) -> dict[str, Any]:
        own, fit = (None, {"seconds": 0.0, "positions": 0}) if kind == EMPTY else self._fitted(mask, kind)
        start, rows = time.monotonic(), []
        for tokens in (None, *self.heads.values()):
            (scan,) = self.scanner.scan([mask], bridges=[own], tokens=tokens, floor=self._choices.floor)
            counts = []
            for rule, (length, stop, branching) in self._choices.every(self.scanner.depth, self.profile.longest):
                found = sum(self.scanner.counts(scan, length, stop, branching), Counts())
                counts.append([length, rule, branching.siblings, found.to_list()])
            right = rates(scan)
            rows.append({"tokens": None if tokens is None else len(tokens), "rates": right, "counts": counts})
        return {"fit": fit | {"scan_seconds": time.monotonic() - start}, "heads": rows}

    def _fitted(self, mask: SkipMask, kind: str) -> tuple[Bridges, dict[str, Any]]:
        """Bridges, saved, in the target's dtype, as they will decode; and how long they took, to how many positions.

        What reading all texts takes is nobody's fit; it is told with the one that it was done for.
        """
        shape, start = self._shape(mask, kind), time.monotonic()
        known = "calibration" in vars(self)
        self.calibration  # noqa: B018
        reading = 0.0 if known else time.monotonic() - start
        if kind == TRAINED:
            learner = self._trained(shape, mask)
            found, about = learner.bridges, {"seconds": learner.seconds, "steps": learner.step}
            about["positions"] = sum(continuation.starts for continuation in self.continuations)
            about["wall_seconds"] = learner.seconds + learner.judging
        else:
            fit = self.calibration.fit(shape)
            found, about = fit.bridges, {"seconds": fit.seconds, "positions": fit.rows, "wall_seconds": fit.seconds}
        about |= {"reading_seconds": reading, "wall_seconds": about["wall_seconds"] + reading}
        save_bridges(self._place(mask, kind), found, self.target, {"asked": self._asked}, self.calibration.digest)
        return found.decoding(self.target), about

    def _trained(self, shape: BridgeShape, mask: SkipMask) -> BridgeLearner:
        largest = max(self.heads.values(), key=len, default=None)
        identity = digest([self._asked, shape.to_dict()])
        folder = self._place(mask, TRAINED)
        self._tracker.open_study(folder.name, identity, shape.to_dict(), environment(self.target), role="training")
        with self._tracker.closing():
            learner = BridgeLearner(
                self.config,
                shape,
                self.target,
                self.continuations,
                self.scanner,
                largest,
                TrainingFile(folder / "training.pt", identity),
                lambda: self.calibration,
                self._memory,
            )
            learner.learn_all(self._tracker)
        return learner

    def _point(self, mask: SkipMask, kind: str, fit: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """The best draft length and stop rule, by counts and costs."""
        size = row["tokens"]
        shape = None if kind == EMPTY else self._shape(mask, kind)
        aids = Aids.of(shape, 0 if size is None else self.target.vocabulary - size)
        best, length, number, siblings = max(
            (
                self.profile.speedup(Counts.from_list(counts), mask, self.stops[number], aids, Branching(siblings)),
                length,
                number,
                siblings,
            )
            for length, number, siblings, counts in row["counts"]
        )
        fields: dict[str, Any] = {"kind": "layer_skip", "mask": mask.format(), "draft_length": length}
        fields["stop"] = self.stops[number].to_dict()
        if siblings:
            fields["siblings"] = siblings
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
            "fit": fit,
            "config": fields,
        }

    def _head(self, size: int) -> str:
        folder = self.folder / f"head-{size}"
        if not (folder / "head.json").exists():
            save_draft_tokens(folder, self.heads[size], self.target, {"asked": self._asked})
        return str(folder.resolve())
