"""Continuations with the target's states, laid out one after another in one cache for the passes of a scan.

The target reads every continuation once, in a pass that collects everything that drafts start from or attend to. The rows
of a later pass may come from several continuations (:mod:`layerskip.scan.row_model`). A row attends to its own continuation
up to the start of its draft, and to its own draft.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stopping import confidence
from layerskip.device.transfer import copy_to_device
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
from layerskip.scan.row_model import RowModel
from layerskip.texts.continuations import Continuation


@dataclass(frozen=True)
class TextStates:
    """The target's states of a continuation and its prompt.

    Args:
        tokens: ``[n]`` int64: prompt, continuation, and padding up to the requested length.
        cache: the target's keys and values of these tokens.
        visible: per layer which positions attend to which, ``[n, n]`` bool, or None for plain causal attention.
        confidence: ``[N]``: the target's probability of its most likely token at every token of the continuation.
        token_probs: ``[N]``: its probability of the token itself; empty for greedy decoding.
    """

    tokens: Tensor
    cache: KVCache
    visible: list[Tensor | None]
    confidence: NDArray[np.float64]
    token_probs: NDArray[np.float64]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors. Layers may share a mask, which counts once."""
        masks = {id(mask): mask for mask in self.visible if mask is not None}
        return self.cache.nbytes + self.tokens.nbytes + sum(mask.nbytes for mask in masks.values())


