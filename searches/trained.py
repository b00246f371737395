"""What do finalists draft with? Bridges that are trained by gradient, from what a shelf has fitted in closed form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from layerskip import SkipMask, SpeculativeConfig
from layerskip.bridge import Bridges, BridgeShape, load_bridges, save_bridges
from layerskip.files import digest

from .bridging import BridgeLearner
from .learner import TrainingFile
from .shelf import Shelf, about
from .written import passages_of

_STEPS = 10**6  # time ends training
_SAVED = 30.0  # seconds between savings
_TOKENS = 16384  # that training looks at where drafts are from the whole vocabulary: enough to learn by
_SETTINGS = ("learning_rate", "unroll", "texts_per_step", "calibration_bytes", "training_bytes")


class TrainedBridges:
    """Trains bridges of finalists, each once.

    Args:
        shelf: where closed forms, texts and settings come from, and where what is trained is kept.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf, self._target = shelf, shelf.target
        self._learning: dict[str, Any] = {name: getattr(shelf.settings, name) for name in _SETTINGS}
        self._learning |= {"max_seconds": shelf.settings.train_seconds, "steps": _STEPS}
        self._learning |= {"save_seconds": _SAVED, "seed": shelf.seed}
        self._grown: dict[BridgeShape, Path] = {}

    def of(self, config: SpeculativeConfig) -> SpeculativeConfig:
        """A bridged configuration with its bridges trained, from their closed form on, or from what was trained before of
        the nearest mask, where that loses less."""
        shelf = self._shelf
        mask = SkipMask.parse(config.mask, self._target.layers)
        makeup = shelf.makeup(config)
        width = makeup.width or shelf.settings.train_width
        made = ("mlp", makeup.rank, width) if width else (makeup.bridge, makeup.rank)
        shape = BridgeShape.of(self._target, mask, *made)
        identity = digest([shelf.digest, self._learning, shape.to_dict(), makeup.tokens])
        folder = shelf.folder / f"trained-{identity[:16]}"
        here = 0.0
        if not (folder / "head.json").exists():
            learner = BridgeLearner(
                OmegaConf.create(self._learning),
                shape,
                self._target,
                passages_of(shelf.texts),
                None,
                shelf.tokens(makeup.tokens or _TOKENS),
                TrainingFile(folder / "training.pt", identity),
                lambda: shelf.calibration,
                shelf.memory,
                self._neighbour(shape),
            )
            learner.learn_all(None)
            said = {"bridge": makeup.bridge, "rank": makeup.rank, "width": makeup.width, "texts": shelf.digest}
            said |= {"steps": learner.step, "seconds": learner.seconds}
            save_bridges(folder, learner.bridges, self._target, said | self._learning)
            here = learner.seconds - learner.before
        shelf.on_use(folder.name, about(folder).get("seconds", 0.0), here)
        self._grown[shape] = folder
        return replace(config, bridge=str(folder))

    def _neighbour(self, shape: BridgeShape) -> Bridges | None:
        """Trained bridges of the same kind and size whose mask differs least, if there are any."""
        alike = [other for other in self._grown if other.is_like(shape)]
        nearest = min(reversed(alike), key=lambda other: _distance(shape, other), default=None)
        return None if nearest is None else load_bridges(self._grown[nearest], self._target)


def _distance(one: BridgeShape, other: BridgeShape) -> int:
    """In how many sub-layers two masks differ."""
    masks = [SkipMask.parse(shape.mask, shape.layers) for shape in (one, other)]
    mine, theirs = ((*mask.attention, *mask.mlp) for mask in masks)
    return sum(a != b for a, b in zip(mine, theirs, strict=True))
