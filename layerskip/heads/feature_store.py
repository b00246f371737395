"""A store of the target's hidden states of many texts, which grows text by text up to a budget of bytes.

The hidden states are those that the target's output layer reads.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
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
    """A target's hidden states of texts on disk, one file each; a killed process loses the text being written.

    ``texts`` are those that :meth:`fill` found in the folder or read.
    """

    def __init__(self, folder: Path, target: Target) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.target = folder, target
        self.texts: list[TrainingText] = []

    def __getitem__(self, place: int) -> TextFeatures:
        tokens, features, begin = self._read(place, "tokens", "features", "begin")
        return TextFeatures(tokens, features, int(begin))

    def fill(self, texts: Iterable[TrainingText], max_bytes: int, on_text: Callable[[], None] = lambda: None) -> None:
        """Make the store hold texts, in order, up to a budget for all hidden states. Texts that it lacks are read.

        Stored texts must be the first ones; those beyond the budget stay on the disk for later calls. ``on_text`` is called
        after every text. A store of other texts, and a damaged one, are a :class:`ConfigError`.
        """
        self.texts, left = [], max_bytes
        for place, text in enumerate(texts):
            left -= _BYTES * self.target.hidden * len(text.tokens)
            if left < 0:
                return
            if self._file(place).exists():
                tokens, begin = self._read(place, "tokens", "begin")
                if TrainingText(tuple(tokens.tolist()), int(begin)) != text:
                    raise ConfigError(f"features: {self.folder} holds hidden states of other texts; delete it")
            else:
                new = extract_features(self.target, text.tokens, text.begin)
                parts = {"tokens": new.tokens, "features": new.features, "begin": torch.tensor(new.begin)}
                with atomic_write(self._file(place)) as partial:
                    save_file(parts, partial)
            self.texts.append(text)
            on_text()

    def check_disk(self, max_bytes: int) -> None:
        """Check that the disk has room for a budget of bytes; raises :class:`ConfigError` if not."""
        free = shutil.disk_usage(self.folder).free - _SPARE
        if max_bytes - sum(file.stat().st_size for file in self.folder.glob("*.safetensors")) > free:
            raise ConfigError(f"feature_bytes: {max_bytes:,} do not fit; {self.folder} has {max(0, free):,} bytes for them")

    def _file(self, place: int) -> Path:
        return self.folder / f"{place:06}.safetensors"

    def _read(self, place: int, *names: str) -> list[Tensor]:
        """Return some tensors of a text's file."""
        try:
            with safe_open(self._file(place), "pt") as file:
                return [file.get_tensor(name) for name in names]
        except (SafetensorError, ValueError) as error:
            raise ConfigError(f"features: {self._file(place)} is damaged; delete {self.folder}") from error


@torch.inference_mode()
def read_features(target: Target, tokens: Sequence[int]) -> Tensor:
    """Run the target over a text; return its hidden states at every token, ``[n, H]``."""
    return _read(target, torch.tensor(tokens, device=target.device), last=1)[0]


def extract_features(target: Target, tokens: Sequence[int], begin: int) -> TextFeatures:
    """Run the target over a text; ``begin`` is the index of the answer's first token."""
    return TextFeatures(torch.tensor(tokens), read_features(target, tokens).to(torch.bfloat16).cpu(), begin)


def _read(target: Target, tokens: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Return the hidden states of tokens ``[n]`` int64, and the last logits ``[last, V]`` of the pass."""
    features, cache = Features(), KVCache(target.layers, tokens.shape[0], device=target.device)
    logits = run_prefill(decoding_view(target.model), tokens, cache, last, features)
    return features.states, logits


@torch.inference_mode()
def check_readout(target: Target) -> None:
    """Raise :class:`UnsupportedModel` unless a target's logits are its output layer applied to its last hidden states."""
    # Tokens from the middle of the vocabulary: special tokens at its ends have large errors in half precision.
    tokens = (target.vocabulary // 3 + 17 * torch.arange(_PROBE, device=target.device)) % target.vocabulary
    hidden, logits = _read(target, tokens, last=_PROBE)
    if not nearly_equal(Readout(target, None)(hidden), logits):
        reason = "its logits are not its output layer applied to its last hidden states"
        raise UnsupportedModel(f"{target.architecture}: no head can be trained, as {reason}")
