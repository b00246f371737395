"""Training of heads that draft for a target, on texts that the target generates itself.

``python -m searches.train drafter=eagle`` (or ``medusa``) generates prompts and answers with the target, stores its hidden
states of them, trains the head, and prints how often its drafts are accepted on held-out prompts. Each stage is stored, and
the same command resumes. The result is a head for ``method: eagle``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from layerskip import PromptSet, Target
from layerskip.decoding.checkpoint_settings import default_sampling
from layerskip.files import digest
from layerskip.heads.eagle import MOST_BACK, EagleHead, EagleShape
from layerskip.heads.feature_store import FeatureStore, TextFeatures, check_readout, extract_features
from layerskip.heads.induction import add_induction_heads
from layerskip.heads.medusa import MedusaHeads, MedusaShape
from layerskip.heads.readout import Readout
from layerskip.heads.training import (
    UNSCALED,
    Batch,
    HeadScaling,
    acceptance,
    fit_linear,
    head_loss,
    predict_tokens,
)
from layerskip.models.environment import environment
from layerskip.models.trained_module import save_trained
from layerskip.texts.continuations import Continuation, continue_prompts
from layerskip.texts.training_texts import TrainingText
from searches.app.application import run
from searches.app.checks import InputError, check_folder, check_number, check_seed, check_whole
from searches.results import exclusive
from searches.tracking.tracker import Tracker
from searches.training.texts import (
    check_draft_vocabulary,
    drafted_tokens,
    opening_texts,
    texts_digest,
    texts_identity,
    texts_settings,
    write_texts,
)
from searches.training.trainer import (
    Trainer,
    TrainingCheckpoint,
    check_training_folder,
)

_KINDS = ("eagle", "medusa")
_WHOLE = ("tokens", "max_new_tokens", "batch", "held_out_tokens", "feature_bytes", "steps", "texts_per_step", "unroll")
_VERSION = 14  # of this module and layerskip.heads.training; a training resumes only with the same version
_LEARNING = ("steps", "max_seconds", "texts_per_step", "learning_rate", "unroll")
_SCALED = 32  # texts from which the scale of hidden states is estimated
_VALIDATION = 32  # the most validation texts; one text in twenty is one
# Share of EAGLE's training for the next token only: such a step takes a third of the time, and later tokens depend on it.
_NEXT_ONLY = 0.6


def train(config: DictConfig) -> Path:
    """Train a head; return its folder."""
    _check(config)
    kind, sampling = str(config.drafter.method), instantiate(config.sampling)
    prompts: PromptSet = instantiate(config.prompts)
    held_out = prompts.split()[1].take(None)  # categories alternate, because memory may hold only the first prompts
    like = opening_texts("begin_like", config.begin_like, prompts)
    target: Target = instantiate(config.target)
    check_draft_vocabulary("vocabulary", config.vocabulary, target)
    outputs = Path(config.outputs)
    texts_id = digest(texts_identity(config, target, sampling, like))
    identity = {"kind": kind, "recipe": _VERSION, "texts": texts_id}
    identity |= {name: config[name] for name in (*_LEARNING, "vocabulary", "feature_bytes")}
    if kind == "eagle":
        identity["lookback"] = int(config.lookback)
    folder = Path(config.head or outputs / f"{kind}-{digest(identity)[:8]}")
    check_training_folder(folder, digest(identity))
    with exclusive(folder), _opened_run(config, target, folder, identity) as run:
        with tqdm(total=len(held_out), unit="prompt", desc="held-out", disable=None) as bar:
            continuations = continue_prompts(
                target,
                held_out,
                default_sampling(target),
                int(config.held_out_tokens),
                config.seed,
                outputs / "continuations",
                bar.update,
            )
        # Targets whose output layer heads cannot use, and full disks, are refused before the texts are written.
        check_readout(target)
        states = outputs / "features" / digest(texts_settings(config, target, sampling, like))[:16]
        with exclusive(states):
            store = FeatureStore(states)
            store.check_disk(int(config.feature_bytes))
        texts, seconds = write_texts(config, target, sampling, like)
        return _train_head(run, texts, seconds, continuations, store)


@dataclass(frozen=True)
class TrainingRun:
    """One run of the program.

    Args:
        folder: for the checkpoint and the result.
        identity: everything that the training depends on, except the texts.
    """

    config: DictConfig
    target: Target
    folder: Path
    identity: dict[str, Any]
    tracker: Tracker


@contextlib.contextmanager
def _opened_run(config: DictConfig, target: Target, folder: Path, identity: dict[str, Any]) -> Iterator[TrainingRun]:
    """Open the tracked run of a training, or resume it."""
    tracker = Tracker(config.tracking.uri, Path(config.outputs), config.tracking.experiment)
    run_identity = digest([identity, str(folder.resolve())])
    tracker.open_study(folder.name, run_identity, identity, environment(target), role="training")
    with tracker.closing():
        yield TrainingRun(config, target, folder, identity, tracker)


def _train_head(
    run: TrainingRun,
    texts: list[TrainingText],
    texts_seconds: float,
    continuations: tuple[Continuation, ...],
    store: FeatureStore,
) -> Path:
    config, target, folder, kind = run.config, run.target, run.folder, str(run.config.drafter.method)
    head = _new_head(config, kind, target, texts)
    store = _fill_store(run, texts, store)
    held_out = [extract_features(target, (*p.prompt, *p.tokens), len(p.prompt)) for p in continuations]
    whole = digest([run.identity, head.shape.to_dict(), texts_digest(texts)])
    checkpoint = TrainingCheckpoint(folder / "training.pt", whole, digest(run.identity))
    trainer = HeadTrainer(config, head, target, store, held_out, checkpoint)
    trainer.train(run.tracker)
    trainer.unscale()
    accepted = trainer.evaluate()
    training: dict[str, Any] = {
        "data": texts_digest(texts[: trainer.texts]),
        "positions": store.positions(trainer.texts),
        "texts_seconds": texts_seconds,
    } | run.identity
    validation = range(trainer.texts, len(store))
    spared = trainer.acceptance(store[index] for index in validation) if validation else []
    training |= {"steps_done": trainer.step, "seconds": trainer.seconds, "held_out": accepted, "spared": spared}
    weights = head.weights() if isinstance(head, EagleHead) else dict(head.state_dict())
    save_trained(folder, kind, head.shape.to_dict(), weights, target, training)
    run.tracker.log_file(folder / "head.json")
    print(f"accepted on held-out prompts, token by token: {_format_rates(accepted)}")
    if spared:
        rates = _format_rates(spared)
        print(f"on texts like the training texts: {rates}; begin_like makes training texts like the prompts in use")
    print(f"wrote {folder}; decode with method={kind} head={folder}")
    return folder


def _format_rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:.3f}" for rate in rates)


def _fill_store(run: TrainingRun, texts: list[TrainingText], store: FeatureStore) -> FeatureStore:
    """Store the hidden states of texts, within the budget."""
    with exclusive(store.folder), tqdm(total=len(texts), unit="text", desc="hidden states", disable=None) as bar:
        store = FeatureStore(store.folder)  # another training may have extended it
        store.fill(run.target, texts, int(run.config.feature_bytes), bar.update)
    if len(store) < len(texts):
        print(f"feature_bytes: {run.config.feature_bytes:,} hold {len(store)} of {len(texts)} texts")
    if not len(store):
        raise InputError(f"feature_bytes: {run.config.feature_bytes} hold not even one text")
    return store


def _check(config: DictConfig) -> None:
    check_seed(config.seed)
    if config.drafter.get("method") not in _KINDS:
        raise InputError(f"drafter: {config.drafter.get('method')!r} is not trained; {' and '.join(_KINDS)} are")
    for name in _WHOLE:
        check_whole(name, config[name])
    check_number("learning_rate", config.learning_rate, 1.0)
    check_number("save_seconds", config.save_seconds)
    if config.vocabulary is not None:
        check_whole("vocabulary", config.vocabulary)
    if config.max_seconds is not None:
        check_number("max_seconds", config.max_seconds)
    check_whole("lookback", config.lookback, 0, MOST_BACK)
    if config.head is not None:
        config.head = str(config.head)  # YAML reads a folder name of digits as a number
        check_folder("head", config.head)


def _new_head(config: DictConfig, kind: str, target: Target, texts: list[TrainingText]) -> EagleHead | MedusaHeads:
    tokens = drafted_tokens(target, texts, config.vocabulary)
    size = None if tokens is None else tokens.shape[0]
    torch.manual_seed(config.seed)
    if kind == "eagle":
        return EagleHead(EagleShape.of(target, size, int(config.lookback)), tokens)
    return MedusaHeads(MedusaShape(target.hidden, int(config.unroll), size), tokens)


class HeadTrainer(Trainer):
    """Trainer of a head; EAGLE's is trained in scaled units (:mod:`layerskip.heads.training`)."""

    def __init__(
        self,
        config: DictConfig,
        head: EagleHead | MedusaHeads,
        target: Target,
        store: FeatureStore,
        held_out: list[TextFeatures],
        checkpoint: TrainingCheckpoint,
    ) -> None:
        self.head, self.store, self._held_out = head.to(target.device).float().train(), store, held_out
        self.embeddings = target.model.get_input_embeddings()
        self.readout = Readout(target, self.head.tokens)
        self._autocast = target.dtype == "bfloat16"
        texts = len(store) - min(_VALIDATION, len(store) // 20)
        self._scaling = UNSCALED
        if isinstance(head, EagleHead):
            some = (store[index] for index in range(min(_SCALED, texts)))
            self._scaling = scaling = HeadScaling.of(head, self.embeddings, some)
            identity = digest([checkpoint.identity, scaling.embeddings, scaling.states])
            checkpoint = replace(checkpoint, identity=identity)
            if checkpoint.path.exists():
                scaling.apply(head)  # scales what the checkpoint does not hold; it holds scaled weights
        super().__init__(config, self.head, texts, checkpoint)

    def initialise(self) -> None:
        """Fit EAGLE's linear map in closed form, and add induction heads if it looks back."""
        if isinstance(self.head, EagleHead):
            fit_linear(self.head, self.embeddings, (self.store[index] for index in range(self.texts)))
            tokens = torch.cat([self.store.tokens(index) for index in range(self.texts)])
            add_induction_heads(self.head, self.embeddings, self.readout, tokens)
            self._scaling.apply(self.head)

    def unscale(self) -> None:
        if isinstance(self.head, EagleHead):
            self._scaling.inverse.apply(self.head)
            self._scaling = UNSCALED

    def loss(self, indices: list[int]) -> Tensor:
        batch = Batch.of([self.store[index] for index in indices], self.device, self._scaling, whole=True)
        next_only = isinstance(self.head, EagleHead) and self.progress < _NEXT_ONLY
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            predictions = predict_tokens(self.head, self.embeddings, batch, 1 if next_only else self.config.unroll)
            return head_loss(predictions, self.readout)

    def evaluate(self) -> list[float]:
        return self.acceptance(self._held_out)

    def acceptance(self, texts: Iterable[TextFeatures]) -> list[float]:
        """Return the acceptance rates on texts, if only the tokens of the head's own vocabulary are drafted."""
        self.head.eval()
        rates = acceptance(self.head, self.embeddings, self.readout, texts, int(self.config.unroll), self._scaling)
        self.head.train()
        return rates


if __name__ == "__main__":
    run("train", train)
