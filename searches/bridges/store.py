"""The bridge store: bridges of a search, fitted in closed form on first use and then kept, mask by mask.

Masks are chosen by how fast they are with bridges, so everything that compares masks gets their bridges here first. Bridges
that do not improve the draft are kept as well, so that they are not fitted again, but never handed out.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from layerskip import Sampling, SkipMask, SpeculativeConfig, Target, UnsupportedModel
from layerskip.bridges.bridge import Bridges, BridgeShape, load_bridges, save_bridges
from layerskip.bridges.fit import Calibration
from layerskip.costs.cost_model import DraftExtras
from layerskip.device.memory import within_memory
from layerskip.files import digest, read_json, write_json
from layerskip.models.draft_head import save_draft_tokens
from layerskip.models.loading import load_draft
from layerskip.scan.scan import Scanner
from layerskip.scan.text_batch import TextCache
from layerskip.texts.continuations import ReportCost
from layerskip.texts.training_texts import TrainingText
from searches.app.checks import InputError, check_number, check_whole
from searches.bridges.spec import BridgeSpec
from searches.bridges.training import calibrate
from searches.predict.scan_predictor import EmptyDrafts, ScanPredictor
from searches.results import exclusive
from searches.training.texts import continuations_of, drafted_tokens, texts_identity, translated_tokens, write_texts

BRIDGES_FOLDER = "bridges"
"""The folder of fitted bridges in the outputs folder."""
_VERSION = 7  # of fitting, training and draft heads; results of another version are made again
_LOADED_MASKS = 16  # masks whose bridges stay in memory
_CHECKED_TEXTS = 2  # texts on which packed rows are checked against decoding


@dataclass(frozen=True)
class BridgingSettings:
    """Settings of fitting and training bridges.

    Args:
        tokens: tokens of the target's own answers in the training texts.
        max_new_tokens: tokens per answer.
        batch: answers generated together.
        calibration_bytes: memory budget of a fit: hidden states, keys, values and temporary memory.
        train_seconds: seconds of training for every bridged finalist; 0 for none.
        train_width: width of the MLPs that are trained with the maps of finalists that have none; 0 for none.
        learning_rate: the highest learning rate of the training.
        unroll: consecutive tokens that a step learns to draft.
        texts_per_step: the most answers of a training step.
        training_bytes: memory budget of a training step with its optimiser.
        remembered_bytes: memory budget of the target's states of the texts.
        begin_like: file of unmeasured prompts; every other text begins like one of them.
    """

    tokens: int = 20000
    max_new_tokens: int = 128
    batch: int = 48
    calibration_bytes: int = 1_500_000_000
    train_seconds: float = 0
    train_width: int = 512
    learning_rate: float = 0.002
    unroll: int = 1
    texts_per_step: int = 3
    training_bytes: int = 2_000_000_000
    remembered_bytes: int = 1_000_000_000
    begin_like: str | None = None

    def __post_init__(self) -> None:
        check_number("bridging.train_seconds", self.train_seconds, or_zero=True)
        check_number("bridging.learning_rate", self.learning_rate, 1.0)
        bytes_fields = ("calibration_bytes", "training_bytes", "remembered_bytes")
        for name in ("tokens", "max_new_tokens", "batch", "unroll", "texts_per_step", *bytes_fields):
            check_whole(f"bridging.{name}", getattr(self, name))
        check_whole("bridging.train_width", self.train_width, 0)


class BridgeStore:
    """Bridges and draft heads of one target, and draft heads of its draft models.

    Args:
        sampling: of the target's tokens.
        outputs: folder of texts and bridges.
        seed: of the texts.
        like: prompts that every other text begins like.
        width: the largest width of MLPs in the search.

    Attributes:
        report_cost: called on every use of a fit with its name, its seconds, and how many of them this call spent.
        report_texts_cost: the same for the training texts, and for reading them before the first fit.
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
        # The width of trained MLPs counts without training as well, so that both searches share their closed forms.
        self._width = max(width, settings.train_width)
        identity = [_VERSION, texts_identity(self._config, target, sampling, like), settings.calibration_bytes, self._width]
        self.digest = digest(identity)
        self.folder = (outputs / BRIDGES_FOLDER / self.digest[:12]).resolve()
        self.report_cost: ReportCost = lambda *_: None
        self.report_texts_cost: ReportCost = lambda *_: None
        self._load = functools.lru_cache(_LOADED_MASKS)(functools.partial(load_bridges, target=target))
        self._reading_file = self.folder / "reading.json"  # the seconds that reading the texts took before the first fits
        self._failed: set[Path] = set()  # folders of bridges that did not fit into this process's memory

    @property
    def trains(self) -> bool:
        """True if finalists are trained."""
        return self.settings.train_seconds > 0

    def bridge(self, mask: SkipMask, bridge_spec: BridgeSpec) -> str:
        """Return the folder of a mask's bridges, which are fitted now unless they exist.

        It is empty if the spec has none, if they would not improve the draft, or if memory does not suffice to fit them.
        """
        if bridge_spec.bridge == "none" or not mask.gaps or self.failed(mask, bridge_spec):
            return ""
        folder = self._folder_of(mask, bridge_spec)
        existed = (folder / "head.json").exists()
        if not existed:
            with exclusive(folder):  # other studies share the store
                existed = (folder / "head.json").exists()
                if not existed and not self._fit(mask, bridge_spec, folder):
                    return ""
        record = training_record(folder)
        self.report_cost(folder.name, record["seconds"], 0.0 if existed else record["seconds"])
        _ = self.texts  # the bridges were fitted to them, so their cost counts, whichever process wrote them
        self._report_reading()
        return str(folder) if record["helps"] else ""

    def failed(self, mask: SkipMask, bridge_spec: BridgeSpec) -> bool:
        """Return whether a mask's bridges could not be fitted in this process."""
        return not self._failed.isdisjoint((self._folder_of(mask, bridge_spec), self.folder))

    def _folder_of(self, mask: SkipMask, bridge_spec: BridgeSpec) -> Path:
        named = [mask.format(), bridge_spec.bridge, bridge_spec.rank, *([bridge_spec.width] if bridge_spec.width else [])]
        return self.folder / digest(named)[:16]

    def head(self, size: int) -> str:
        """Return the folder of the target's draft head of ``size`` tokens; empty for the whole vocabulary."""
        return self._head(self.target, size, f"head-{size}", self.tokens)

    def draft_model_head(self, draft: str, size: int) -> str:
        """Return the folder of a draft model's draft head: its tokens for the target's most frequent ones."""
        model = load_draft(self.target, draft, same_tokenizer=False)
        name = f"head-{size}-{model.digest[:12]}"
        return self._head(model, size, name, lambda size: translated_tokens(model, self.target, self.texts, size))

    def _head(self, owner: Target, size: int, name: str, choose: Callable[[int], Tensor | None]) -> str:
        if not 0 < size < owner.vocabulary:
            return ""
        folder = self.folder / name
        _ = self.texts  # the head is chosen from them, so their cost counts
        with exclusive(folder):
            if not (folder / "head.json").exists():
                tokens = choose(size)
                assert tokens is not None
                save_draft_tokens(folder, tokens, owner, {"tokens": size, "texts": self.digest})
        return str(folder)

    def tokens(self, size: int) -> Tensor | None:
        """Return the tokens of a draft head, ``[size]`` int64; None for the whole vocabulary."""
        return drafted_tokens(self.target, self.texts, size) if 0 < size < self.target.vocabulary else None

    def load(self, folder: str, mask: SkipMask) -> Bridges | None:
        """Load the bridges in a folder that :meth:`bridge` returned; None for an empty path."""
        return self._load(folder, mask=mask) if folder else None

    def predictor(self, plain: ScanPredictor, bridge_spec: BridgeSpec) -> ScanPredictor:
        """Return a predictor of drafts with a spec that shares the texts of another one and their passes."""
        bridge = f"{bridge_spec.bridge}{bridge_spec.width or ''}"
        name = f"{bridge}-{bridge_spec.rank}-{bridge_spec.tokens}-{self.digest[:12]}"
        return plain.with_drafts(BridgedDrafts(self, bridge_spec), name)

    def left_out(self, size: int) -> int:
        """Return the number of tokens that a draft head of ``size`` tokens never drafts."""
        return self.target.vocabulary - size if 0 < size < self.target.vocabulary else 0

    def bridge_spec(self, config: SpeculativeConfig) -> BridgeSpec:
        """Return the spec of a configuration whose bridges and draft head are from this store."""
        size = training_record(Path(config.draft_head))["tokens"] if config.draft_head else 0
        if not config.bridge:
            return BridgeSpec(tokens=size)
        made = training_record(Path(config.bridge))
        return BridgeSpec(made["bridge"], made["rank"], size, made["width"])

    def fit_record(self, name: str) -> dict[str, Any]:
        """Return mask, shape, seconds and agreements of a fit that ``report_cost`` named; nothing if it is not there."""
        head = read_json(self.folder / name / "head.json")
        if head is None:
            return {}
        training, shape = head["training"], {part: head["shape"][part] for part in ("mask", "kind", "rank", "width")}
        agreements = {f"agreement_{part}": training[part] for part in ("empty", "bridged")}
        return shape | agreements | {"fit_seconds": training["seconds"], "trained": "steps" in training}

    @functools.cached_property
    def texts(self) -> list[TrainingText]:
        """The training texts."""
        return write_texts(self._config, self.target, self._sampling, self._like, self.report_texts_cost)

    @functools.cached_property
    def calibration(self) -> Calibration:
        """The statistics that bridges are fitted to; the texts are read on first use."""
        budget, continuations = self.settings.calibration_bytes, continuations_of(self.texts)
        start = time.monotonic()
        longest = sorted(continuations, key=lambda continuation: continuation.starts)[-_CHECKED_TEXTS:]
        Scanner(self.target, longest, Sampling(), depth=2).check()
        calibration = calibrate(
            self.target, continuations, budget, "bridging.calibration_bytes", self.text_cache, self._width
        )
        seconds = time.monotonic() - start
        if not self._reading_file.exists():
            write_json(self._reading_file, {"seconds": seconds})
        self._report_reading(seconds)
        return calibration

    def _report_reading(self, seconds_here: float = 0.0) -> None:
        """Report the cost of reading the texts, which counts once, however many processes read them for further fits."""
        if (reading := read_json(self._reading_file)) is not None:
            self.report_texts_cost(f"reading {self.digest[:12]}", reading["seconds"], seconds_here)

    @functools.cached_property
    def text_cache(self) -> TextCache | None:
        """The target's states of texts, for training; None without training."""
        return TextCache(self.settings.remembered_bytes) if self.trains else None

    def shape(self, mask: SkipMask, bridge_spec: BridgeSpec) -> BridgeShape:
        return BridgeShape.of(self.target, mask, bridge_spec.bridge, bridge_spec.rank, bridge_spec.width)

    def _fit(self, mask: SkipMask, bridge_spec: BridgeSpec, folder: Path) -> bool:
        """Fit bridges and save them; return False, and save nothing, if memory does not suffice on this machine."""
        try:
            fit = within_memory(lambda: self.calibration.fit(self.shape(mask, bridge_spec)))
        except UnsupportedModel as error:
            self._failed.add(self.folder)
            print(f"bridge: all are left out: {error}")
            return False
        if fit is None:
            # If even the states of the texts do not fit, no mask's bridges can be fitted.
            self._failed.add(folder if "calibration" in vars(self) else self.folder)
            print(f"bridge: {bridge_spec.bridge} for {mask.format()} is left out: out of memory")
            return False
        record = {"bridge": bridge_spec.bridge, "rank": bridge_spec.rank, "width": bridge_spec.width, "helps": fit.helps}
        record |= {"empty": fit.empty, "bridged": fit.bridged, "seconds": fit.seconds, "rows": fit.rows}
        save_bridges(folder, fit.bridges, self.target, record | {"texts": self.digest}, self.calibration.digest)
        if not fit.helps:
            print(f"bridge: {bridge_spec.bridge} for {mask.format()} drafts no better ({fit.bridged:.2f}) than empty skips")
        return True


