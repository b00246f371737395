"""The target as a model of independent rows: one pass of a scan runs the drafts of many positions and several plans.

A row is one token of one draft. It attends to the target's states of its own continuation before the draft, and to the
states of its own draft; it skips what its own plan skips. All rows of a pass read the same bits. The model is a second tree
of modules over the target's tensors and runs on a :class:`~layerskip.models.cache.KVCache`, as decoding does. Its attention
sub-layers receive the rows' attention mask, with the sliding window or chunk that the family's own mask functions give each
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from layerskip.draft_plan import DraftPlan
from layerskip.models.architecture import Form, UnsupportedModel, architecture, as_output, hidden_states
from layerskip.models.attention import attend_in_parts
from layerskip.models.forward import forward
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
        for index, block in enumerate(self.architecture.blocks):
            layer = self._model_copy.get_submodule(f"{self.architecture.path}.{index}")
            layer.forward = self._layer(layer.forward, index, block.form)
            for kind, names in (("attention", block.attention), ("mlp", block.mlp)):
                for name in names:
                    child = layer.get_submodule(name)
                    child.forward = self._sublayer(child.forward, kind, index, block.child_forms[name])

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
            plan_ids: ``[R]`` int64: the plan of each row.
            parts: runs of rows that attend to few of the others' keys, see
                :func:`~layerskip.models.attention.attend_in_parts`.
        """
        dtype = self.model.dtype
        converted: dict[int, Tensor] = {}
        for mask in visible:
            if id(mask) not in converted:
                converted[id(mask)] = (_bias(mask, dtype) if self.additive else mask)[None, None]
        if not self.additive and plan_ids.device.type == "cpu":  # elsewhere one large call is faster
            for mask in converted.values():
                attend_in_parts(mask, parts)
        self._masks = [converted[id(mask)] for mask in visible]
        if plans[0].bits != self._bits:
            read_bits(self._model_copy, self.architecture, plans[0])
            self._bits = plans[0].bits
        for index in range(self.layers):
            for kind in ("attention", "mlp"):
                kept = [not getattr(plan, kind)[index] for plan in plans]
                if all(kept) or not any(kept):
                    self._kept[kind, index] = kept[0]
                else:
                    self._kept[kind, index] = torch.tensor(kept, device=plan_ids.device)[plan_ids][None, :, None]

    def run(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Return the ``[R, V]`` logits of tokens ``[R]`` at ``positions`` ``[R]`` of their own texts, both int64.

        Writes the rows' keys and values after ``cache.length``, which stays as it is.
        """
        return forward(self._model_copy, tokens, cache, last=tokens.shape[0], positions=positions)

    def unsupported(self, reason: str) -> UnsupportedModel:
        """Return the error that the model cannot be scanned."""
        return UnsupportedModel(f"{type(self.model).__name__}: cannot be scanned: {reason}")


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
