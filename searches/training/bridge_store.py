"""Where do a search's bridges come from? A bridge_store: fitted in closed form when first asked for, then kept, mask by mask.

A mask is to be chosen for what it is worth bridged, so whatever judges masks asks here first. Bridges that do not make the
draft better are kept, too, so that nobody fits them again, but never handed out.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from layerskip import Sampling, SkipMask, SpeculativeConfig, Target, UnsupportedModel
from layerskip.bridges.fit import Calibration
from layerskip.costs.cost_model import Aids
from layerskip.device.memory import out_of_memory, release
from layerskip.files import digest, write_json
from layerskip.models.bridge import Bridges, BridgeShape, load_bridges, save_bridges
from layerskip.models.draft_head import save_draft_tokens
from layerskip.models.loading import load_draft
from layerskip.scan.scan import Scanner
from layerskip.scan.text_cache import Memory
from layerskip.texts.continuations import OnUse
from layerskip.texts.training_texts import TrainingText
from searches.app.checks import InputError
from searches.app.file_lock import exclusive
from searches.space.bridge_spec import BridgeSpec
from searches.training.bridge_settings import BridgingSettings
from searches.training.bridge_training import calibrate
from searches.training.training_texts import asked_texts, continuations_of, drafted_tokens, respelled_tokens, write_texts

_RECIPE = 7  # of fitting, training and draft heads; what was made otherwise is made anew
_REMEMBERED = 16  # masks whose bridges are at hand
_CHECKED = 2  # texts in which rows must see what decoding does


class BridgeStore:
    """Bridges and draft heads of one target, and draft heads of the models that draft for it.

    Args:
        target: the model.
        sampling: of its own texts.
        settings: how many of them.
        outputs: where texts, bridges and heads are kept.
        seed: of the texts.
        like: what every other text begins like.
        width: of the widest MLPs that a search asks for.

    Attributes:
        on_use: hears of every fit that is asked for, however often: its name, the seconds that it took, and how many of them
            were spent just now.
        on_texts: hears as much of the target's own texts, and of reading them for the fits.
    """

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        settings: BridgingSettings,
        outputs: Path,
        seed: int,
        like: Sequence[str] = (),
        width: int = 0,
    ) -> None:
        self.target, self.settings, self.seed = target, settings, seed
        self._sampling, self._like = sampling, like
        fields = {name: getattr(settings, name) for name in ("tokens", "max_new_tokens", "batch")}
        self._config = OmegaConf.create(fields | {"seed": seed, "outputs": str(outputs)})
        self._width = max(width, settings.train_width)  # trained or not, so that both find the same closed forms here
        asked = [_RECIPE, asked_texts(self._config, target, sampling, like), settings.calibration_bytes, self._width]
        self._asked = digest(asked)
        self.folder = (outputs / "bridges" / self._asked[:12]).resolve()
        self._loaded: dict[str, Bridges] = {}
        self.on_use: OnUse = lambda *_: None
        self.on_texts: OnUse = lambda *_: None
        self._reading = self.folder / "reading.json"  # how long the target took to read its texts for the first fits
        self._read_in: float | None = None
        self._beyond: set[Path] = set()  # what could not be fitted in this process's memory

    @property
    def digest(self) -> str:
        """Of everything that bridges are fitted to."""
        return self._asked

    @property
    def trains(self) -> bool:
        """Whether finalists are to be trained."""
        return self.settings.train_seconds > 0

    def bridge(self, mask: SkipMask, bridge_spec: BridgeSpec) -> str:
        """The folder of a mask's bridges; empty where none are asked for, or where they would not make the draft better."""
        if bridge_spec.bridge == "none" or not mask.gaps:
            return ""
        folder = self._place(mask, bridge_spec)
        if self._out_of_reach(folder):
            return ""
        there = (folder / "head.json").exists()
        if not there:
            with exclusive(folder):  # a study of another name shares the bridge_store
                there = (folder / "head.json").exists()
                if not there and not self._fit(mask, bridge_spec, folder):
                    return ""
        found = about(folder)
        self.on_use(folder.name, found["seconds"], 0.0 if there else found["seconds"])
        _ = self.texts  # to be counted, whoever had them written: they are what this was fitted to
        self._tell_reading()
        return str(folder) if found["helps"] else ""

    def lacks(self, mask: SkipMask, bridge_spec: BridgeSpec) -> bool:
        """Whether a mask's bridges are asked for and could not be fitted, as memory did not suffice."""
        return bridge_spec.bridge != "none" and bool(mask.gaps) and self._out_of_reach(self._place(mask, bridge_spec))

    def _place(self, mask: SkipMask, bridge_spec: BridgeSpec) -> Path:
        named = [mask.format(), bridge_spec.bridge, bridge_spec.rank, *([bridge_spec.width] if bridge_spec.width else [])]
        return self.folder / digest(named)[:16]

    def _out_of_reach(self, folder: Path) -> bool:
        return not self._beyond.isdisjoint((folder, self.folder))

    def head(self, size: int) -> str:
        """The folder of the draft head of so many tokens; empty for the whole vocabulary."""
        return self._head(self.target, size, f"head-{size}", self.tokens)

    def head_of(self, draft: str, size: int) -> str:
        """As :meth:`head`, of a draft model's own tokens, which spell otherwise what the target says."""
        model = load_draft(self.target, draft, same_tokenizer=False)
        name = f"head-{size}-{model.digest[:12]}"
        return self._head(model, size, name, lambda few: respelled_tokens(model, self.target, self.texts, few))

    def _head(self, owner: Target, size: int, name: str, choose: Callable[[int], Tensor | None]) -> str:
        if not 0 < size < owner.vocabulary:
            return ""
        folder = self.folder / name
        _ = self.texts  # which it is made from; whoever uses it is told of them
        with exclusive(folder):
            if not (folder / "head.json").exists():
                tokens = choose(size)
                assert tokens is not None
                save_draft_tokens(folder, tokens, owner, {"tokens": size, "texts": self._asked})
        return str(folder)

    def tokens(self, size: int) -> Tensor | None:
        """``[size]`` int64: the tokens of a draft head; None for the whole vocabulary."""
        return drafted_tokens(self.target, self.texts, size) if 0 < size < self.target.vocabulary else None

    def load(self, folder: str, mask: SkipMask) -> Bridges | None:
        """The bridges in a folder that :meth:`bridge` gave."""
        if not folder:
            return None
        if folder not in self._loaded:
            while len(self._loaded) >= _REMEMBERED:
                del self._loaded[next(iter(self._loaded))]
            self._loaded[folder] = load_bridges(folder, self.target, mask)
        return self._loaded[folder]

    def aids(self, mask: SkipMask, bridge_spec: BridgeSpec) -> Aids:
        """What a mask's draft has beside the sub-layers that it keeps."""
        return Aids.of(
            self._shape(mask, bridge_spec) if self.bridge(mask, bridge_spec) else None, self.left_out(bridge_spec.tokens)
        )

    def left_out(self, size: int) -> int:
        """How many tokens a draft head of so many never drafts."""
        return self.target.vocabulary - size if 0 < size < self.target.vocabulary else 0

    def bridge_spec(self, config: SpeculativeConfig) -> BridgeSpec:
        """How a configuration drafts that this bridge_store made up."""
        bridge: dict[str, Any] = about(Path(config.bridge)) if config.bridge else {}
        size = about(Path(config.draft_head))["tokens"] if config.draft_head else 0
        kind, rank, width = (bridge.get(name, 0) for name in ("bridge", "rank", "width"))
        return BridgeSpec(str(kind or "none"), int(rank), int(size), int(width))

    def described(self, name: str) -> dict[str, Any]:
        """A fit, by the name that ``on_use`` heard: what it is of, what it took, and what it is worth; empty where it is not
        done, or gone."""
        if not (self.folder / name / "head.json").exists():
            return {}
        said = json.loads((self.folder / name / "head.json").read_text(encoding="utf-8"))
        training, shape = said["training"], {part: said["shape"][part] for part in ("mask", "kind", "rank", "width")}
        found = {"fit_seconds": training["seconds"], "trained": "steps" in training}
        return shape | found | {f"agreement_{part}": training[part] for part in ("empty", "bridged")}

    @functools.cached_property
    def texts(self) -> list[TrainingText]:
        """The target's own."""
        return write_texts(self._config, self.target, self._sampling, self._like, self.on_texts)

    @functools.cached_property
    def calibration(self) -> Calibration:
        """What bridges are fitted to, read when first asked for."""
        budget, continuations = self.settings.calibration_bytes, continuations_of(self.texts)
        start = time.monotonic()
        longest = sorted(continuations, key=lambda continuation: continuation.starts)[-_CHECKED:]
        Scanner(self.target, longest, Sampling(), depth=2).check()
        found = calibrate(self.target, continuations, budget, "bridging.calibration_bytes", self.memory, self._width)
        took = time.monotonic() - start
        if not self._reading.exists():
            write_json(self._reading, {"seconds": took})
        self._tell_reading(took)
        return found

    def _tell_reading(self, here: float = 0.0) -> None:
        """It counts once, however often it is done again by who fits to the texts what is not there yet."""
        if self._read_in is None and self._reading.exists():
            self._read_in = float(json.loads(self._reading.read_text(encoding="utf-8"))["seconds"])
        if self._read_in is not None:
            self.on_texts(f"reading {self._asked[:12]}", self._read_in, here)

    @functools.cached_property
    def memory(self) -> Memory | None:
        """Of texts as the target read them, where there will be training."""
        return Memory(self.settings.remembered_bytes) if self.trains else None

    def _shape(self, mask: SkipMask, bridge_spec: BridgeSpec) -> BridgeShape:
        return BridgeShape.of(self.target, mask, bridge_spec.bridge, bridge_spec.rank, bridge_spec.width)

    def _fit(self, mask: SkipMask, bridge_spec: BridgeSpec, folder: Path) -> bool:
        """Whether memory sufficed; where it did not, nothing is kept, as another machine's may."""
        try:
            fit = self.calibration.fit(self._shape(mask, bridge_spec))
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            # Where not even the texts' states fit, no mask's bridges can be fitted.
            self._beyond.add(folder if "calibration" in vars(self) else self.folder)
        except UnsupportedModel as error:
            self._beyond.add(self.folder)
            print(f"bridge: all are left out: {error}")
            return False
        if self._out_of_reach(folder):
            release()
            print(f"bridge: {bridge_spec.bridge} for {mask.format()} is left out: out of memory")
            return False
        said = {"bridge": bridge_spec.bridge, "rank": bridge_spec.rank, "width": bridge_spec.width, "helps": fit.helps}
        said |= {"empty": fit.empty, "bridged": fit.bridged, "seconds": fit.seconds, "rows": fit.rows}
        save_bridges(folder, fit.bridges, self.target, said | {"texts": self._asked}, self.calibration.digest)
        if not fit.helps:
            print(f"bridge: {bridge_spec.bridge} for {mask.format()} drafts no better ({fit.bridged:.2f}) than empty skips")
        return True


@functools.cache
def about(folder: Path) -> dict[str, Any]:
    """How what lies in a folder of a bridge_store came about.

    Raises:
        InputError: nothing is there any more.
    """
    try:
        found: dict[str, Any] = json.loads((folder / "head.json").read_text(encoding="utf-8"))["training"]
    except OSError:
        raise InputError(f"outputs: {folder}, which a trial of this study drafted with, is gone") from None
    return found
