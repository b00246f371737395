"""Who foretells a target best? Trains what drafts for it, on texts that it writes itself.

``python -m searches.train drafter=eagle`` (or ``medusa``) lets the target write prompts and answers, reads its hidden states
into a file, trains, and says how often drafts would be accepted on held-out prompts. Everything is kept as it is made, and
the same command goes on; what it writes is a head that ``kind: eagle`` drafts with. ``drafter=layer_skip mask=...`` fits and
trains the bridges of that mask instead.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from layerskip import PromptSet, Sampling, Target
from layerskip.files import digest
from layerskip.heads.eagle import MOST_BACK, EagleHead, EagleShape, read_modules
from layerskip.heads.feature_store import FeatureStore, Thought, check_readout, think
from layerskip.heads.induction import induce
from layerskip.heads.medusa import MedusaHeads, MedusaShape
from layerskip.heads.readout import Readout
from layerskip.heads.scaling import NATURAL, Units
from layerskip.heads.training import Batch, acceptance, fit_linear, foretell, loss_of, stored_modules
from layerskip.models.environment import environment
from layerskip.models.trained_module import save_head
from layerskip.texts.continuations import Continuation, continue_prompts
from layerskip.texts.training_texts import TrainingText
from searches.app.checks import InputError, check_flag, check_folder, check_number, check_seed, check_whole
from searches.app.file_lock import exclusive
from searches.tracking.tracker import Tracker
from searches.training.bridge_training import judge_of, neighbour_of, shape_of, shown, train_bridges
from searches.training.learner import Learner, TrainingFile, check_learning, refuse_another, room
from searches.training.training_texts import (
    asked_texts,
    begun_like,
    check_drafted,
    drafted_tokens,
    kind_of_texts,
    told_apart,
    write_texts,
)

_KINDS = ("eagle", "medusa", "layer_skip")
_NUMBERS = (
    "tokens",
    "max_new_tokens",
    "batch",
    "feature_bytes",
    "calibration_bytes",
    "training_bytes",
    "remembered_bytes",
    "held_out_tokens",
)
_RECIPE = 12  # of what follows and of layerskip.heads.training; a training goes on only as it began
_MEASURED = 32  # texts that say how large hidden states are
_SPARED = 32  # texts at most, one of twenty, that no weight is learnt from
_ALONE = 0.6  # of the training, in which EAGLE learns the next token alone: a third of the time, and it decides the rest
_BRIDGES = 570.0  # seconds that a mask's bridges are trained for, unless told; ten minutes with the last step
_LEARNING = (
    "steps",
    "max_seconds",
    "texts_per_step",
    "learning_rate",
    "unroll",
    "three_layers",
    "vocabulary",
    "feature_bytes",
)


def train(config: DictConfig) -> Path | None:
    """Train a head or bridges; see ``conf/train.yaml``. Returns their folder, or None where they are not worth keeping."""
    _check(config)
    kind, sampling = str(config.drafter.kind), instantiate(config.sampling)
    if kind == "layer_skip" and config.max_seconds is None:
        config.max_seconds = _BRIDGES
    prompts: PromptSet = instantiate(config.prompts)
    held_out = prompts.split()[1].take(None)  # kinds of work in turn, as memory may hold the first of them alone
    like = begun_like("begin_like", config.begin_like, prompts)
    target: Target = instantiate(config.target)
    check_drafted("vocabulary", config.vocabulary, target)
    outputs = Path(config.outputs)
    written = asked_texts(config, target, sampling, like)
    learnt = {"kind": kind, "recipe": _RECIPE, "texts": digest(written), **{name: config[name] for name in _LEARNING}}
    if kind == "eagle":
        learnt["lookback"] = int(config.lookback)
    if kind == "layer_skip":
        shape = shape_of(config, target)
        learnt |= {"bridges": shape.to_dict(), **{name: config[name] for name in ("calibration_bytes", "training_bytes")}}
        neighbour = neighbour_of(config, target, shape)
        if neighbour is not None:
            learnt["warm_start"] = digest([tensor.float().tolist() for tensor in neighbour.state_dict().values()])
    folder = Path(config.head or outputs / f"{kind}-{digest(learnt)[:8]}")
    refuse_another(folder, digest(learnt))
    with exclusive(folder), _tracking(config, folder, learnt, target) as tracker:
        with tqdm(total=len(held_out), unit="prompt", desc="held-out", disable=None) as bar:
            continued = continue_prompts(
                target, held_out, Sampling(), int(config.held_out_tokens), config.seed, outputs / "continuations", bar.update
            )
        # What cannot be scanned or kept is refused before the texts are written.
        if kind == "layer_skip":
            scanner = judge_of(config, target, continued)
            texts = write_texts(config, target, sampling, like)
            said = drafted_tokens(target, texts, config.vocabulary)
            return train_bridges(config, target, shape, texts, scanner, said, folder, learnt, tracker, neighbour)
        check_readout(target)
        three_layers = kind == "eagle" and bool(config.three_layers)
        modules = stored_modules(read_modules(target, three_layers), *read_modules(target))
        states = outputs / "features" / digest([kind_of_texts(config, target, sampling, like), modules])[:16]
        with exclusive(states):
            store = FeatureStore(states, modules)
            store.check_disk(int(config.feature_bytes))
        took: list[float] = []
        texts = write_texts(config, target, sampling, like, lambda _, seconds, __: took.append(seconds))
        return _train_head(config, target, texts, sum(took), continued, folder, store, learnt, tracker)


@contextlib.contextmanager
def _tracking(config: DictConfig, folder: Path, learnt: dict[str, Any], target: Target) -> Iterator[Tracker]:
    """A training's own run, which is gone on with."""
    tracker = Tracker(config.tracking.uri, Path(config.outputs), config.tracking.experiment)
    identity = digest([learnt, str(folder.resolve())])
    tracker.open_study(folder.name, identity, learnt, environment(target), role="training")
    with tracker.closing():
        yield tracker


