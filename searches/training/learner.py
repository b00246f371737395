"""How does a training go on, step after step and kill after kill? Its schedule, its order of texts, and its file."""

from __future__ import annotations

import math
import pickle
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from tqdm import tqdm

from layerskip.device.clock import now
from layerskip.device.memory import out_of_memory
from layerskip.files import whole
from layerskip.heads.learning_rate import share_of_rate
from layerskip.heads.published_eagle import is_published
from layerskip.models.trained_module import is_head
from searches.app.checks import InputError, check_number, check_whole

if TYPE_CHECKING:
    from searches.tracking.tracker import Tracker

_WARMING = 0.03  # of the training, during which the learning rate rises
_CLIP = 1.0
_LEAST = 1e-3  # seconds of training, where what it began from took all the time
_LOSSES = 50  # steps over which the loss is averaged


class Diverged(InputError):
    """A training whose loss or gradient is no number any more."""


def check_learning(config: DictConfig) -> None:
    """Refuse what no training can go by; how many seconds it may take is for each program to say.

    Raises:
        InputError: a field is out of range.
    """
    for name in ("steps", "texts_per_step", "unroll"):
        check_whole(name, config[name])
    check_number("learning_rate", config.learning_rate, 1.0)
    check_number("save_seconds", config.save_seconds)


@dataclass(frozen=True)
class TrainingFile:
    """Where a training is kept, and what tells it from others.

    Args:
        path: of the file.
        identity: of everything that the training depends on.
        asked: the part of it that is known before texts are written; "" where nobody wants to know so early.
    """

    path: Path
    identity: str
    asked: str = ""


def refuse_another(folder: Path, asked: str) -> None:
    """Refuse a folder where another training is known to be kept, or a head, before texts are written for this one.

    Raises:
        InputError: there is one.
    """
    file = folder / "training.pt"
    found = _read(file, mmap=True).get("asked") if file.exists() else None
    if found and found != asked:
        raise InputError(f"head: {folder} holds another training; name another folder")
    if not file.exists() and (is_head(folder) or is_published(folder)):
        raise InputError(f"head: {folder} holds a head that this program did not train; name another folder")


def _read(path: Path, mmap: bool = False) -> dict[str, Any]:
    """What a training has kept, on the host.

    Raises:
        InputError: something else has written or damaged the file, as a kill does not.
    """
    try:
        state = torch.load(path, weights_only=True, mmap=mmap, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError) as error:
        if out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
        raise InputError(f"head: {path} cannot be read ({said}); without it training begins anew") from error
    return state if isinstance(state, dict) else {}


def room(module: nn.Module) -> int:
    """Bytes on the disk that a module's training takes: its state, twice while it is being kept, and what comes of it."""
    numbers = sum(parameter.numel() for parameter in module.parameters())
    each = 1 + 2  # the optimiser keeps two of every number
    return 4 * numbers * (2 * each + 1)


