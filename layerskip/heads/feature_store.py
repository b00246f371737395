"""A store of the target's hidden states of many texts, in a file that grows text by text up to a budget of bytes."""

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
from layerskip.device.trial import nearly_equal
from layerskip.files import report_full_disk
from layerskip.heads.eagle import read_modules
from layerskip.heads.readout import Readout
from layerskip.models.architecture import UnsupportedModel
from layerskip.models.cache import KVCache
from layerskip.models.forward import Features
from layerskip.models.prefill import run_prefill
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target
from layerskip.texts.training_texts import TrainingText

_BYTES = 2  # per element: bfloat16
_PROBE = 8  # tokens of the check of the output layer
_SPARE = 64 * 2**20  # bytes left free on the disk, in addition to what a training on the states needs


@dataclass(frozen=True)
class TextFeatures:
    """A text with the target's hidden states.

    Args:
        tokens: ``[n]`` int64.
        features: ``[n, F]`` bfloat16: the hidden states at each token.
        begin: index of the answer's first token.
    """

    tokens: Tensor
    features: Tensor
    begin: int


class FeatureStore:
    """Texts with their hidden states on disk.

    Args:
        folder: folder of the two files. Complete texts in existing files are kept.
        modules: names of the target's sub-modules whose outputs are stored.
    """

    def __init__(self, folder: Path, modules: tuple[str, ...]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.modules = folder, modules
        self._features, self._index = folder / "features.bin", folder / "texts.jsonl"
        self._rows: list[tuple[list[int], int, int, int]] = []  # tokens, begin, offset in elements, elements per token
        size = self._features.stat().st_size if self._features.exists() else 0
        complete = 0  # bytes of the index
        for line in self._index.read_bytes().splitlines(keepends=True) if self._index.exists() else ():
            if not line.endswith(b"\n"):
                break
            try:
                tokens, begin, start, width = json.loads(line)
                end = _BYTES * (start + len(tokens) * width)
            except (ValueError, TypeError):
                raise ConfigError(f"features: {self._index} is damaged; delete {folder}") from None
            if end > size:
                break
            self._rows.append((tokens, begin, start, width))
            complete += len(line)
        if self._index.exists():  # drops an incomplete text, left by a killed process
            with self._index.open("rb+") as file:
                file.truncate(complete)
        self._length = len(self._rows)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> TextFeatures:
        if place >= len(self):
            raise IndexError(place)
        tokens, begin, start, width = self._rows[place]
        elements = np.fromfile(self._features, np.int16, len(tokens) * width, offset=_BYTES * start)
        features = torch.from_numpy(elements).view(torch.bfloat16).view(len(tokens), width)
        return TextFeatures(self.tokens(place), features, begin)

    def tokens(self, place: int) -> Tensor:
        """Return a text's tokens, ``[n]`` int64, without reading its hidden states."""
        return torch.tensor(self._rows[place][0])

    @property
    def nbytes(self) -> int:
        """Bytes of the hidden states."""
        return _BYTES * self._end(len(self) - 1)

    def positions(self, texts: int) -> int:
        """Return the number of tokens in the answers of the first ``texts`` texts."""
        return sum(len(tokens) - begin for tokens, begin, _, _ in self._rows[:texts])

    def _end(self, place: int) -> int:
        """Return the offset in elements after a text; 0 for index -1."""
        if place < 0:
            return 0
        tokens, _, start, width = self._rows[place]
        return start + len(tokens) * width

    def fill(
        self,
        target: Target,
        texts: Iterable[TrainingText],
        max_bytes: int,
        on_text: Callable[[], None] = lambda: None,
        spare: int = 0,
    ) -> None:
        """Make the store hold texts, in order, up to the budget. Texts that it does not have yet are read.

        Stored texts beyond these or beyond the budget stay on the disk for later calls.

        Args:
            target: the model that reads the texts.
            texts: all texts; stored texts must be the first of them.
            max_bytes: budget for all hidden states.
            on_text: called after every stored text, read or found.
            spare: bytes that the disk must have left afterwards, for the files of the training.

        Raises:
            ConfigError: the disk has no room for the budget, or the store has other texts.
        """
        known, self._length = len(self._rows), 0
        for place, text in enumerate(texts):
            if place < known:
                if self._rows[place][:2] != (list(text.tokens), text.begin):
                    raise ConfigError(f"features: {self.folder} holds hidden states of other texts; delete it")
                if _BYTES * self._end(place) > max_bytes:
                    return
            else:
                if place == known:
                    self.check_disk(max_bytes, spare)
                features = read_features(target, text.tokens, self.modules)
                if self.nbytes + _BYTES * features.numel() > max_bytes:
                    return
                self._add(text, features)
            self._length = place + 1
            on_text()

    def check_disk(self, max_bytes: int, spare: int = 0) -> None:
        """Check that the disk has room for a budget; for arguments and error see :meth:`fill`."""
        free = shutil.disk_usage(self.folder).free - _SPARE - spare
        if max_bytes - self.nbytes > free:
            raise ConfigError(f"feature_bytes: {max_bytes:,} do not fit; {self.folder} has {max(0, free):,} bytes for them")

    def _add(self, text: TrainingText, features: Tensor) -> None:
        start, width = self._end(len(self) - 1), features.shape[1]
        row = (list(text.tokens), text.begin, start, width)
        with report_full_disk(self._features, self._features):
            with self._features.open("rb+" if self._features.exists() else "wb") as file:
                file.seek(_BYTES * start)
                file.write(features.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
            with self._index.open("a", encoding="utf-8") as index:
                index.write(json.dumps(row) + "\n")
        self._rows.append(row)


@torch.inference_mode()
def read_features(target: Target, tokens: tuple[int, ...], modules: tuple[str, ...]) -> Tensor:
    """Run the target over a text; return its hidden states at every token, ``[n, F]``."""
    return _read(target, torch.tensor(tokens, device=target.device), modules, last=1)[0]


def _read(target: Target, tokens: Tensor, modules: tuple[str, ...], last: int) -> tuple[Tensor, Tensor]:
    """Return the hidden states of tokens ``[n]`` int64, and the last logits ``[last, V]`` of the pass."""
    features, cache = Features(modules), KVCache(target.layers, tokens.shape[0], device=target.device)
    logits = run_prefill(decoding_view(target.model), tokens, cache, last, features)
    return features.read(), logits


@torch.inference_mode()
def check_readout(target: Target) -> None:
    """Raise :class:`UnsupportedModel` unless a target's logits are its output layer applied to its last hidden states."""
    # Tokens from the middle of the vocabulary: special tokens at its ends have large errors in half precision.
    tokens = (target.vocabulary // 3 + 17 * torch.arange(_PROBE, device=target.device)) % target.vocabulary
    hidden, logits = _read(target, tokens, read_modules(target), last=_PROBE)
    if not nearly_equal(Readout(target, None)(hidden), logits):
        raise UnsupportedModel(
            f"{target.architecture}: no head can be trained, as its logits are not its output layer applied to its last "
            "hidden states"
        )


def extract_features(target: Target, tokens: Sequence[int], begin: int, modules: tuple[str, ...]) -> TextFeatures:
    """Run the target over a text; ``begin`` is the index of the answer's first token.

    Args:
        target: the model to run.
        tokens: the tokens of the text.
        begin: index of the answer's first token.
        modules: names of the sub-modules whose outputs are kept.
    """
    features = read_features(target, tuple(tokens), modules)
    return TextFeatures(torch.tensor(tokens), features.to(torch.bfloat16).cpu(), begin)
