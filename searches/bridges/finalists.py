"""Finalists with bridges that are trained by gradient, starting from the closed-form fits of the bridge store.

A lower training loss does not guarantee better drafts. Trained bridges are therefore compared with empty skips on held-out
texts, which closed-form fits do not use either.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from layerskip import SkipMask, SpeculativeConfig
from layerskip.bridges.bridge import Bridges, BridgeShape, load_bridges, save_bridges
from layerskip.costs.cost_model import DraftExtras
from layerskip.device.memory import is_out_of_memory, release_memory, within_memory
from layerskip.files import digest
from layerskip.texts.continuations import Continuation
from searches.app.checks import InputError
from searches.bridges.spec import BridgeSpec
from searches.bridges.store import BridgeStore, training_record
from searches.bridges.training import BridgeTexts, BridgeTrainer
from searches.predict.scan_predictor import ScanPredictor
from searches.results import exclusive
from searches.space.search_space import DraftCost
from searches.tracking.tracker import Tracker
from searches.training.texts import continuations_of
from searches.training.trainer import TrainingCheckpoint

_RECIPE = 2  # version of training and evaluation; bridges of another version are trained again
_STEPS = 10**6  # more than time allows
_SAVE_SECONDS = 30.0  # between checkpoints
_TOKENS = 16384  # vocabulary of the loss, if drafts use the whole vocabulary
_SETTINGS = ("learning_rate", "unroll", "texts_per_step", "calibration_bytes", "training_bytes")


class TrainedBridges:
    """Training of the bridges of finalists, each once.

    Each training gets a nested run of the tracker, if there is one. ``draft_cost`` measures the drafting costs of a
    cascade's members; without a result they stay those of the closed-form fits.
    """

    def __init__(
        self, bridge_store: BridgeStore, tracker: Tracker | None = None, draft_cost: DraftCost | None = None
    ) -> None:
        self._bridge_store, self._target = bridge_store, bridge_store.target
        self._tracker, self._draft_cost = tracker, draft_cost
        self._options: dict[str, Any] = {name: getattr(bridge_store.settings, name) for name in _SETTINGS}
        self._options |= {"max_seconds": bridge_store.settings.train_seconds, "steps": _STEPS}
        self._options |= {"save_seconds": _SAVE_SECONDS, "seed": bridge_store.seed}
        self._trained: dict[BridgeShape, Path] = {}  # from which the training of others may begin

    def finalists(
        self, configs: Sequence[SpeculativeConfig], predictors: Sequence[ScanPredictor]
    ) -> dict[SpeculativeConfig, SpeculativeConfig]:
        """Return configurations with trained bridges, as far as these draft better than empty skips, and their originals.

        Better drafts may be longer. The predictors, one for each bridge spec, therefore predict draft length, stop rule and
        siblings again.
        """
        found: dict[SpeculativeConfig, SpeculativeConfig] = {}
        for original in configs:
            if any(part.bridge for part in (original, *original.members)):
                config, reason = None, ""
                try:
                    config = self._train_all(original)
                except InputError as error:  # the finals of a long search must take place
                    reason = str(error)
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    reason = "out of memory"
                if reason:
                    release_memory()
                    print(f"bridging: bridges of {original.label()} stay as they were fitted: {reason}")
                if config is not None:
                    config = self._tuned(config, predictors) if config.bridge else config
                    found.setdefault(config, original)
        return found

    def _train_all(self, config: SpeculativeConfig) -> SpeculativeConfig | None:
        """Train the bridges of a configuration or of a cascade's members; return None if no bridges changed."""
        if config.bridge:
            return self.train(config)
        members = tuple((self.train(member) if member.bridge else None) or member for member in config.members)
        if members == config.members:
            return None
        cost = () if self._draft_cost is None else self._draft_cost(members)
        return replace(config, members=members, draft_cost=cost or config.draft_cost)

    def train(self, config: SpeculativeConfig) -> SpeculativeConfig | None:
        """Train the bridges of a configuration; return None, with a printed line, if they draft no better than empty skips.

        Training starts from the closed-form fit or from trained bridges of the nearest mask, whichever has the lower loss.
        """
        bridge_store = self._bridge_store
        mask = SkipMask.parse(config.mask, self._target.layers)
        bridge_spec = bridge_store.bridge_spec(config)
        width = bridge_spec.width or bridge_store.settings.train_width
        layers = ("mlp", bridge_spec.rank, width) if width else (bridge_spec.bridge, bridge_spec.rank)
        shape = BridgeShape.of(self._target, mask, *layers)
        identity = digest([_RECIPE, bridge_store.digest, self._options, shape.to_dict(), bridge_spec.tokens])
        folder = bridge_store.folder / f"trained-{identity[:16]}"
        seconds_here = 0.0
        if not (folder / "head.json").exists():
            held_out = set(bridge_store.calibration.held_out)
            continuations = [text for text in continuations_of(bridge_store.texts) if text not in held_out]
            if not continuations:
                print("bridge: too few texts to train and evaluate bridges; they stay as they were fitted")
                return None
            with exclusive(folder):
                if not (folder / "head.json").exists():
                    seconds_here = self._train_and_save(folder, identity, shape, bridge_spec, continuations)
        record = training_record(folder)
        bridge_store.report_cost(folder.name, record["seconds"], seconds_here)
        if not record["helps"]:
            agreements = f"({record['bridged']:.2f}) than empty skips ({record['empty']:.2f})"
            print(f"bridge: {shape.kind} trained for {mask.format()} drafts no better {agreements}; it is not used")
            return None
        self._trained[shape] = folder
        return replace(config, bridge=str(folder))

    def _train_and_save(
        self, folder: Path, identity: str, shape: BridgeShape, bridge_spec: BridgeSpec, continuations: list[Continuation]
    ) -> float:
        """Train, evaluate and save bridges; return the seconds that this process spent."""
        bridge_store = self._bridge_store
        with contextlib.ExitStack() as stack:
            run = None
            if self._tracker is not None:
                run = self._tracker.nested(folder.name, identity, self._options | shape.to_dict(), "training")
                stack.enter_context(run.closing())
            trainer = BridgeTrainer(
                OmegaConf.create(self._options),
                shape,
                BridgeTexts(
                    self._target,
                    continuations,
                    tokens=bridge_store.tokens(bridge_spec.tokens or _TOKENS),
                    calibration=lambda: bridge_store.calibration,
                    cache=bridge_store.text_cache,
                ),
                TrainingCheckpoint(folder / "training.pt", identity),
                warm_start=self._nearest(shape),
            )
            try:
                trainer.train(run)
            except BaseException:
                bridge_store.report_cost(folder.name, trainer.saved_seconds, trainer.saved_seconds - trainer.earlier_seconds)
                raise
            start = time.monotonic()
            calibration = bridge_store.calibration
            empty, bridged = (calibration.judge(trainer.bridges.mask, bridges) for bridges in (None, trainer.bridges))
            seconds = trainer.seconds + time.monotonic() - start
            record = {name: getattr(bridge_spec, name) for name in ("bridge", "rank", "width")}
            record |= {"texts": bridge_store.digest, "steps": trainer.step, "seconds": seconds}
            record |= {"helps": bridged > empty, "empty": empty, "bridged": bridged}
            if run is not None:
                metrics = {"agreement_empty": empty, "agreement_bridged": bridged, "training_seconds": seconds}
                run.log(metrics | trainer.start_metrics, step=trainer.step)
            save_bridges(folder, trainer.bridges, self._target, record | self._options, calibration.digest)
        return seconds - trainer.earlier_seconds

    def _nearest(self, shape: BridgeShape) -> Bridges | None:
        """Load the trained bridges of the same method and size whose mask differs least, the latest of equals, if any."""
        compatible = [other for other in self._trained if other.is_compatible(shape)]
        nearest = min(reversed(compatible), key=lambda other: _distance(shape, other), default=None)
        return None if nearest is None else load_bridges(self._trained[nearest], self._target)

    def _tuned(self, config: SpeculativeConfig, predictors: Sequence[ScanPredictor]) -> SpeculativeConfig:
        """Return the configuration with the best predicted draft length, stop rule and siblings; unchanged without any."""
        predictor = next((predictor for predictor in predictors if predictor.can_predict(config)), None)
        if predictor is None:
            return config
        folder = Path(config.bridge)
        bridges = load_bridges(folder, self._target, SkipMask.parse(config.mask, self._target.layers))
        left_out = self._bridge_store.left_out(self._bridge_store.bridge_spec(config).tokens)
        extras, name = DraftExtras(**bridges.shape.size, left_out=left_out), digest([folder.name, training_record(folder)])
        tuned = within_memory(lambda: predictor.tuned(config, name, bridges, extras))
        if tuned is None:
            print(f"bridging: {config.label()} drafts as far as before its training: out of memory")
        return tuned or config


def _distance(one: BridgeShape, other: BridgeShape) -> int:
    """Return the number of sub-layers in which two masks differ."""
    masks = [SkipMask.parse(shape.mask, shape.layers) for shape in (one, other)]
    first, second = ((*mask.attention, *mask.mlp) for mask in masks)
    return sum(a != b for a, b in zip(first, second, strict=True))
