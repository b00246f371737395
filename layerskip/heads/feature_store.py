"""A store of the target's hidden states of many texts, which grows text by text up to a budget of bytes.

The hidden states are those that the target's output layer reads.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from layerskip.config import ConfigError
from layerskip.device.trial import nearly_equal
from layerskip.files import atomic_write
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
_SPARE = 64 * 2**20  # bytes left free on the disk


@dataclass(frozen=True)
class TextFeatures:
    """A text's tokens ``[n]`` int64, the target's hidden states at each ``[n, H]`` bfloat16, and where its answer begins."""

    tokens: Tensor
    features: Tensor
    begin: int


class FeatureStore:
    """Texts with their hidden states on disk, one file each; a killed process loses the text being written.

    Args:
        folder: of the files. Existing texts are kept.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._texts: list[tuple[TrainingText, int]] = []  # with the bytes of their hidden states
        while self._file(len(self._texts)).exists():
            self._texts.append(self._read(len(self._texts)))
        self._length = len(self._texts)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> TextFeatures:
        if place >= len(self):
            raise IndexError(place)
        return TextFeatures(self.tokens(place), load_file(self._file(place))["features"], self._texts[place][0].begin)

    def tokens(self, place: int) -> Tensor:
        """Return a text's tokens, ``[n]`` int64, without reading its hidden states."""
        return torch.tensor(self._texts[place][0].tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the hidden states."""
        return sum(size for _, size in self._texts[: len(self)])

    def positions(self, texts: int) -> int:
        """Return the number of tokens in the answers of the first ``texts`` texts."""
        return sum(len(text.tokens) - text.begin for text, _ in self._texts[:texts])

    def _file(self, place: int) -> Path:
        return self.folder / f"{place:06}.safetensors"

    def _read(self, place: int) -> tuple[TrainingText, int]:
        try:
            with safe_open(self._file(place), "pt") as file:
                size = _BYTES * math.prod(file.get_slice("features").get_shape())
                return TrainingText(tuple(file.get_tensor("tokens").tolist()), int(file.get_tensor("begin"))), size
        except (SafetensorError, ValueError) as error:
            raise ConfigError(f"features: {self._file(place)} is damaged; delete {self.folder}") from error

    def fill(
        self,
        target: Target,
        texts: Iterable[TrainingText],
        max_bytes: int,
        on_text: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the store hold texts, in order, up to the budget. Texts that it does not have yet are read.

        Stored texts beyond these or beyond the budget stay on the disk for later calls.

        Args:
            texts: all texts; stored texts must be the first of them.
            max_bytes: budget for all hidden states.
            on_text: called after every stored text, read or found.

        Raises:
            ConfigError: the store has other texts.
        """
        known, self._length = len(self._texts), 0
        for place, text in enumerate(texts):
            if place < known:
                if self._texts[place][0] != text:
                    raise ConfigError(f"features: {self.folder} holds hidden states of other texts; delete it")
                if self.nbytes + self._texts[place][1] > max_bytes:
                    return
            else:
                features = read_features(target, text.tokens)
                size = _BYTES * features.numel()
                if self.nbytes + size > max_bytes:
                    return
                parts = {"tokens": torch.tensor(text.tokens), "begin": torch.tensor(text.begin)}
                with atomic_write(self._file(place)) as partial:
                    save_file(parts | {"features": features.to(torch.bfloat16).cpu()}, partial)
                self._texts.append((text, size))
            self._length = place + 1
            on_text()

    def check_disk(self, max_bytes: int) -> None:
        """Check that the disk has room for a budget of bytes; raises :class:`ConfigError` if not."""
        free = shutil.disk_usage(self.folder).free - _SPARE
        if max_bytes - self.nbytes > free:
            raise ConfigError(f"feature_bytes: {max_bytes:,} do not fit; {self.folder} has {max(0, free):,} bytes for them")


@torch.inference_mode()
def read_features(target: Target, tokens: tuple[int, ...]) -> Tensor:
    """Run the target over a text; return its hidden states at every token, ``[n, H]``."""
    return _read(Readout(target, None), target, torch.tensor(tokens, device=target.device), last=1)[0]


def _read(readout: Readout, target: Target, tokens: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Return the hidden states of tokens ``[n]`` int64, and the last logits ``[last, V]`` of the pass."""
    features, cache = Features(readout.modules), KVCache(target.layers, tokens.shape[0], device=target.device)
    logits = run_prefill(decoding_view(target.model), tokens, cache, last, features)
    return features.read(), logits


@torch.inference_mode()
def check_readout(target: Target) -> None:
    """Raise :class:`UnsupportedModel` unless a target's logits are its output layer applied to its last hidden states."""
    # Tokens from the middle of the vocabulary: special tokens at its ends have large errors in half precision.
    tokens = (target.vocabulary // 3 + 17 * torch.arange(_PROBE, device=target.device)) % target.vocabulary
    readout = Readout(target, None)
    hidden, logits = _read(readout, target, tokens, last=_PROBE)
    if not nearly_equal(readout(hidden), logits):
        raise UnsupportedModel(
            f"{target.architecture}: no head can be trained, as its logits are not its output layer applied to its last "
            "hidden states"
        )


def extract_features(target: Target, tokens: Sequence[int], begin: int) -> TextFeatures:
    """Run the target over a text; ``begin`` is the index of the answer's first token."""
    return TextFeatures(torch.tensor(tokens), read_features(target, tuple(tokens)).to(torch.bfloat16).cpu(), begin)