def _train_head(
    config: DictConfig,
    target: Target,
    texts: list[TrainingText],
    texts_seconds: float,
    continued: tuple[Continuation, ...],
    folder: Path,
    store: FeatureStore,
    learnt: dict[str, Any],
    tracker: Tracker,
) -> Path:
    kind = str(config.drafter.kind)
    head = _head(config, kind, target, texts)
    with exclusive(store.folder), tqdm(total=len(texts), unit="text", desc="hidden states", disable=None) as bar:
        store = FeatureStore(store.folder, store.modules)  # another training may have gone on with it
        kept = folder / "training.pt"
        spare = max(0, room(head) - (kept.stat().st_size if kept.exists() else 0))
        place = folder if folder.exists() else folder.parent
        if place.stat().st_dev != store.folder.stat().st_dev:
            if spare > (free := shutil.disk_usage(place).free):
                raise InputError(f"head: a training takes {spare:,} bytes, and {place} has {free:,}")
            spare = 0
        store.fill(target, texts, int(config.feature_bytes), bar.update, spare)
    if len(store) < len(texts):
        print(f"feature_bytes: {config.feature_bytes:,} hold {len(store)} of {len(texts)} texts")
    if not len(store):
        raise InputError(f"feature_bytes: {config.feature_bytes} hold not even one text")
    judges = [think(target, (*p.prompt, *p.tokens), len(p.prompt), store.modules) for p in continued]
    identity = digest([learnt, head.shape.to_dict(), told_apart(texts)])
    file = TrainingFile(folder / "training.pt", identity, digest(learnt))
    learner = _HeadLearner(config, head, target, store, judges, file)
    learner.learn_all(tracker)
    learner.end()
    accepted = learner.judge()
    training: dict[str, Any] = {
        "data": told_apart(texts[: learner.texts]),
        "positions": store.positions(learner.texts),
        "texts_seconds": texts_seconds,
    } | learnt
    others = range(learner.texts, len(store))
    spared = learner.accepted(store[place] for place in others) if others else []
    training |= {"steps_done": learner.step, "seconds": learner.seconds, "held_out": accepted, "spared": spared}
    weights = head.weights() if isinstance(head, EagleHead) else dict(head.state_dict())
    save_head(folder, kind, head.shape.to_dict(), weights, target, training)
    tracker.log_file(folder / "head.json")
    print(f"accepted on held-out prompts, token by token: {shown(accepted)}")
    if spared:
        print(f"on other texts like those that it learnt from: {shown(spared)}; begin_like makes them like what is served")
    print(f"wrote {folder}; decode with kind={kind} head={folder}")
    return folder


