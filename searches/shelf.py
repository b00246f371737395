"""Where do a search's bridges come from? A shelf: fitted in closed form when first asked for, then kept, mask by mask.

A mask is to be chosen for what it is worth bridged, so whatever judges masks asks here first. Bridges that do not make the
draft better are kept, too, so that nobody fits them again, but never handed out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from layerskip import Sampling, SkipMask, SpeculativeConfig, Target, UnsupportedModel
from layerskip.bridge import Bridges, BridgeShape, load_bridges, save_bridges
from layerskip.bridge_fit import Calibration
from layerskip.costs import NO_AIDS, Aids
from layerskip.draft_head import save_draft_tokens
from layerskip.files import digest
from layerskip.memory import out_of_memory, release
from layerskip.own_texts import OwnText
from layerskip.scan import Scanner
from layerskip.texts import Memory

from .application import InputError, check_number, check_whole
from .bridging import BridgeLearner, calibrate
from .learner import TrainingFile
from .makeup import Makeup
from .written import asked_texts, drafted_tokens, passages_of, respelled_tokens, write_texts

_RECIPE = 5  # of fitting, training and draft heads; what was made otherwise is made anew
_STEPS = 10**6  # time ends training
_REMEMBERED = 16  # masks whose bridges are at hand
_CHECKED = 2  # texts in which rows must see what decoding does
_SAVED = 30.0  # seconds between savings
_TRAINED_TOKENS = 16384  # that training looks at where drafts are from the whole vocabulary: enough to learn by


@dataclass(frozen=True)
class BridgingSettings:
    """What bridges are fitted to.

    Args:
        tokens: of the target's own answers.
        max_new_tokens: of an answer.
        batch: answers written at once.
        calibration_bytes: of hidden states, keys and values in memory.
        train_seconds: of training, for every finalist that is bridged; 0 for none.
        train_width: of the MLPs that are trained beside the finalists' maps; 0 for none.
        learning_rate: of it.
        unroll: tokens in a row that it learns.
        texts_per_step: answers of a step, if they fit.
        training_bytes: of what a step holds until its gradient is there.
        remembered_bytes: of texts as the target read them, in memory, for training.
        begin_like: a file of prompts that every other text begins like, none of which is measured.

    Raises:
        InputError: one of them is out of range.
    """

    tokens: int = 20000
    max_new_tokens: int = 128
    batch: int = 48
    calibration_bytes: int = 1_500_000_000
    train_seconds: float = 0.0
    train_width: int = 512
    learning_rate: float = 0.001
    unroll: int = 3
    texts_per_step: int = 6
    training_bytes: int = 2_000_000_000
    remembered_bytes: int = 1_000_000_000
    begin_like: str | None = None

    def __post_init__(self) -> None:
        check_number("bridging.train_seconds", self.train_seconds, or_zero=True)
        check_number("bridging.learning_rate", self.learning_rate, 1.0)
        for name in ("tokens", "max_new_tokens", "batch", "unroll", "texts_per_step"):
            check_whole(f"bridging.{name}", getattr(self, name))
        for name in ("calibration_bytes", "training_bytes", "remembered_bytes"):
            check_whole(f"bridging.{name}", getattr(self, name))
        check_whole("bridging.train_width", self.train_width, 0)


class Shelf:
    """Bridges and draft heads of one target, and draft heads of the models that draft for it.

    Args:
        target: the model.
        sampling: of its own texts.
        settings: how many of them.
        outputs: where texts, bridges and heads are kept.
        seed: of the texts.
        like: what every other text begins like.
    """

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        settings: BridgingSettings,
        outputs: Path,
        seed: int,
        like: Sequence[str] = (),
    ) -> None:
        self.target, self._sampling, self._settings, self._like = target, sampling, settings, like
        fields = {name: getattr(settings, name) for name in ("tokens", "max_new_tokens", "batch")}
        self._config = OmegaConf.create(fields | {"seed": seed, "outputs": str(outputs)})
        asked = [_RECIPE, asked_texts(self._config, target, sampling, like), settings.calibration_bytes]
        self._asked = digest(asked)
        self._folder = (outputs / "shelf" / self._asked[:12]).resolve()
        self._loaded: dict[str, Bridges] = {}
        self._grown: dict[BridgeShape, Path] = {}  # trained bridges
        self._beyond: set[Path] = set()  # what could not be fitted in this process's memory

    @property
    def digest(self) -> str:
        """Of everything that bridges are fitted to."""
        return self._asked

    @property
    def trains(self) -> bool:
        """Whether finalists are to be trained."""
        return self._settings.train_seconds > 0

    def bridge(self, mask: SkipMask, makeup: Makeup) -> str:
        """The folder of a mask's bridges; empty where none are asked for, or where they would not make the draft better."""
        if makeup.bridge == "none" or not mask.gaps:
            return ""
        folder = self._place(mask, makeup)
        if self._out_of_reach(folder):
            return ""
        if not (folder / "head.json").exists() and not self._fit(mask, makeup, folder):
            return ""
        return str(folder) if _about(folder)["helps"] else ""

    def lacks(self, mask: SkipMask, makeup: Makeup) -> bool:
        """Whether a mask's bridges are asked for and could not be fitted, as memory did not suffice."""
        return makeup.bridge != "none" and bool(mask.gaps) and self._out_of_reach(self._place(mask, makeup))

    def _place(self, mask: SkipMask, makeup: Makeup) -> Path:
        return self._folder / digest([mask.format(), makeup.bridge, makeup.rank])[:16]

    def _out_of_reach(self, folder: Path) -> bool:
        return not self._beyond.isdisjoint((folder, self._folder))

    def trained(self, config: SpeculativeConfig) -> SpeculativeConfig:
        """A bridged configuration with its bridges trained by gradient, from their closed form on, or from those of the
        nearest mask that were trained before, where these lose less."""
        settings = self._settings
        names = ("learning_rate", "unroll", "texts_per_step", "calibration_bytes", "training_bytes")
        learning = {name: getattr(settings, name) for name in names}
        learning |= {
            "max_seconds": settings.train_seconds,
            "steps": _STEPS,
            "save_seconds": _SAVED,
            "seed": self._config.seed,
        }
        mask = SkipMask.parse(config.mask, self.target.layers)
        makeup, width = self.makeup(config), settings.train_width
        made = ("mlp", makeup.rank, width) if width else (makeup.bridge, makeup.rank)
        shape = BridgeShape.of(self.target, mask, *made)
        identity = digest([self._asked, learning, shape.to_dict(), makeup.tokens])
        folder = self._folder / f"trained-{identity[:16]}"
        if not (folder / "head.json").exists():
            learner = BridgeLearner(
                OmegaConf.create(learning),
                shape,
                self.target,
                passages_of(self._texts),
                None,
                self.tokens(makeup.tokens or _TRAINED_TOKENS),
                TrainingFile(folder / "training.pt", identity),
                lambda: self._calibration,
                self._memory,
                self._neighbour(shape),
            )
            learner.learn_all(None)
            about = {"bridge": makeup.bridge, "rank": makeup.rank, "texts": self._asked, "steps": learner.step} | learning
            save_bridges(folder, learner.bridges, self.target, about)
        self._grown[shape] = folder
        return replace(config, bridge=str(folder))

    def head(self, size: int) -> str:
        """The folder of the draft head of so many tokens; empty for the whole vocabulary."""
        return self._head(self.target, size, f"head-{size}", self.tokens)

    def head_of(self, draft: str, size: int) -> str:
        """As :meth:`head`, of a draft model's own tokens, which spell otherwise what the target says."""
        model = self.target.load_draft(draft, same_tokenizer=False)
        name = f"head-{size}-{model.digest[:12]}"
        return self._head(model, size, name, lambda few: respelled_tokens(model, self.target, self._texts, few))

    def _head(self, owner: Target, size: int, name: str, choose: Callable[[int], Tensor | None]) -> str:
        if not 0 < size < owner.vocabulary:
            return ""
        folder = self._folder / name
        if not (folder / "head.json").exists():
            tokens = choose(size)
            assert tokens is not None
            save_draft_tokens(folder, tokens, owner, {"tokens": size, "texts": self._asked})
        return str(folder)

    def tokens(self, size: int) -> Tensor | None:
        """``[size]`` int64: the tokens of a draft head; None for the whole vocabulary."""
        return drafted_tokens(self.target, self._texts, size) if 0 < size < self.target.vocabulary else None

    def load(self, folder: str, mask: SkipMask) -> Bridges | None:
        """The bridges in a folder that :meth:`bridge` gave."""
        if not folder:
            return None
        if folder not in self._loaded:
            while len(self._loaded) >= _REMEMBERED:
                del self._loaded[next(iter(self._loaded))]
            self._loaded[folder] = load_bridges(folder, self.target, mask)
        return self._loaded[folder]

    def aids(self, mask: SkipMask, makeup: Makeup) -> Aids:
        """What a mask's draft has beside the sub-layers that it keeps."""
        if makeup == Makeup():
            return NO_AIDS
        left_out = self.target.vocabulary - makeup.tokens if 0 < makeup.tokens < self.target.vocabulary else 0
        return Aids.of(self._shape(mask, makeup) if self.bridge(mask, makeup) else None, left_out)

    def makeup(self, config: SpeculativeConfig) -> Makeup:
        """How a configuration drafts that this shelf made up."""
        bridge: dict[str, Any] = _about(Path(config.bridge)) if config.bridge else {}
        size = _about(Path(config.draft_head))["tokens"] if config.draft_head else 0
        return Makeup(str(bridge.get("bridge", "none")), int(bridge.get("rank", 0)), int(size))

    @functools.cached_property
    def _texts(self) -> list[OwnText]:
        return write_texts(self._config, self.target, self._sampling, self._like)

    @functools.cached_property
    def _calibration(self) -> Calibration:
        budget, passages = self._settings.calibration_bytes, passages_of(self._texts)
        longest = sorted(passages, key=lambda passage: passage.starts)[-_CHECKED:]
        Scanner(self.target, longest, Sampling(), depth=2).check()
        return calibrate(self.target, passages, budget, "bridging.calibration_bytes", self._memory)

    @functools.cached_property
    def _memory(self) -> Memory | None:
        return Memory(self._settings.remembered_bytes) if self.trains else None

    def _neighbour(self, shape: BridgeShape) -> Bridges | None:
        """Trained bridges of the same kind and size whose mask differs least, if there are any."""
        alike = [other for other in self._grown if other.is_like(shape)]
        nearest = min(reversed(alike), key=lambda other: _distance(shape, other), default=None)
        return None if nearest is None else load_bridges(self._grown[nearest], self.target)

    def _shape(self, mask: SkipMask, makeup: Makeup) -> BridgeShape:
        return BridgeShape.of(self.target, mask, makeup.bridge, makeup.rank)

    def _fit(self, mask: SkipMask, makeup: Makeup, folder: Path) -> bool:
        """Whether memory sufficed; where it did not, nothing is kept, as another machine's may."""
        try:
            fit = self._calibration.fit(self._shape(mask, makeup))
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            # Where not even the texts' states fit, no mask's bridges can be fitted.
            self._beyond.add(folder if "_calibration" in vars(self) else self._folder)
        except UnsupportedModel as error:
            self._beyond.add(self._folder)
            print(f"bridge: all are left out: {error}")
            return False
        if self._out_of_reach(folder):
            release()
            print(f"bridge: {makeup.bridge} for {mask.format()} is left out: out of memory")
            return False
        about = {"bridge": makeup.bridge, "rank": makeup.rank, "helps": fit.helps, "empty": fit.empty}
        about |= {"bridged": fit.bridged, "seconds": fit.seconds, "rows": fit.rows, "texts": self._asked}
        save_bridges(folder, fit.bridges, self.target, about)
        if not fit.helps:
            print(f"bridge: {makeup.bridge} for {mask.format()} drafts no better ({fit.bridged:.2f}) than empty skips")
        return True


@functools.cache
def _about(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "head.json").read_text(encoding="utf-8"))["training"]
    except OSError:
        raise InputError(f"outputs: {folder}, which a trial of this study drafted with, is gone") from None
    return found


def _distance(one: BridgeShape, other: BridgeShape) -> int:
    """In how many sub-layers two masks differ."""
    masks = [SkipMask.parse(shape.mask, shape.layers) for shape in (one, other)]
    mine, theirs = ((*mask.attention, *mask.mlp) for mask in masks)
    return sum(a != b for a, b in zip(mine, theirs, strict=True))
