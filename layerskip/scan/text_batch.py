"""Continuations with the target's states, laid out one after another in one cache for the passes of a scan.

The target reads every continuation once, in a pass that collects everything that drafts start from or attend to. The rows
of a later pass may come from several continuations (:mod:`layerskip.scan.row_model`). A row attends to its own continuation
up to the start of its draft, and to its own draft.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from layerskip.decoding.sampling import Chooser, Sampling
from layerskip.decoding.stopping import confidence
from layerskip.device.transfer import copy_to_device
from layerskip.kernels.cpu import MOST_ROWS
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.prefill import run_prefill
from layerskip.models.skip_view import decoding_view
from layerskip.scan.row_model import RowModel
from layerskip.texts.continuations import Continuation


@dataclass(frozen=True)
class TextStates:
    """The target's states of a continuation and its prompt."""

    tokens: Tensor  # ``[n]`` int64: prompt, continuation, and padding up to the requested length
    cache: KVCache  # keys and values of these tokens
    visible: list[Tensor | None]  # per layer which positions attend to which, ``[n, n]`` bool; None for causal attention
    confidence: NDArray[np.float64]  # ``[N]``: the probability of the most likely token at each of the continuation
    token_probs: NDArray[np.float64]  # ``[N]``: that of the token itself; empty for greedy decoding

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors. Layers may share a mask, which counts once."""
        masks = {id(mask): mask for mask in self.visible if mask is not None}
        return self.cache.nbytes + self.tokens.nbytes + sum(mask.nbytes for mask in masks.values())


def run_target(rows: RowModel, tokens: Tensor, prompt: int) -> tuple[Tensor, KVCache, list[Tensor | None]]:
    """Return the logits ``[n - prompt + 1, V]`` from a prompt's end on, a cache of all keys and values, and masks.

    Where rows can be computed as decoding steps are, so is the text: its prompt by a prefill, the others few at a time.

    Raises:
        UnsupportedModel: an attention sub-layer takes no mask by name, or its mask differs between heads.
    """
    view, cache = decoding_view(rows.model), KVCache(rows.layers, tokens.shape[0], device=tokens.device)
    if (seen := rows.step_masks(tokens)) is not None:
        parts = [run_prefill(view, tokens[:prompt], cache)]
        for block in torch.split(tokens[prompt:], MOST_ROWS):
            parts.append(forward(view, block, cache, last=block.shape[0]))
            cache.length += block.shape[0]
        return torch.cat(parts), cache, _each_visible(rows, seen, tokens.shape[0])
    blocks = view.get_submodule(rows.architecture.path)
    masks: dict[int, Tensor | None] = {}

    def record_mask(index: int, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        if "attention_mask" not in kwargs:
            raise rows.unsupported(f"the attention of layer {index} takes no attention_mask")
        masks[index] = kwargs["attention_mask"]

    with contextlib.ExitStack() as hooks:
        for index, sublayers in enumerate(rows.architecture.blocks):
            for name in sublayers.attention:
                module = blocks.get_submodule(f"{index}.{name}")
                hooks.enter_context(module.register_forward_pre_hook(partial(record_mask, index), with_kwargs=True))
        logits = forward(view, tokens, cache, last=tokens.shape[0] - prompt + 1)
    return logits, cache, _each_visible(rows, [masks[index] for index in range(rows.layers)], tokens.shape[0])


def _each_visible(rows: RowModel, masks: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
    """Convert the masks of all layers; layers go on sharing them."""
    different = {id(mask): mask for mask in masks}
    converted = {key: None if mask is None else _visible(rows, mask, count) for key, mask in different.items()}
    return [converted[id(mask)] for mask in masks]


def _visible(rows: RowModel, mask: Tensor, count: int) -> Tensor:
    """Return ``[n, n]`` bool from the model's own mask, which is bool or additive."""
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise rows.unsupported(f"its attention mask has the shape {tuple(mask.shape)}")
    square = mask[0, 0, :, :count]
    return square.clone() if square.dtype == torch.bool else square > torch.finfo(square.dtype).min / 2


@dataclass(frozen=True, eq=False)
class StartPack:
    """Starts that share a pass, and the part of a cache that their continuations take."""

    starts: NDArray[np.int64]  # ``[n]``: their numbers in the batch
    sizes: list[int]  # per continuation, the number of its positions that the rows may attend to; 0 if no start is in it
    room: int  # positions for drafts after the continuations

    @property
    def end(self) -> int:
        """Position at which the continuations end and drafts begin."""
        return sum(self.sizes)