class Learner(ABC):
    """Something in training; what it has come to lies in a file.

    Args:
        config: of ``conf/train.yaml``.
        module: what learns, in float32 and on its device.
        texts: how many texts there are to learn from.
        file: where everything is kept; that of another training is refused.

    Attributes:
        step: how many are done.
        seconds: that they took, and what was before the first one.
        before: those of them that other processes spent.
        kept: those of them whose steps lie in the file.
        judging: further seconds, that judging took.
        begun_as: what is known of that which it began from, by name; kept, as only the process that made it can tell.
    """

    def __init__(self, config: DictConfig, module: nn.Module, texts: int, file: TrainingFile) -> None:
        self.config, self.module, self.texts, self.file = config, module, texts, file
        self.device = next(module.parameters()).device
        self.texts_per_step = min(int(config.texts_per_step), texts)
        self.optimiser = torch.optim.AdamW(module.parameters(), lr=config.learning_rate, weight_decay=0.01)
        self.step, self.seconds, self._begun = 0, 0.0, 0.0
        self.before = self.kept = self.judging = 0.0
        self.begun_as: dict[str, float] = {}
        if file.path.exists():
            state = _read(file.path)
            if state.get("identity") != file.identity:
                raise InputError(
                    f"head: {file.path.parent} holds another training, or one of other texts; name another folder"
                )
            module.load_state_dict(state["head"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.step, self.seconds, self._begun = state["step"], state["seconds"], state.get("begun", 0.0)
            self.before, self.kept, self.judging = self.seconds, self.seconds, state.get("judging", 0.0)
            self.begun_as = state.get("begun_as", {})
        else:
            start = time.monotonic()
            self.begin()
            self.seconds = self._begun = time.monotonic() - start
            self.save()  # reading and a closed form take minutes

    @abstractmethod
    def begin(self) -> None:
        """Set what training begins from."""

    @abstractmethod
    def loss(self, places: list[int]) -> Tensor:
        """The loss on some of the texts."""

    @abstractmethod
    def judge(self) -> list[float]:
        """For each further token on held-out prompts: how often a draft that was right so far is right there."""

    @property
    def progress(self) -> float:
        """From 0 to 1: how much of the steps, or of the time, is done."""
        by_steps, most = self.step / self.config.steps, self.config.max_seconds
        if not most:
            return float(by_steps)
        # What it began from took its share of the time, and none of the rise and fall of the learning rate.
        spent = self.seconds + self.judging - self._begun
        return float(max(by_steps, spent / max(most - self._begun, _LEAST)))

    def learn(self) -> float:
        """One step; returns its loss.

        Raises:
            Diverged: nothing can be learnt from it.
        """
        start = now(self.device)
        # By what is done of the steps or of the time, whichever ends the training.
        rate = share_of_rate(self.progress, _WARMING)
        for group in self.optimiser.param_groups:
            group["lr"] = self.config.learning_rate * rate
        loss = self.loss(self._places())
        length = loss.new_zeros(())
        if loss.requires_grad:
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            length = torch.nn.utils.clip_grad_norm_(self.module.parameters(), _CLIP)
        found, size = map(float, torch.stack((loss.detach().float(), length.float())).tolist())  # one wait for a device
        if not math.isfinite(found + size):
            rate = self.config.learning_rate
            raise Diverged(
                f"learning_rate: the loss is {found}, its gradient's norm {size} at step {self.step}, as where {rate} is "
                f"too large; what was kept before stays"
            )
        if loss.requires_grad:
            self.optimiser.step()
        self.step += 1
        self.seconds += now(self.device) - start
        return found

    def learn_all(self, tracker: Tracker | None) -> None:
        """Train to the end, keeping what it has come to now and then; a tracker hears how good that is."""
        kept = time.monotonic()
        losses: list[float] = []
        form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}"  # seconds or steps, whichever come first
        with tqdm(total=1.0, initial=self.progress, desc="training", bar_format=form, disable=None) as bar:
            while self.progress < 1.0:
                losses = [*losses[-_LOSSES + 1 :], self.learn()]
                bar.update(min(1.0, self.progress) - bar.n)
                bar.set_postfix_str(f"step {self.step}, loss {sum(losses) / len(losses):.3f}")
                if time.monotonic() - kept >= self.config.save_seconds or self.progress >= 1.0:
                    self.save()
                    start = now(self.device)
                    rates = [] if tracker is None else self.judge()
                    ended = self.progress >= 1.0
                    self.judging += now(self.device) - start
                    if not ended and self.progress >= 1.0:
                        self.save()  # judging took what time was left, and a further run has to know
                    found = {f"held_out_acceptance_at_{place + 1:02d}": rate for place, rate in enumerate(rates)}
                    if tracker is not None:
                        tracker.log(tracker.run_id, found | {"loss": sum(losses) / len(losses)}, step=self.step)
                    kept = time.monotonic()

    def save(self) -> None:
        """Keep everything, whole or not at all."""
        state: dict[str, Any] = {"head": self.module.state_dict(), "optimiser": self.optimiser.state_dict()}
        state |= {"step": self.step, "seconds": self.seconds, "begun": self._begun, "judging": self.judging}
        state |= {"identity": self.file.identity, "asked": self.file.asked, "begun_as": self.begun_as}
        with whole(self.file.path) as partial:
            torch.save(state, partial)
        self.kept = self.seconds

    def _places(self) -> list[int]:
        """Texts of this step: of all in a random order that changes every time they were gone through, the next ones."""
        each = self.texts_per_step
        turns = max(1, self.texts // each)
        generator = torch.Generator().manual_seed(self.config.seed + 1 + self.step // turns)
        order = torch.randperm(self.texts, generator=generator).tolist()
        first = self.step % turns * each
        return order[first : first + each]
