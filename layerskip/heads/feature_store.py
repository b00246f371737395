"""Where do the hidden states of many texts lie? In a file that grows text by text, within a budget of bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from layerskip.config import ConfigError
from layerskip.device.tolerance import close
from layerskip.files import full_disk_told
from layerskip.heads.eagle import read_modules
from layerskip.heads.readout import Readout
from layerskip.models.architecture import UnsupportedModel
from layerskip.models.cache import KVCache
from layerskip.models.features import Features
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target
from layerskip.texts.training_texts import TrainingText

_BYTES = 2  # of a number: bfloat16
_PROBE = 8  # tokens
_SPARE = 64 * 2**20  # left free on the disk, beside what whoever learns from them needs


@dataclass(frozen=True)
class Thought:
    """A text and what the target thought of it.

    Args:
        tokens: ``[n]`` int64.
        features: ``[n, F]`` bfloat16: the hidden states behind each.
        begin: where the answer begins.
    """

    tokens: Tensor
    features: Tensor
    begin: int


class FeatureStore:
    """Texts with their hidden states.

    Args:
        folder: holds two files; what is whole in them is kept.
        modules: names of the target's sub-modules whose outputs are read.
    """

    def __init__(self, folder: Path, modules: tuple[str, ...]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.modules = folder, modules
        self._numbers, self._index = folder / "features.bin", folder / "texts.jsonl"
        self._rows: list[tuple[list[int], int, int, int]] = []  # tokens, begin, where its numbers begin, how many each has
        size = self._numbers.stat().st_size if self._numbers.exists() else 0
        whole = 0
        for line in self._index.read_bytes().splitlines(keepends=True) if self._index.exists() else ():
            if not line.endswith(b"\n"):
                break
            try:
                tokens, begin, start, width = json.loads(line)
                behind = _BYTES * (start + len(tokens) * width)
            except (ValueError, TypeError):
                raise ConfigError(f"features: {self._index} is damaged; delete {folder}") from None
            if behind > size:
                break
            self._rows.append((tokens, begin, start, width))
            whole += len(line)
        if self._index.exists():  # half a text, left by a kill, is dropped
            with self._index.open("rb+") as file:
                file.truncate(whole)
        self._held = len(self._rows)

    def __len__(self) -> int:
        return self._held

    def __getitem__(self, place: int) -> Thought:
        if place >= len(self):
            raise IndexError(place)
        tokens, begin, start, width = self._rows[place]
        numbers = np.fromfile(self._numbers, np.int16, len(tokens) * width, offset=_BYTES * start)
        features = torch.from_numpy(numbers).view(torch.bfloat16).view(len(tokens), width)
        return Thought(self.tokens(place), features, begin)

    def tokens(self, place: int) -> Tensor:
        """``[n]`` int64: a text; its hidden states stay on the disk."""
        return torch.tensor(self._rows[place][0])

    @property
    def nbytes(self) -> int:
        """What the hidden states take."""
        return _BYTES * self._end

    def positions(self, texts: int) -> int:
        """How many tokens the answers of so many texts have."""
        return sum(len(tokens) - begin for tokens, begin, _, _ in self._rows[:texts])

    @property
    def _end(self) -> int:
        return self._behind(len(self) - 1)

    def _behind(self, place: int) -> int:
        """Where the numbers of a text end; those of none, at -1, at 0."""
        if place < 0:
            return 0
        tokens, _, start, width = self._rows[place]
        return start + len(tokens) * width

    def fill(
        self,
        target: Target,
        texts: Iterable[TrainingText],
        most_bytes: int,
        on_text: Callable[[], None] = lambda: None,
        spare: int = 0,
    ) -> None:
        """Hold texts, in their order, until the budget is spent; those that are not there yet are read.

        What is there beyond the texts or the budget stays on the disk for who asks for more.

        Args:
            target: whose hidden states they are.
            texts: all of them, the first of which are those that the store has already.
            most_bytes: of hidden states.
            on_text: called for every text, old or new.
            spare: bytes that the disk must have left after that, for what is made of them.

        Raises:
            ConfigError: the disk has no room for the budget, or the store is of other texts.
        """
        known, self._held = len(self._rows), 0
        for place, text in enumerate(texts):
            if place < known:
                if self._rows[place][:2] != (list(text.tokens), text.begin):
                    folder = self._numbers.parent
                    raise ConfigError(f"features: {folder} holds what the target thought of other texts; delete it")
                if _BYTES * self._behind(place) > most_bytes:
                    return
            else:
                if place == known:
                    self.check_disk(most_bytes, spare)
                features = read_features(target, text.tokens, self.modules)
                if self.nbytes + _BYTES * features.numel() > most_bytes:
                    return
                self._add(text, features)
            self._held = place + 1
            on_text()

    def check_disk(self, most_bytes: int, spare: int = 0) -> None:
        """Refuse a budget that the disk has no room for; arguments and error as of :meth:`fill`."""
        free = shutil.disk_usage(self._numbers.parent).free - _SPARE - spare
        if most_bytes - self.nbytes > free:
            raise ConfigError(
                f"feature_bytes: {most_bytes:,} do not fit; {self._numbers.parent} has {max(0, free):,} bytes for them"
            )

    def _add(self, text: TrainingText, features: Tensor) -> None:
        start, width = self._end, features.shape[1]
        row = (list(text.tokens), text.begin, start, width)
        with full_disk_told(self._numbers, self._numbers):
            with self._numbers.open("rb+" if self._numbers.exists() else "wb") as file:
                file.seek(_BYTES * start)
                file.write(features.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
            with self._index.open("a", encoding="utf-8") as index:
                index.write(json.dumps(row) + "\n")
        self._rows.append(row)


@torch.inference_mode()
def read_features(target: Target, tokens: tuple[int, ...], modules: tuple[str, ...]) -> Tensor:
    """``[n, F]``: what the target thinks behind every token of a text."""
    return _read(target, torch.tensor(tokens, device=target.device), modules, last=1)[0]


def _read(target: Target, tokens: Tensor, modules: tuple[str, ...], last: int) -> tuple[Tensor, Tensor]:
    """The same of ``[n]`` int64 tokens, and ``[last, V]`` logits of the pass."""
    features, view = Features(modules), decoding_view(target.model)
    with features.of(view):
        logits = forward(view, tokens, KVCache(target.layers, tokens.shape[0], device=target.device), last)
    return features.read(), logits


@torch.inference_mode()
def check_readout(target: Target) -> None:
    """Make sure that a target's output layer turns its last hidden states into its logits, as heads are taught that way.

    Raises:
        UnsupportedModel: it does not; something else stands between the two.
    """
    # From the middle of the vocabulary: special tokens lie at its ends, on which half precision is far off.
    tokens = (target.vocabulary // 3 + 17 * torch.arange(_PROBE, device=target.device)) % target.vocabulary
    hidden, logits = _read(target, tokens, read_modules(target), last=_PROBE)
    if not close(Readout(target, None)(hidden), logits):
        raise UnsupportedModel(
            f"{target.architecture}: no head can be taught, as its logits are not what its output layer makes of its last "
            "hidden states"
        )


def think(target: Target, tokens: Sequence[int], begin: int, modules: tuple[str, ...]) -> Thought:
    """A text with what the target thinks of it, read now; ``begin`` is where its answer begins."""
    features = read_features(target, tuple(tokens), modules)
    return Thought(torch.tensor(tokens), features.to(torch.bfloat16).cpu(), begin)
