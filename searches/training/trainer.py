"""The training of a head: initialisation, learning rate, order of texts, evaluation, and checkpoints."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from layerskip.device.memory import is_out_of_memory
from layerskip.device.transfer import now
from layerskip.device.trial import first_line
from layerskip.files import atomic_write, digest
from layerskip.heads.eagle import EagleHead
from layerskip.heads.feature_store import FeatureStore, TextFeatures
from layerskip.heads.folders import is_published
from layerskip.heads.induction import add_induction_heads
from layerskip.heads.readout import Readout
from layerskip.heads.training import Batch, acceptance, fit_linear, head_loss, measure_scales, predict_tokens, rescale
from layerskip.models.trained_module import has_trained
from searches.app.checks import InputError
from searches.tracking.tracker import Tracker

_FILE = "training.pt"
_WARMUP = 0.03  # share of the training during which the learning rate rises
_OFFSET = 1e-3  # makes the rate of the first step positive
_CLIP = 1.0
_MIN_SECONDS = 1e-3  # of training, if initialisation took all the time
_LOSSES = 50  # steps over which the loss is averaged
_SCALED = 32  # texts from which the scale of hidden states is estimated
_VALIDATION = 32  # the most validation texts; one text in twenty is one
# Share of the training for the next token only: such a step takes a third of the time, and later tokens depend on it.
_NEXT_ONLY = 0.6


def check_training_folder(folder: Path, settings_digest: str) -> None:
    """Refuse a folder that holds another training or another head, before texts are written."""
    file = folder / _FILE
    found = _read(file, mmap=True).get("asked") if file.exists() else None
    if found and found != settings_digest:
        raise InputError(f"head: {folder} holds another training; name another folder")
    if not file.exists() and (has_trained(folder) or is_published(folder)):
        raise InputError(f"head: {folder} holds a head that this program did not train; name another folder")


def _read(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Load the state of a training on the host. A damaged file is refused; a killed process does not damage it."""
    try:
        state = torch.load(path, weights_only=True, mmap=mmap, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError) as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"head: {path} cannot be read ({first_line(error)}); delete it to train again") from error
    return state if isinstance(state, dict) else {}