def _check(config: DictConfig) -> None:
    check_seed(config.seed)
    if config.drafter.get("kind") not in _KINDS:
        raise InputError(f"drafter: {config.drafter.get('kind')!r} is not trained; {' and '.join(_KINDS)} are")
    for name in _NUMBERS:
        check_whole(name, config[name])
    check_learning(config)
    if config.vocabulary is not None:
        check_whole("vocabulary", config.vocabulary)
    if config.max_seconds is not None:
        check_number("max_seconds", config.max_seconds)
    check_flag("three_layers", config.three_layers)
    check_whole("lookback", config.lookback, 0, MOST_BACK)
    if config.head is not None:
        config.head = str(config.head)  # a folder of digits is read as a number
        check_folder("head", config.head)
    for name in ("bridge", "draft_head"):
        if config.drafter.get(name):
            raise InputError(f"drafter.{name}: is what this program makes; warm_start names bridges to begin from")


def _head(config: DictConfig, kind: str, target: Target, texts: list[TrainingText]) -> EagleHead | MedusaHeads:
    tokens = drafted_tokens(target, texts, config.vocabulary)
    size = None if tokens is None else tokens.shape[0]
    torch.manual_seed(config.seed)
    if kind == "eagle":
        return EagleHead(EagleShape.of(target, bool(config.three_layers), size, int(config.lookback)), tokens)
    return MedusaHeads(MedusaShape(target.hidden, int(config.unroll), read_modules(target), size), tokens)


class _HeadLearner(Learner):
    """A head in training."""

    def __init__(
        self,
        config: DictConfig,
        head: EagleHead | MedusaHeads,
        target: Target,
        store: FeatureStore,
        judges: list[Thought],
        file: TrainingFile,
    ) -> None:
        self.head, self.store, self._judges = head.to(target.device).float().train(), store, judges
        self.embeddings = target.model.get_input_embeddings()
        self.readout = Readout(target, self.head.tokens)
        self._fast = target.dtype == "bfloat16"
        texts = len(store) - min(_SPARED, len(store) // 20)
        self._units = NATURAL
        if isinstance(head, EagleHead):
            self._units = units = Units.of(head, self.embeddings, (store[place] for place in range(min(_MEASURED, texts))))
            identity = digest([file.identity, units.embeddings, units.read.tolist(), units.states])
            file = replace(file, identity=identity)
            if file.path.exists():
                units.enter(head)  # what is no weight; the weights are read from the file
        super().__init__(config, self.head, texts, file)

    def begin(self) -> None:
        """EAGLE's linear map in closed form, and what copies, where it looks back."""
        if isinstance(self.head, EagleHead):
            fit_linear(self.head, self.embeddings, (self.store[place] for place in range(self.texts)))
            said = torch.cat([self.store.tokens(place) for place in range(self.texts)])
            induce(self.head, self.embeddings, self.readout, said)
            self._units.enter(self.head)

    def end(self) -> None:
        """What was learnt, in the target's units."""
        if isinstance(self.head, EagleHead):
            self._units.leave(self.head)
            self._units = NATURAL

    def loss(self, places: list[int]) -> Tensor:
        """Of what the head says of the next tokens."""
        batch = Batch.of([self.store[place] for place in places], self.head, self._units, whole=True)
        alone = isinstance(self.head, EagleHead) and self.progress < _ALONE
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._fast):
            return loss_of(foretell(self.head, self.embeddings, batch, 1 if alone else self.config.unroll), self.readout)

    def judge(self) -> list[float]:
        """On held-out continuations."""
        return self.accepted(self._judges)

    def accepted(self, texts: Iterable[Thought]) -> list[float]:
        """One pass over each text, from common tokens alone."""
        self.head.eval()
        found = acceptance(self.head, self.embeddings, self.readout, texts, int(self.config.unroll), self._units)
        self.head.train()
        return found
