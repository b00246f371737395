"""The target as a model of independent rows: one pass of a scan runs the drafts of many positions and several plans.

A row is one token of one draft. It attends to the target's states of its own continuation before the draft, and to the
states of its own draft; it skips what its own plan skips. All rows of a pass read the same bits. The model is a second tree
of modules over the target's tensors and runs on a :class:`~layerskip.models.cache.KVCache`, as decoding does. Its attention
sub-layers receive the rows' attention mask, with the sliding window or chunk that the family's own mask functions give each
layer.

Products of rounded activations turn the last bit of a sum into another code. So where decoding steps run in kernels that
compute every row as if it were alone, the rows of plans with fewer bits do so too, and get the results of decoding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.draft_plan import DraftPlan
from layerskip.kernels.cpu import MOST_ROWS
from layerskip.models.architecture import Architecture, Form, UnsupportedModel, architecture, as_output, hidden_states
from layerskip.models.attention import attend_in_parts
from layerskip.models.cache import KVCache
from layerskip.models.cpu_layers import RowStacks
from layerskip.models.forward import forward
from layerskip.models.packing import refuse_quantized
from layerskip.models.skip_view import read_bits, shared_copy
from layerskip.models.weights import input_device, is_split


class RowModel:
    """A target that runs passes over independent rows, prepared by :meth:`prepare`.

    Raises:
        UnsupportedModel: its sub-layers cannot be skipped, its attention takes no mask by name, or it is on several devices.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if is_split(model):
            raise UnsupportedModel("target.device: scans need a target on one device")
        self.model, self.architecture, self.device = model, architecture(model), input_device(model)
        self.layers = len(self.architecture.blocks)
        self._model_copy = shared_copy(model)
        self.additive = self._model_copy.config.get_text_config(decoder=True)._attn_implementation == "eager"
        # Set by prepare():
        self._bits = DraftPlan.none(self.layers).bits
        self._kept: dict[tuple[str, int], Tensor | bool] = {}  # rows that run a sub-layer, or True or False for all
        self._masks: list[Tensor] = []  # attention masks by layer
        self._by_plan: list[tuple[DraftPlan, int, int]] = []  # first and end row of each plan, where rows run as steps
        for index, block in enumerate(self.architecture.blocks):
            layer = self._model_copy.get_submodule(f"{self.architecture.path}.{index}")
            layer.forward = self._layer(layer.forward, index, block.form)
            for kind, names in (("attention", block.attention), ("mlp", block.mlp)):
                for name in names:
                    child = layer.get_submodule(name)
                    child.forward = self._sublayer(child.forward, kind, index, block.child_forms[name])
        self._steps: _Steps | None = None
        with contextlib.suppress(ValueError):  # of layers that do not run in one call
            self._steps = None if refuse_quantized(model) else _Steps(model, self.architecture)

    def step_masks(self, tokens: Tensor) -> list[Tensor | None] | None:
        """Return the mask of every layer over a text, without computing it; None where decoding runs in other kernels."""
        return None if self._steps is None else self._steps.masks_of(tokens)

    def _layer(self, original: Callable[..., Any], index: int, form: Form) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._kept["attention", index] is False and self._kept["mlp", index] is False:
                return as_output(hidden_states(args, kwargs), form)
            return original(*args, **kwargs)

        return forward

    def _sublayer(self, original: Callable[..., Any], kind: str, index: int, form: Form) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            kept = self._kept[kind, index]
            if kept is False:
                return as_output(torch.zeros_like(hidden_states(args, kwargs)), form)
            if kind == "attention" and "attention_mask" in kwargs:
                kwargs["attention_mask"] = self._masks[index]
            output = original(*args, **kwargs)
            if kept is True:
                return output
            # torch.where instead of a product: the output of a skipped sub-layer may be infinite.
            result = torch.where(kept, output if form is None else output[0], 0.0)
            return result if form is None else (result, *output[1:])

        return forward

    def prepare(
        self,
        visible: Sequence[Tensor],
        plans: Sequence[DraftPlan],
        plan_ids: Tensor,
        parts: Sequence[tuple[int, int]],
    ) -> None:
        """Set attention masks and skips of the next passes.

        Args:
            visible: per layer ``[R, cache.length + R]`` bool; equal layers share one tensor.
            plans: differ in what they skip only.
            plan_ids: ``[R]`` int64: the plan of each row; they rise.
            parts: runs of rows that attend to few of the others' keys, see
                :func:`~layerskip.models.attention.attend_in_parts`.
        """
        dtype = self.model.dtype
        converted: dict[int, Tensor] = {}
        for mask in visible:
            if id(mask) not in converted:
                converted[id(mask)] = (_bias(mask, dtype) if self.additive else mask)[None, None]
        in_steps = self._steps is not None and plans[0].formats
        if not self.additive and not in_steps and plan_ids.device.type == "cpu":  # elsewhere one large call is faster
            for mask in converted.values():
                attend_in_parts(mask, parts)
        self._masks = [converted[id(mask)] for mask in visible]
        self._by_plan = []
        if in_steps:
            ends = torch.searchsorted(plan_ids, torch.arange(len(plans)), right=True).tolist()
            parts_of_plans = zip(plans, [0, *ends], ends, strict=False)
            self._by_plan = [(plan, first, end) for plan, first, end in parts_of_plans if end > first]
            return
        if plans[0].bits != self._bits:
            read_bits(self.model, self._model_copy, self.architecture, plans[0])
            self._bits = plans[0].bits
        for index in range(self.layers):
            for kind in ("attention", "mlp"):
                kept = [not getattr(plan, kind)[index] for plan in plans]
                if all(kept) or not any(kept):
                    self._kept[kind, index] = kept[0]
                else:
                    self._kept[kind, index] = torch.tensor(kept, device=plan_ids.device)[plan_ids][None, :, None]

    def run(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Return the ``[R, V]`` logits of tokens ``[R]`` at ``positions`` ``[R]`` of their own texts, both int64.

        Writes the rows' keys and values after ``cache.length``, which stays as it is.
        """
        if self._by_plan and self._steps is not None:
            parts = [self._steps.run(*part, tokens, positions, cache, self._masks) for part in self._by_plan]
            return torch.cat(parts)
        return forward(self._model_copy, tokens, cache, last=tokens.shape[0], positions=positions)

    def unsupported(self, reason: str) -> UnsupportedModel:
        """Return the error that the model cannot be scanned."""
        return UnsupportedModel(f"{type(self.model).__name__}: cannot be scanned: {reason}")


class _Steps:
    """A tree of the model whose layers compute a few independent rows at once as decoding steps do.

    Raises:
        ValueError: a layer does not run in one call.
    """

    def __init__(self, model: PreTrainedModel, found: Architecture) -> None:
        self._model, self._view, self._found = model, shared_copy(model), found
        layers: list[nn.Module] = [self._view.get_submodule(f"{found.path}.{i}") for i in range(len(found.blocks))]
        self._stacks, self._bits = RowStacks(layers), DraftPlan.none(len(layers)).bits
        self._seen: list[Tensor] | None = None  # by layer, the positions that each row of a pass sees; None asks for masks
        self._masks: list[Tensor | None] = []
        for index, layer in enumerate(layers):
            layer.forward = partial(self._forward, index)

    def _forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_states(args, kwargs)
        if self._seen is None:
            self._masks.append(kwargs.get("attention_mask"))
            return hidden
        return self._stacks.run(index, hidden, kwargs["position_embeddings"], self._seen[index])

    def masks_of(self, tokens: Tensor) -> list[Tensor | None]:
        """Return the mask of every layer over a text of tokens ``[n]`` int64."""
        self._seen, self._masks = None, []
        forward(self._view, tokens, KVCache(len(self._found.blocks), tokens.shape[0]), last=1)
        return self._masks

    def run(
        self,
        plan: DraftPlan,
        first: int,
        end: int,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        masks: Sequence[Tensor],
    ) -> Tensor:
        """Return the ``[end - first, V]`` logits of the rows of a plan; other arguments as in :class:`RowModel`."""
        if plan.bits != self._bits:
            read_bits(self._model, self._view, self._found, plan)
            self._bits = plan.bits
        self._stacks.read(plan.attention, plan.mlp, cache)
        begin, results = cache.length, list[Tensor]()
        try:
            for at in range(first, end, MOST_ROWS):
                rows = slice(at, min(at + MOST_ROWS, end))
                cache.length = begin + at
                self._seen = [mask[:, :, rows, : begin + rows.stop] for mask in masks]
                results.append(forward(self._view, tokens[rows], cache, rows.stop - at, positions[rows]))
        finally:
            cache.length = begin
        return torch.cat(results)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