class HeadTrainer:
    """Trainer of a head in scaled units (:mod:`layerskip.heads.training`), which resumes from its checkpoint."""

    def __init__(
        self,
        config: DictConfig,
        head: EagleHead,
        store: FeatureStore,  # the texts to learn from, with the target that wrote them
        held_out: list[TextFeatures],  # texts that the checkpoints are evaluated on
        folder: Path,  # for the checkpoint
        identity: str,  # digest of everything that the training depends on
        settings_digest: str,  # digest of the part of it that is known before texts are written
    ) -> None:
        target = store.target
        self.config, self.device, self.store, self.held_out = config, target.device, store, held_out
        self.head = head.to(self.device).float()
        self.embeddings = target.model.get_input_embeddings()
        self.readout = Readout(target, head.tokens)
        self._autocast = target.dtype == "bfloat16"
        self.texts = len(store.texts) - min(_VALIDATION, len(store.texts) // 20)  # to train on; the others validate
        self.optimiser = torch.optim.AdamW(head.parameters(), lr=config.learning_rate, weight_decay=0.01)
        self.step, self.evaluation_seconds = 0, 0.0  # beside ``seconds``, those of initialisation and steps
        self._scales = measure_scales(self.embeddings, map(store.__getitem__, range(min(_SCALED, self.texts))))
        self._file, self._settings_digest = folder / _FILE, settings_digest
        self._identity = digest([identity, *self._scales])
        if self._file.exists():
            state = _read(self._file)
            if state.get("identity") != self._identity:
                raise InputError(f"head: {folder} holds another training, or one of other texts; name another folder")
            rescale(head, *self._scales)  # scales what the checkpoint does not hold; it holds scaled weights
            head.load_state_dict(state["head"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.step, self.seconds, self._start_seconds = state["step"], state["seconds"], state["begun"]
            self.evaluation_seconds = state["judging"]
        else:
            start = time.monotonic()
            self.initialise()
            self.seconds = self._start_seconds = time.monotonic() - start
            self.save()  # reading texts and fitting a closed form take minutes

    def initialise(self) -> None:
        """Fit the linear map in closed form, and add induction heads if the head looks back."""
        fit_linear(self.head, self.embeddings, map(self.store.__getitem__, range(self.texts)))
        tokens = torch.tensor([token for text in self.store.texts[: self.texts] for token in text.tokens])
        add_induction_heads(self.head, self.embeddings, self.readout, tokens)
        rescale(self.head, *self._scales)

    def loss(self, indices: list[int]) -> Tensor:
        batch = Batch.of([self.store[index] for index in indices], self.device, whole=True)
        steps = 1 if self.progress < _NEXT_ONLY else int(self.config.unroll)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            return head_loss(predict_tokens(self.head, self.embeddings, batch, steps), self.readout)

    def acceptance(self, texts: Iterable[TextFeatures]) -> list[float]:
        """Return the acceptance rate of each further drafted token after right ones; the head's vocabulary alone drafts."""
        return acceptance(self.head, self.embeddings, self.readout, texts, int(self.config.unroll))

    @property
    def progress(self) -> float:
        """The share of the steps, or of the time, that is done: from 0 to 1."""
        by_steps, maximum = self.step / self.config.steps, self.config.max_seconds
        if not maximum:
            return float(by_steps)
        # Initialisation counts as time, but not for the learning rate, whose schedule begins after it.
        spent = self.seconds + self.evaluation_seconds - self._start_seconds
        return float(max(by_steps, spent / max(maximum - self._start_seconds, _MIN_SECONDS)))

    def train_step(self) -> float:
        """Do one step; return its loss. Refuse one if the loss or the gradient is not finite."""
        start, done = now(self.device), self.progress
        # The rate rises linearly, then falls by a half cosine to zero (arXiv 1608.03983).
        factor = min(1.0, (done + _OFFSET) / _WARMUP) * (1 + math.cos(math.pi * done)) / 2
        self.optimiser.param_groups[0]["lr"] = self.config.learning_rate * factor
        loss = self.loss(self._next_texts())
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), _CLIP)
        values = torch.stack((loss.detach().float(), norm.float())).tolist()  # both in one synchronisation with the device
        if not all(map(math.isfinite, values)):
            raise InputError(
                f"learning_rate: the loss is {values[0]}, its gradient's norm {values[1]} at step {self.step}; "
                f"{self.config.learning_rate} may be too large; the last checkpoint stays"
            )
        self.optimiser.step()
        self.step += 1
        self.seconds += now(self.device) - start
        return float(values[0])

    def train(self, tracker: Tracker) -> None:
        saved = time.monotonic()
        losses: list[float] = []
        form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}"  # of steps or seconds, whichever end first
        with tqdm(total=1.0, initial=self.progress, desc="training", bar_format=form, disable=None) as bar:
            while self.progress < 1.0:
                losses = [*losses[-_LOSSES + 1 :], self.train_step()]
                bar.update(min(1.0, self.progress) - bar.n)
                bar.set_postfix_str(f"step {self.step}, loss {sum(losses) / len(losses):.3f}")
                if time.monotonic() - saved >= self.config.save_seconds or self.progress >= 1.0:
                    self.save()
                    self._log(tracker, sum(losses) / len(losses))
                    saved = time.monotonic()

    def _log(self, tracker: Tracker, loss: float) -> None:
        start, ended = now(self.device), self.progress >= 1.0
        rates = self.acceptance(self.held_out)
        self.evaluation_seconds += now(self.device) - start
        if not ended and self.progress >= 1.0:
            self.save()  # evaluation took the remaining time, which a further run has to know
        metrics = {f"held_out_acceptance_at_{index + 1:02d}": rate for index, rate in enumerate(rates)}
        tracker.log(metrics | {"loss": loss}, step=self.step)

    def save(self) -> None:
        """Write the checkpoint, completely or not at all."""
        state: dict[str, Any] = {"head": self.head.state_dict(), "optimiser": self.optimiser.state_dict()}
        state |= {"step": self.step, "seconds": self.seconds, "begun": self._start_seconds}
        state |= {"judging": self.evaluation_seconds, "identity": self._identity, "asked": self._settings_digest}
        with atomic_write(self._file) as partial:
            torch.save(state, partial)

    def _next_texts(self) -> list[int]:
        """Return the texts of this step: the next ones in a random order of all, which changes after each pass."""
        size = min(int(self.config.texts_per_step), self.texts)
        passes, place = divmod(self.step, self.texts // size)
        generator = torch.Generator().manual_seed(self.config.seed + 1 + passes)
        order = torch.randperm(self.texts, generator=generator).tolist()
        return order[place * size : (place + 1) * size]
