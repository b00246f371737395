"""A whole pass of a causal language model over a few tokens on a CPU, if its layers run in one call.

A model's own ``forward`` takes about a millisecond of Python, a sixth of a draft of few bits. Here, its modules embed the
tokens and their positions, and one call computes the layers, the norm after them and the output layer. No model code is
copied and no family is named. A model has the usual form if its ``forward`` uses no other names than that form does, and
if first results equal those of its own ``forward`` bit by bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel

from layerskip.kernels.cpu import MOST_ROWS, DecoderStack
from layerskip.models.architecture import is_skipped
from layerskip.models.cache import KVCache
from layerskip.models.cpu_layers import factors_of_norm, is_step, run_of, uses
from layerskip.models.forward import body_of, receive
from layerskip.models.packing import few_rows_weight
from layerskip.models.positions import depends_on_positions_alone

_AHEAD = 128  # positions whose cosines and sines are computed at once
_BODY = "arange create_causal_mask embed_tokens get_seq_length layers norm rotary_emb"
_BODY_MAY_USE = (
    "BaseModelOutputWithPast DynamicCache ValueError config create_sliding_window_causal_mask device dict enumerate "
    "has_sliding_layers isinstance layer_types num_hidden_layers shape sliding_window torch unsqueeze"
)
_MODEL = "CausalLMOutputWithPast last_hidden_state lm_head model"
_MODEL_MAY_USE = (
    "attentions config hidden_states int isinstance loss_function past_key_values slice slice_logits_to_keep vocab_size"
)


class CpuPass:
    """The passes of a model of the usual form over a text, once its first passes have shown that layers run in one call.

    It does not refer to the model, which refers to it.

    Raises:
        ValueError: the model has another form.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body = body_of(model)
        usual = uses(model, _MODEL, _MODEL_MAY_USE) and uses(body, _BODY, _BODY_MAY_USE) and _sees_all(model)
        self._layers = _kept_layers(body)
        # The cosines and sines of a text from its position `_first` on, where they depend on each position alone.
        self._table: tuple[Tensor, Tensor] | None = None
        self._first, self._ahead = 0, _AHEAD if depends_on_positions_alone(model) else 0
        if not usual or not self._layers:
            raise ValueError(f"{type(model).__name__} has another form")
        self.harmless: list[Any] = [receive]  # hooks, and other ``forward`` of layers, that need not know of a pass
        self._stack: weakref.ref[DecoderStack] | None = None  # that of the last text
        self._is_hooked = False  # whether hooks want to know of its passes

    def __call__(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        cache: KVCache,
        last: int,
        positions: Tensor | None = None,
        seen: Tensor | None = None,
        only_largest: bool = False,
    ) -> tuple[Tensor, Tensor] | None:
        """Return the hidden states ``[n, H]`` that the output layer reads, and the last logits ``[last, V]``.

        None where the model's own ``forward`` must run: at the start of a text, over many tokens, or after a hook was added.

        Args:
            model: the one that it was made for, as it is now.
            tokens: ``[n]`` int64.
            positions: ``[n]`` int64; None for those that follow the cache.
            seen: ``[1, 1, n, length + n]`` bool, the positions that each token sees; None for all before it.
            only_largest: whether other logits than the largest of each row may be inexact.
        """
        count, start, device = tokens.shape[0], cache.length, tokens.device
        stack = run_of(self._layers, cache) if count <= MOST_ROWS and start + count <= cache.max_length else None
        if stack is None:
            return None
        body: Any = body_of(model)
        output: Any = model.get_output_embeddings()
        around = model, body, body.norm, body.rotary_emb, output
        replaced = (vars(module).get("forward") for module in (*around, *self._layers))
        if not all(map(self._is_harmless, replaced)) or self._has_hooks(stack, around, body):
            return None
        hidden = body.embed_tokens(tokens[None])
        norm, weight = factors_of_norm(body.norm, hidden.shape[2]), few_rows_weight(output)
        if norm is None or weight is None or weight.inputs != hidden.shape[2] or output.bias is not None:
            return None
        if not all(is_step(module, hidden, MOST_ROWS) for module in (model, body, self._layers[0])):
            return None
        if seen is None and count > 1:
            seen = torch.ones(1, 1, count, start + count, dtype=torch.bool, device=device).tril_(start)
        rotary = self._rotary(body, hidden, start) if positions is None else body.rotary_emb(hidden, positions[None])
        return stack.logits(hidden, rotary, start, seen, norm, weight, last, only_largest)

    def _rotary(self, body: Any, hidden: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the cosine and sine ``[1, n, rotated]`` of the positions of hidden states ``[1, n, H]`` from one on."""
        count, at = hidden.shape[1], start - self._first
        if self._table is None or not 0 <= at <= self._table[0].shape[1] - count:
            table = body.rotary_emb(hidden, torch.arange(start, start + max(count, self._ahead), device=hidden.device)[None])
            if not self._ahead:
                return table  # type: ignore[no-any-return]
            self._first, at, self._table = start, 0, table
        cosine, sine = self._table
        return cosine[:, at : at + count], sine[:, at : at + count]

    def _has_hooks(self, stack: DecoderStack, around: Sequence[Any], body: Any) -> bool:
        """Return whether a hook wants to know of the passes of a text; its stack is another one after any hook was added."""
        if self._stack is None or self._stack() is not stack:
            hooks = [
                hook
                for module in (*around, *body.layers)
                for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            ]
            same = [*map(id, self._layers)] == [*map(id, _kept_layers(body))]
            self._stack, self._table = weakref.ref(stack), None
            is_global: bool = _has_any_global_hook()  # type: ignore[no-untyped-call]
            self._is_hooked = not same or is_global or not all(map(self._is_harmless, hooks))
        return self._is_hooked

    def _is_harmless(self, function: Any) -> bool:
        return function is None or any(function is each for each in self.harmless)


def fuse_pass(view: PreTrainedModel, tokens: Tensor, cache: KVCache) -> None:
    """Let few tokens pass a view without its own ``forward`` from now on, if it has the usual form.

    Args:
        tokens: ``[2]`` int64, which follow a text that has shown how the layers run.
    """
    try:
        fused = CpuPass(view)
    except ValueError:
        return
    for count in (1, 2):
        found = fused(view, tokens[:count], cache, count)
        expected = view(input_ids=tokens[None, :count], past_key_values=cache, use_cache=True).logits[0]
        if found is None or not torch.equal(found[1], expected):
            return
        screened = fused(view, tokens[:count], cache, count, only_largest=True)
        if screened is None or not all(map(torch.equal, screened[1].max(-1), expected.max(-1))):
            return
    vars(view)["cpu_pass"] = fused


def _kept_layers(body: Any) -> list[Any]:
    return [layer for layer in getattr(body, "layers", ()) if not is_skipped(layer)]


def _sees_all(model: PreTrainedModel) -> bool:
    """Return whether every layer attends to all positions before."""
    config: Any = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return set(kinds) == {"full_attention"} and getattr(config, "sliding_window", None) is None