class BridgedDrafts(EmptyDrafts):
    """Drafts of masks with the bridges and the draft head of a spec, which are made on first use."""

    def __init__(self, store: BridgeStore, spec: BridgeSpec) -> None:
        self._store, self._spec = store, spec
        self.tokens, self.fills_gaps = store.tokens(spec.tokens), spec.bridge != "none"

    def fields(self, mask: SkipMask) -> dict[str, Any]:
        return {"bridge": self._store.bridge(mask, self._spec), "draft_head": self._store.head(self._spec.tokens)}

    def replacements(self, masks: Sequence[SkipMask]) -> list[Bridges | None]:
        return [self._store.load(self._store.bridge(mask, self._spec), mask) for mask in masks]

    def reproducible(self, mask: SkipMask) -> bool:
        return not (self.fills_gaps and mask.gaps and self._store.failed(mask, self._spec))

    def extras(self, mask: SkipMask) -> DraftExtras:
        size = self._store.shape(mask, self._spec).size if self._store.bridge(mask, self._spec) else {}
        return DraftExtras(**size, left_out=self._store.left_out(self._spec.tokens))

    def matches(self, config: SpeculativeConfig) -> bool:
        return self._store.bridge_spec(config) == self._spec


@functools.cache
def training_record(folder: Path) -> dict[str, Any]:
    """Return how the bridges or the draft head in a folder of a bridge store were made; refuse a folder that is gone."""
    try:
        record: dict[str, Any] = json.loads((folder / "head.json").read_text(encoding="utf-8"))["training"]
    except OSError:
        raise InputError(f"outputs: {folder}, which a trial of this study drafted with, is gone") from None
    return record