def run_target(rows: RowModel, tokens: Tensor, last: int) -> tuple[Tensor, KVCache, list[Tensor | None]]:
    """Run the target over a text.

    Args:
        last: number of final positions whose logits are returned.

    Returns:
        Their logits ``[last, V]``, all keys and values in a cache whose length is 0, and :attr:`TextStates.visible`.

    Raises:
        UnsupportedModel: an attention sub-layer takes no mask by name, or its mask differs between heads.
    """
    view = decoding_view(rows.model)
    blocks = view.get_submodule(rows.architecture.path)
    masks: dict[int, Tensor | None] = {}

    def record_mask(index: int, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        if "attention_mask" not in kwargs:
            raise rows.unsupported(f"the attention of layer {index} takes no attention_mask")
        masks[index] = kwargs["attention_mask"]

    hooks = [
        blocks.get_submodule(f"{index}.{name}").register_forward_pre_hook(partial(record_mask, index), with_kwargs=True)
        for index, block in enumerate(rows.architecture.blocks)
        for name in block.attention
    ]
    cache = KVCache(rows.layers, tokens.shape[0], device=tokens.device)
    try:
        logits = forward(view, tokens, cache, last=last)
    finally:
        for hook in hooks:
            hook.remove()
    different = {id(mask): mask for mask in masks.values()}
    converted = {key: None if mask is None else _visible(rows, mask, tokens.shape[0]) for key, mask in different.items()}
    visible = [converted[id(masks[index])] for index in range(rows.layers)]  # layers go on sharing masks
    return logits, cache, visible


def _visible(rows: RowModel, mask: Tensor, count: int) -> Tensor:
    """Return ``[n, n]`` bool from the model's own mask, which is bool or additive."""
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise rows.unsupported(f"its attention mask has the shape {tuple(mask.shape)}")
    square = mask[0, 0, :, :count]
    return square.clone() if square.dtype == torch.bool else square > torch.finfo(square.dtype).min / 2


Start = tuple[int, int]
"""Index of a continuation, and index of the token in it after which a draft starts."""


@dataclass(frozen=True)
class StartPack:
    """Starts that share a pass, and the part of a cache that their continuations take.

    Args:
        sizes: per continuation, the number of its positions that the rows may attend to.
        room: positions for drafts after the continuations.
    """

    rows: list[Start]
    sizes: dict[int, int]
    room: int

    @property
    def end(self) -> int:
        """Position at which the continuations end and drafts begin."""
        return sum(self.sizes.values())

    @functools.cached_property
    def offsets(self) -> dict[int, int]:
        """Position at which each continuation begins."""
        return dict(zip(self.sizes, itertools.accumulate(self.sizes.values(), initial=0), strict=False))


class TextBatch:
    """Continuations with the target's states.

    Args:
        vocabulary: V, the width of its logits.
        max_bytes: budget for the states. Continuations beyond it are left out, except the first. None for no limit.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: RowModel,
        vocabulary: int,
        continuations: Sequence[Continuation],
        sampling: Sampling,
        max_bytes: int | None = None,
    ) -> None:
        self.model, self.vocabulary, self.sampling = model, vocabulary, sampling
        self.texts: list[TextStates] = []
        for continuation in continuations:
            text = self._read(continuation)
            if self.texts and max_bytes is not None and text.nbytes + sum(one.nbytes for one in self.texts) > max_bytes:
                break
            self.texts.append(text)
        self.continuations = tuple(continuations[: len(self.texts)])
        self._cache: KVCache | None = None
        self._loaded: StartPack | None = None

    def position(self, start: Start) -> int:
        """Return the position of a start's token in its text, which is the number of tokens before it."""
        continuation, place = start
        return len(self.continuations[continuation].prompt) + place

    def tokens(self, starts: Sequence[Start]) -> Tensor:
        """Return ``[R]`` int64 on the device: the tokens at starts, the last token for starts past the end."""
        tokens = [self.continuations[p].tokens[min(place, len(self.continuations[p].tokens) - 1)] for p, place in starts]
        return copy_to_device(tokens, self.model.device)

    def agrees(self, start: Start, token: int) -> bool:
        """Return whether the token at a start is ``token``; False past the end of the continuation."""
        continuation, place = start
        tokens = self.continuations[continuation].tokens
        return place < len(tokens) and tokens[place] == token

    def token_prob(self, start: Start) -> float:
        """Return the target's probability of the token at a start, for sampled texts; 1.0 past the end."""
        continuation, place = start
        probs = self.texts[continuation].token_probs
        return float(probs[place]) if place < len(probs) else 1.0

    def _read(self, continuation: Continuation) -> TextStates:
        missing = continuation.max_new_tokens - len(continuation.tokens)
        tokens = copy_to_device(
            [*continuation.prompt, *continuation.tokens, *continuation.tokens[-1:] * missing], self.model.device
        )
        begin, end = len(continuation.prompt), len(continuation.prompt) + len(continuation.tokens)
        logits, cache, visible = run_target(self.model, tokens, tokens.shape[0] - begin + 1)
        logits = logits[: end - begin]
        token_probs = np.empty(0)
        if not self.sampling.greedy:
            seen = None
            if self.sampling.needs_seen:
                seen = torch.cat([self.seen(tokens[:place]) for place in range(begin, end)])
            probs = self.sampling.distribution(logits, seen).gather(1, tokens[begin:end, None])[:, 0]
            token_probs = probs.double().cpu().numpy()
        confidences = confidence(logits).double().cpu().numpy()
        return TextStates(tokens, cache, visible, confidences, token_probs)

    def pack(self, rows: list[Start], room: int) -> StartPack:
        """Pack starts with the continuations that they need and ``room`` positions for drafts."""
        used = sorted({continuation for continuation, _ in rows})
        return StartPack(rows, {p: len(self.continuations[p].prompt) + self.continuations[p].starts for p in used}, room)

    def load(self, pack: StartPack) -> KVCache:
        """Fill the batch's only cache with a pack's continuations, and set its length to their end."""
        if self._loaded is not pack:
            if self._cache is None or self._cache.max_length < pack.end + pack.room:
                self._cache = None  # freed before the next one is allocated
                self._cache = KVCache(self.model.layers, pack.end + pack.room, device=self.model.device)
            self._cache.copy_from([(self.texts[p].cache, size) for p, size in pack.sizes.items()])
            self._loaded = pack
        assert self._cache is not None
        self._cache.length = pack.end
        return self._cache

    def seen(self, tokens: Tensor) -> Tensor:
        """Return ``[1, V]`` bool: the vocabulary entries among the tokens."""
        seen = torch.zeros(1, self.vocabulary, dtype=torch.bool, device=tokens.device)
        seen[0, tokens] = True
        return seen

    def visible(
        self, pack: StartPack, live: list[Start], draft_ids: Tensor, passes: list[tuple[Tensor, int]], place: int
    ) -> tuple[list[Tensor], Tensor]:
        """Return the attention masks of a pass, per layer ``[R, keys]`` bool, and the rows' positions ``[R]``.

        Args:
            draft_ids: ``[R]`` int64: the drafts of the rows; a row attends to the rows of its own draft.
        """
        device = self.model.device
        starts = [self.position(start) for start in live]
        begin = torch.tensor(starts, device=device)
        positions = begin + place
        offsets = torch.tensor([pack.offsets[p] for p, _ in live], device=device)
        key = torch.arange(pack.end, device=device)
        drafted_ids = torch.cat([*(ids for ids, _ in passes), draft_ids])
        distance = torch.cat([torch.full_like(ids, at) for ids, at in [*passes, (draft_ids, place)]])
        before = (key >= offsets[:, None]) & (key < (offsets + begin)[:, None])
        causal = torch.cat((before, drafted_ids == draft_ids[:, None]), 1)

        def windowed(windows: dict[int, Tensor | None]) -> Tensor:
            """Return ``causal`` without the keys that a layer's window hides from a row at its position."""
            result = causal.clone()
            for row, (start, (p, _)) in enumerate(zip(starts, live, strict=True)):
                window, offset = windows[p], pack.offsets[p]
                if window is not None:
                    width = min(window.shape[1], pack.end - offset)
                    result[row, offset : offset + width] &= window[start + place, :width]
                    result[row, pack.end :] &= window[start + place, (start + distance).clamp_max(window.shape[1] - 1)]
            return result

        masks: dict[tuple[int, ...], Tensor] = {}
        by_layer = []
        for layer in range(self.model.layers):
            windows = {p: self.texts[p].visible[layer] for p in pack.offsets}
            kind = tuple(id(window) for window in windows.values())
            if kind not in masks:
                masks[kind] = windowed(windows) if any(window is not None for window in windows.values()) else causal
            by_layer.append(masks[kind])
        return by_layer, positions


def runs_of(rows: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return begin and end of every run of equal items, such as the rows of one continuation."""
    ends = list(itertools.accumulate(len(list(group)) for _, group in itertools.groupby(rows)))
    return list(itertools.pairwise([0, *ends]))
