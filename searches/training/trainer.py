"""The training loop: learning rate, order of texts, evaluation, and checkpoints from which training resumes."""

from __future__ import annotations

import math
import pickle
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from tqdm import tqdm

from layerskip.device.memory import is_out_of_memory
from layerskip.device.transfer import now
from layerskip.device.trial import first_line
from layerskip.files import atomic_write
from layerskip.heads.portable import is_published
from layerskip.heads.training import rate_factor
from layerskip.models.trained_module import has_trained
from searches.app.checks import InputError
from searches.tracking.tracker import Tracker

_WARMUP = 0.03  # share of the training during which the learning rate rises
_CLIP = 1.0
_MIN_SECONDS = 1e-3  # of training, if initialisation took all the time
_LOSSES = 50  # steps over which the loss is averaged


@dataclass(frozen=True)
class TrainingCheckpoint:
    """The file of a training's state, and the identity of the training.

    Args:
        identity: digest of everything that the training depends on.
        settings_digest: digest of the part of it that is known before texts are written; "" if it is not checked that early.
    """

    path: Path
    identity: str
    settings_digest: str = ""


def check_training_folder(folder: Path, settings_digest: str) -> None:
    """Refuse a folder that holds another training or another head, before texts are written."""
    file = folder / "training.pt"
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


class Trainer(ABC):
    """Trainer of a module, which resumes from its checkpoint.

    Attributes:
        seconds: that initialisation and steps took.
        evaluation_seconds: further seconds that evaluation took.
    """

    def __init__(self, config: DictConfig, module: nn.Module, texts: int, checkpoint: TrainingCheckpoint) -> None:
        self.config, self.module, self.texts, self.checkpoint = config, module, texts, checkpoint
        self.device = next(module.parameters()).device
        self.texts_per_step = min(int(config.texts_per_step), texts)
        self.optimiser = torch.optim.AdamW(module.parameters(), lr=config.learning_rate, weight_decay=0.01)
        self.step, self.seconds, self._start_seconds = 0, 0.0, 0.0
        self.evaluation_seconds = 0.0
        if checkpoint.path.exists():
            state = _read(checkpoint.path)
            if state.get("identity") != checkpoint.identity:
                folder = checkpoint.path.parent
                raise InputError(f"head: {folder} holds another training, or one of other texts; name another folder")
            module.load_state_dict(state["head"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.step, self.seconds, self._start_seconds = state["step"], state["seconds"], state["begun"]
            self.evaluation_seconds = state["judging"]
        else:
            start = time.monotonic()
            self.initialise()
            self.seconds = self._start_seconds = time.monotonic() - start
            self.save()  # reading texts and fitting a closed form take minutes

    @abstractmethod
    def initialise(self) -> None:
        """Set the state from which training begins."""

    @abstractmethod
    def loss(self, indices: list[int]) -> Tensor:
        """Return the loss on some of the texts."""

    @abstractmethod
    def evaluate(self) -> list[float]:
        """Return the acceptance rate of each further drafted token on held-out prompts, after a right draft so far."""

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
        start = now(self.device)
        for group in self.optimiser.param_groups:
            group["lr"] = self.config.learning_rate * rate_factor(self.progress, _WARMUP)
        loss = self.loss(self._next_texts())
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), _CLIP)
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

    def train(self, tracker: Tracker | None) -> None:
        """Train to the end with regular checkpoints, and evaluate at each if there is a tracker."""
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
                    if tracker is not None:
                        self._log(tracker, sum(losses) / len(losses))
                    saved = time.monotonic()

    def _log(self, tracker: Tracker, loss: float) -> None:
        """Evaluate, and log the acceptance rates and the loss."""
        start, ended = now(self.device), self.progress >= 1.0
        rates = self.evaluate()
        self.evaluation_seconds += now(self.device) - start
        if not ended and self.progress >= 1.0:
            self.save()  # evaluation took the remaining time, which a further run has to know
        metrics = {f"held_out_acceptance_at_{index + 1:02d}": rate for index, rate in enumerate(rates)}
        tracker.log(metrics | {"loss": loss}, step=self.step)

    def save(self) -> None:
        """Write the checkpoint, completely or not at all."""
        state: dict[str, Any] = {"head": self.module.state_dict(), "optimiser": self.optimiser.state_dict()}
        state |= {"step": self.step, "seconds": self.seconds, "begun": self._start_seconds}
        state |= {"judging": self.evaluation_seconds}
        state |= {"identity": self.checkpoint.identity, "asked": self.checkpoint.settings_digest}
        with atomic_write(self.checkpoint.path) as partial:
            torch.save(state, partial)

    def _next_texts(self) -> list[int]:
        """Return the texts of this step: the next ones in a random order of all, which changes after each pass."""
        size = self.texts_per_step
        steps = max(1, self.texts // size)
        generator = torch.Generator().manual_seed(self.config.seed + 1 + self.step // steps)
        order = torch.randperm(self.texts, generator=generator).tolist()
        first = self.step % steps * size
        return order[first : first + size]
