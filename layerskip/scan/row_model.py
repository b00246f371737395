"""The target as a model of independent rows: one pass of a scan runs the drafts of many positions and several masks.

A row is one token of one draft. It attends to the target's states of its own continuation before the draft, and to the
states of its own draft; it skips what its own mask skips. The model is a second tree of modules over the target's tensors
and runs on a :class:`~layerskip.models.cache.KVCache`, as decoding does. Its attention sub-layers receive the rows'
attention mask, with the sliding window or chunk that the family's own mask functions give each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from layerskip.mask import SkipMask
from layerskip.models.architecture import Form, UnsupportedModel, architecture, as_output, hidden_states
from layerskip.models.attention import attend_in_parts
from layerskip.models.cache import KVCache
from layerskip.models.draft_head import DraftHead
from layerskip.models.forward import forward
from layerskip.models.skip_view import Replacements, shared_copy
from layerskip.models.weights import input_device, is_split


class RowModel:
    """A target that runs passes over independent rows, prepared by :meth:`prepare`.

    Raises:
        UnsupportedModel: its sub-layers cannot be skipped, its attention takes no mask by name, or it is on several devices.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if is_split(model):
            raise UnsupportedModel("target.device: scans need a target on one device")
        self.model, self.architecture = model, architecture(model)
        self.layers = len(self.architecture.blocks)
        self._model_copy = shared_copy(model)
        self.additive = self._model_copy.config.get_text_config(decoder=True)._attn_implementation == "eager"
        # Set by prepare():
        self._kept: dict[tuple[str, int], Tensor | bool] = {}  # rows that run a sub-layer, or True or False for all
        self._masks: list[Tensor] = []  # attention masks by layer
        self._replacements: dict[tuple[str, int], list[tuple[Tensor | None, nn.Module]]] = {}  # with rows, None for all
        # Set for one pass:
        self._late: tuple[int, Tensor] | None = None  # the layer to begin at, and its input
        self._calls: dict[int, tuple[tuple[Any, ...], dict[str, Any], Tensor]] | None = None  # arguments and output by layer
        # Set by watch():
        self._watched: tuple[str, int] | None = None
        self._watched_states: tuple[Tensor, Tensor] | None = None
        self._replace_forwards()

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return input_device(self.model)

    def _replace_forwards(self) -> None:
        for index, block in enumerate(self.architecture.blocks):
            layer = self._model_copy.get_submodule(f"{self.architecture.path}.{index}")
            layer.forward = self._layer(layer.forward, index, block.form)
            for kind, names in (("attention", block.attention), ("mlp", block.mlp)):
                for name in names:
                    child, leads = layer.get_submodule(name), name == names[0]
                    child.forward = self._sublayer(child.forward, kind, index, block.child_forms[name], leads)

    def _layer(self, original: Callable[..., Any], index: int, form: Form) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._late is not None and index < self._late[0]:
                return as_output(hidden_states(args, kwargs), form)
            if self._late is not None and index == self._late[0]:
                args, kwargs = _with_hidden(args, kwargs, self._late[1])
            if self._kept["attention", index] is False and self._kept["mlp", index] is False:
                hidden = hidden_states(args, kwargs)
                return as_output(self._replaced(hidden, ("layers", index), hidden), form)
            output = original(*args, **kwargs)
            if ("layers", index) in self._replacements:  # of some of the rows only
                hidden = output if form is None else output[0]
                replaced = self._replaced(hidden_states(args, kwargs), ("layers", index), hidden)
                output = replaced if form is None else (replaced, *output[1:])
            if self._calls is not None:
                self._calls[index] = args, kwargs, output if form is None else output[0]
            return output

        return forward

    def _sublayer(self, original: Callable[..., Any], kind: str, index: int, form: Form, leads: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            kept, hidden = self._kept[kind, index], hidden_states(args, kwargs)
            if kept is False:
                output = as_output(torch.zeros_like(hidden), form)
            else:
                if kind == "attention" and "attention_mask" in kwargs:
                    kwargs["attention_mask"] = self._masks[index]
                output = original(*args, **kwargs)
            result = output if form is None else output[0]
            if isinstance(kept, Tensor):
                # torch.where instead of a product: the output of a skipped sub-layer may be infinite.
                result = torch.where(kept, result, 0.0)
            if leads:
                result = self._replaced(hidden, (kind, index), result)
                if self._watched == (kind, index):
                    self._watched_states = hidden, result
            return result if form is None else (result, *output[1:])

        return forward

    def _replaced(self, hidden: Tensor, place: tuple[str, int], output: Tensor) -> Tensor:
        """Add the outputs of the replacements at a place, each to its own rows."""
        for rows, module in self._replacements.get(place, ()):
            added = module(hidden)
            output = output + (added if rows is None else torch.where(rows, added, 0.0))
        return output

    def prepare(
        self,
        visible: Sequence[Tensor],
        masks: Sequence[SkipMask],
        mask_ids: Tensor,
        parts: Sequence[tuple[int, int]] = (),
        replacements: Sequence[Replacements | None] = (),
    ) -> None:
        """Set attention masks, skips and replacements of the next passes.

        Args:
            visible: per layer ``[R, cache.length + R]`` bool; equal layers share one tensor.
            mask_ids: ``[R]`` int64: the mask of each row.
            parts: runs of rows that attend to few of the others' keys, see
                :func:`~layerskip.models.attention.attend_in_parts`.
            replacements: those of every mask; empty for none.
        """
        dtype = self.model.dtype
        converted: dict[int, Tensor] = {}
        for mask in visible:
            if id(mask) not in converted:
                converted[id(mask)] = (_bias(mask, dtype) if self.additive else mask)[None, None]
        if parts and not self.additive and mask_ids.device.type == "cpu":  # elsewhere one large call is faster
            for mask in converted.values():
                attend_in_parts(mask, parts)
        self._masks = [converted[id(mask)] for mask in visible]
        for index in range(self.layers):
            for kind in ("attention", "mlp"):
                kept = [not getattr(mask, kind)[index] for mask in masks]
                if all(kept) or not any(kept):
                    self._kept[kind, index] = kept[0]
                else:
                    self._kept[kind, index] = torch.tensor(kept, device=mask_ids.device)[mask_ids][None, :, None]
        self._replacements = {}
        for number, own in enumerate(replacements):
            rows = None if len(masks) == 1 else (mask_ids == number)[None, :, None]
            for gap, module in () if own is None else own.items():
                self._replacements.setdefault((gap.kind, gap.first), []).append((rows, module))

    def run(self, tokens: Tensor, positions: Tensor, cache: Cache, late: tuple[int, Tensor] | None = None) -> Tensor:
        """Run one pass. It writes the rows' keys and values after ``cache.length``, which stays as it is.

        Args:
            tokens: ``[R]`` int64.
            positions: ``[R]`` int64: position of each token in its own text.
            cache: keys and values before the rows.
            late: a layer and its input ``[1, R, H]``. The layers before it compute and write nothing.

        Returns:
            ``[R, V]`` logits.
        """
        self._late = late
        try:
            return forward(self._model_copy, tokens, cache, last=tokens.shape[0], positions=positions)
        finally:
            self._late = None

    def layer_functions(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, visible: Sequence[Tensor]
    ) -> tuple[list[Callable[[Tensor], Tensor]], list[Tensor]]:
        """Return every layer as a function of the rows' hidden states ``[1, R, H]``, and the whole model's own states.

        For the arguments see :meth:`run` and :meth:`prepare`. The functions work while the cache is unchanged.

        Returns:
            One function per layer, which skips what :meth:`prepare` set last; the states before the first layer, then after
            each.
        """
        self.prepare(visible, [SkipMask.none(self.layers)], torch.zeros_like(tokens))
        self._calls = {}
        try:
            self.run(tokens, positions, cache)
            calls = [self._calls[index] for index in range(self.layers)]
        finally:
            self._calls = None

        def layer_function(index: int) -> Callable[[Tensor], Tensor]:
            args, kwargs, _ = calls[index]
            layer = self._model_copy.get_submodule(f"{self.architecture.path}.{index}")
            form = self.architecture.blocks[index].form

            def function(hidden: Tensor) -> Tensor:
                own_args, own_kwargs = _with_hidden(args, kwargs, hidden)
                output: Any = layer(*own_args, **own_kwargs)
                result: Tensor = output if form is None else output[0]
                return result

            return function

        first = hidden_states(*calls[0][:2])
        return [layer_function(index) for index in range(self.layers)], [first, *(output for _, _, output in calls)]

    def unsupported(self, reason: str) -> UnsupportedModel:
        """Return the error that the model cannot be scanned."""
        return UnsupportedModel(f"{type(self.model).__name__}: cannot be scanned: {reason}")

    def restrict(self, head: DraftHead) -> None:
        """Return logits ``[R, v]`` of a draft head's tokens alone from now on."""
        head.restrict(self._model_copy)

    def watch(self, kind: str, index: int) -> None:
        """Record input and output of one sub-layer from now on, for :meth:`watched_states`."""
        self._watched, self._watched_states = (kind, index), None

    def watched_states(self) -> tuple[Tensor, Tensor]:
        """Return the last input of the watched sub-layer, and its output or that of its replacement, ``[1, R, H]`` each."""
        assert self._watched_states is not None
        return self._watched_states


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the hidden states among a module's arguments."""
    own = hidden_states(args, kwargs)
    new_args = tuple(hidden if value is own else value for value in args)
    return new_args, {name: hidden if value is own else value for name, value in kwargs.items()}


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