class TextBatch:
    """Continuations with the target's states, and every start of a draft in them, by number.

    Continuations whose states are beyond a budget of ``max_bytes`` are left out, except the first; None for no limit.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: RowModel,
        continuations: Sequence[Continuation],
        sampling: Sampling,
        max_bytes: int | None = None,
    ) -> None:
        self.model, self.sampling = model, sampling
        self.texts: list[TextStates] = []
        for continuation in continuations:
            text = self._read(continuation)
            if self.texts and max_bytes is not None and text.nbytes + sum(one.nbytes for one in self.texts) > max_bytes:
                break
            self.texts.append(text)
        self.continuations = tuple(continuations[: len(self.texts)])
        self._cache: KVCache | None = None
        self._loaded: StartPack | None = None
        # For each of the P continuations, its tokens on the device and their probabilities, which are 1.0 past its end.
        prompts = [len(continuation.prompt) for continuation in self.continuations]
        own = [text.tokens[prompt:] for text, prompt in zip(self.texts, prompts, strict=True)]
        self.tokens = pad_sequence(own, batch_first=True)
        self.token_probs = np.ones(self.tokens.shape)
        for row, text in zip(self.token_probs, self.texts, strict=True):
            row[: len(text.token_probs)] = text.token_probs
        # For each start, ``[S]``: its continuation, and the token in it after which drafts begin, any but the last.
        starts = [(p, start) for p, each in enumerate(self.continuations) for start in range(each.starts)]
        self.text, self.place = np.array(starts, np.int64).reshape(-1, 2).T
        self.begin = self.place + np.array(prompts)[self.text]  # the position of that token in its text
        self.limit = np.array([self.continuations[p].limit(start) for p, start in starts])  # the most tokens of a draft
        self.left = np.array([self.continuations[p].starts - start for p, start in starts])  # tokens of the text after it

    def tokens_at(self, starts: NDArray[np.int64], distance: int) -> Tensor:
        """Return ``[R]`` int64: the tokens at a distance from some starts."""
        return self.tokens[torch.from_numpy(self.text[starts]), torch.from_numpy(self.place[starts] + distance)]

    def _read(self, continuation: Continuation) -> TextStates:
        missing = continuation.max_new_tokens - len(continuation.tokens)
        tokens = copy_to_device(
            [*continuation.prompt, *continuation.tokens, *continuation.tokens[-1:] * missing], self.model.device
        )
        begin, end = len(continuation.prompt), len(continuation.prompt) + len(continuation.tokens)
        logits, cache, visible = run_target(self.model, tokens, begin)
        logits = logits[: end - begin]
        token_probs = np.empty(0)
        if not self.sampling.greedy:
            chooser = Chooser(self.sampling, logits.shape[1], tokens.device)
            chooser.observe(continuation.prompt)
            probs = chooser.distribution(logits, tokens[begin - 1 : end - 1]).gather(1, tokens[begin:end, None])[:, 0]
            token_probs = probs.double().cpu().numpy()
        confidences = confidence(logits).double().cpu().numpy()
        return TextStates(tokens, cache, visible, confidences, token_probs)

    def pack(self, starts: NDArray[np.int64], room: int) -> StartPack:
        """Pack starts with the continuations that they need and ``room`` positions for drafts."""
        used = set(self.text[starts].tolist())
        texts = enumerate(self.continuations)
        return StartPack(starts, [len(text.prompt) + text.starts if p in used else 0 for p, text in texts], room)

    def load(self, pack: StartPack) -> KVCache:
        """Fill the batch's only cache with a pack's continuations, and set its length to their end."""
        if self._loaded is not pack:
            if self._cache is None or self._cache.max_length < pack.end + pack.room:
                self._cache = None  # freed before the next one is allocated
                self._cache = KVCache(self.model.layers, pack.end + pack.room, device=self.model.device)
            self._cache.copy_from([(text.cache, size) for text, size in zip(self.texts, pack.sizes, strict=True) if size])
            self._loaded = pack
        assert self._cache is not None
        self._cache.length = pack.end
        return self._cache

    def visible(
        self, pack: StartPack, starts: NDArray[np.int64], passes: Sequence[NDArray[np.int64]]
    ) -> tuple[list[Tensor], Tensor]:
        """Return the attention masks of a pass, per layer ``[R, keys]`` bool, and the rows' positions ``[R]``.

        Args:
            starts: ``[R]``: the start of each row's draft.
            passes: the numbers of the drafts in each pass so far, this one included. A row attends to the rows of its own
                draft.
        """
        offsets = np.cumsum([0, *pack.sizes[:-1]])  # position at which each continuation begins
        text = self.text[starts]
        begin, offset, drafts, rows, distance = (
            torch.as_tensor(each, device=self.model.device)
            for each in (
                self.begin[starts],
                offsets[text],
                np.concatenate(passes),
                passes[-1],
                np.repeat(np.arange(len(passes)), [len(numbers) for numbers in passes]),
            )
        )
        positions = begin + len(passes) - 1
        key = torch.arange(pack.end, device=self.model.device)
        before = (key >= offset[:, None]) & (key < (offset + begin)[:, None])
        causal = torch.cat((before, drafts == rows[:, None]), 1)
        used = [p for p, size in enumerate(pack.sizes) if size]

        def windowed(windows: list[Tensor | None]) -> Tensor:
            """Return ``causal`` without the keys that a layer's windows hide from the rows at their positions."""
            result = causal.clone()
            for p, window in zip(used, windows, strict=True):
                if window is not None:
                    own = torch.as_tensor(np.flatnonzero(text == p), device=result.device)
                    row, first = positions[own, None], int(offsets[p])
                    keys = (begin[own, None] + distance).clamp_max(window.shape[1] - 1)
                    result[own, first : first + pack.sizes[p]] &= window[row[:, 0], : pack.sizes[p]]
                    result[own, pack.end :] &= window[row, keys]
            return result

        masks: dict[tuple[int, ...], Tensor] = {}
        by_layer = []
        for layer in range(self.model.layers):
            windows = [self.texts[p].visible[layer] for p in used]
            kind = tuple(map(id, windows))
            if kind not in masks:
                masks[kind] = windowed(windows) if any(window is not None for window in windows) else causal
            by_layer.append(masks[kind])
        return by_layer, positions
