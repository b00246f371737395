"""Training of heads that draft for a target, on texts that the target generates itself.

``python -m searches.train`` generates prompts and answers with the target, stores its hidden states of them, trains an EAGLE
head, and prints how often its drafts are accepted on held-out prompts. Each stage is stored, and the same command resumes.
The result is a head for ``method: eagle``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from layerskip import PromptSet, Target
from layerskip.decoding.checkpoint_settings import default_sampling
from layerskip.files import digest
from layerskip.heads.eagle import MOST_BACK, EagleHead, EagleShape
from layerskip.heads.feature_store import FeatureStore, check_readout, extract_features
from layerskip.heads.training import rescale
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
    texts_settings,
    write_texts,
)
from searches.training.trainer import HeadTrainer, check_training_folder

_WHOLE = ("tokens", "max_new_tokens", "batch", "held_out_tokens", "feature_bytes", "steps", "texts_per_step", "unroll")
_VERSION = 15  # of the trainer and layerskip.heads.training; a training resumes only with the same version
_LEARNING = ("steps", "max_seconds", "texts_per_step", "learning_rate", "unroll", "lookback", "vocabulary", "feature_bytes")


def train(config: DictConfig) -> Path:
    """Train a head; return its folder."""
    _check(config)
    sampling = instantiate(config.sampling)
    prompts: PromptSet = instantiate(config.prompts)
    held_out = prompts.split()[1].take(None)  # categories alternate, because memory may hold only the first prompts
    like = opening_texts(config.begin_like, prompts)
    target: Target = instantiate(config.target)
    check_draft_vocabulary(config.vocabulary, target)
    outputs = Path(config.outputs)
    of_texts = texts_settings(config, target, sampling, like)
    texts_id = digest(of_texts | {"tokens": config.tokens})
    identity = {"recipe": _VERSION, "texts": texts_id, **{name: config[name] for name in _LEARNING}}
    asked = digest(identity)
    folder = Path(config.head or outputs / f"eagle-{asked[:8]}")
    check_training_folder(folder, asked)
    with exclusive(folder):
        tracker = Tracker(config.tracking.uri, outputs, config.tracking.experiment)
        run_identity = digest([identity, str(folder.resolve())])
        tracker.open_study(folder.name, run_identity, identity, environment(target), role="training")
        with tracker.closing():
            continuations = _continue(config, target, held_out)
            # Targets whose output layer heads cannot use, and full disks, are refused before the texts are written.
            check_readout(target)
            store = FeatureStore(outputs / "features" / digest(of_texts)[:16], target)
            store.check_disk(int(config.feature_bytes))
            texts, seconds = write_texts(config, target, sampling, like)
            _fill(store, texts, int(config.feature_bytes))
            torch.manual_seed(config.seed)
            tokens = drafted_tokens(target, texts, config.vocabulary)
            head = EagleHead(EagleShape.of(target, None if tokens is None else len(tokens), int(config.lookback)), tokens)
            answers = [extract_features(target, (*each.prompt, *each.tokens), len(each.prompt)) for each in continuations]
            whole = digest([identity, head.shape.to_dict(), texts_digest(texts)])
            trainer = HeadTrainer(config, head, store, answers, folder, whole, asked)
            trainer.train(tracker)
            learned = texts[: trainer.texts]
            positions = sum(len(text.tokens) - text.begin for text in learned)
            training = {"data": texts_digest(learned), "positions": positions, "texts_seconds": seconds}
            _save(trainer, folder, training | identity)
            tracker.log_file(folder / "head.json")
    print(f"wrote {folder}; decode with method=eagle head={folder}")
    return folder


def _continue(config: DictConfig, target: Target, prompts: PromptSet) -> tuple[Continuation, ...]:
    """Decode the target's answers to held-out prompts."""
    sampling, length, stored = default_sampling(target), int(config.held_out_tokens), Path(config.outputs) / "continuations"
    with tqdm(total=len(prompts), unit="prompt", desc="held-out", disable=None) as bar:
        return continue_prompts(target, prompts, sampling, length, config.seed, stored, bar.update)


def _fill(store: FeatureStore, texts: list[TrainingText], max_bytes: int) -> None:
    """Store the hidden states of texts, within the budget."""
    with exclusive(store.folder), tqdm(total=len(texts), unit="text", desc="hidden states", disable=None) as bar:
        store.fill(texts, max_bytes, bar.update)
    if len(store.texts) < len(texts):
        print(f"feature_bytes: {max_bytes:,} hold {len(store.texts)} of {len(texts)} texts")
    if not store.texts:
        raise InputError(f"feature_bytes: {max_bytes} hold not even one text")


def _save(trainer: HeadTrainer, folder: Path, training: dict[str, Any]) -> None:
    """Save a trained head with the record of its training, and print its acceptance rates."""
    rescale(trainer.head, 1.0, 1.0)
    accepted, validation = trainer.acceptance(trainer.held_out), range(trainer.texts, len(trainer.store.texts))
    spared = trainer.acceptance(trainer.store[index] for index in validation) if validation else []
    training |= {"steps_done": trainer.step, "seconds": trainer.seconds, "held_out": accepted, "spared": spared}
    save_trained(folder, trainer.head.shape.to_dict(), trainer.head.weights(), trainer.store.target, training)
    print(f"accepted on held-out prompts, token by token: {_format_rates(accepted)}")
    if spared:
        rates = _format_rates(spared)
        print(f"on texts like the training texts: {rates}; begin_like makes training texts like the prompts in use")


def _format_rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:.3f}" for rate in rates)


def _check(config: DictConfig) -> None:
    check_seed(config.seed)
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


if __name__ == "__main__":
    run("train", train)
