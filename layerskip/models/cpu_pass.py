"""A whole pass of a causal language model over a few tokens on a CPU, if its layers run in few calls.

A model's own ``forward`` takes about a millisecond of Python, a sixth of a draft of few bits. Here, its modules embed the
tokens and their positions. One call computes the layers that see the same positions, and the last call also the norm after
them and the output layer. No model code is copied and no family is named. A model has the usual form if its ``forward``
uses no other names than that form does, and if first results equal those of its own ``forward`` bit by bit. Sliding windows,
which first texts do not fill, follow from these names and the configuration.
"""

from __future__ import annotations

import inspect
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
from layerskip.models.cpu_layers import factors_of_norm, is_step, names_of, stacks_of, uses
from layerskip.models.forward import body_of, receive
from layerskip.models.packing import few_rows_weight
from layerskip.models.positions import depends_on_positions_alone

_WINDOW = "sliding_attention"
_AHEAD = 128  # positions whose cosines and sines are computed at once
_BODY = "arange create_causal_mask embed_tokens get_seq_length layers norm rotary_emb"
_BODY_MAY_USE = (
    "BaseModelOutputWithPast DynamicCache ValueError config create_sliding_window_causal_mask device dict enumerate "
    "has_sliding_layers isinstance layer_types num_hidden_layers shape sliding_window torch unsqueeze "
    "_bidirectional_window_overlay bool copy set tensor use_bidirectional_attention"
)
_MODEL = "CausalLMOutputWithPast last_hidden_state lm_head model"
_MODEL_MAY_USE = (
    "attentions config hidden_states int isinstance loss_function past_key_values slice slice_logits_to_keep vocab_size "
    "final_logit_softcapping tanh torch"
)


class CpuPass:
    """The passes of a model of the usual form over a text, once its first passes have shown that layers run in one call.

    It does not refer to the model, which refers to it.

    Raises:
        ValueError: the model has another form.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body: Any = body_of(model)
        usual = uses(model, _MODEL, _MODEL_MAY_USE) and uses(body, _BODY, _BODY_MAY_USE)
        self._layers = _kept_layers(body)
        if not usual or not self._layers:
            raise ValueError(f"{type(model).__name__} has another form")
        kinds, config = _kinds(model, body), model.config.get_text_config(decoder=True)
        self._window = getattr(config, "sliding_window", None) or 0
        self._kinds = [kind for kind, layer in zip(kinds, body.layers, strict=True) if not is_skipped(layer)]
        # By kind of layer, the cosines and sines of a text from a position on, where they depend on each position alone.
        self._tables: dict[str, tuple[int, Tensor, Tensor]] = {}
        self._ahead = _AHEAD if depends_on_positions_alone(model) else 0
        self._rotary_by_kind = "layer_type" in inspect.signature(body.rotary_emb.forward).parameters
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
        stacks = stacks_of(self._layers, cache) if count <= MOST_ROWS and start + count <= cache.max_length else []
        if not stacks or (seen is not None and _WINDOW in self._kinds):
            return None
        body: Any = body_of(model)
        output: Any = model.get_output_embeddings()
        around = model, body, body.norm, body.rotary_emb, output
        replaced = (vars(module).get("forward") for module in (*around, *self._layers))
        if not all(map(self._is_harmless, replaced)) or self._has_hooks(stacks[0], around, body):
            return None
        hidden = body.embed_tokens(tokens[None])
        norm, weight = factors_of_norm(body.norm, hidden.shape[2]), few_rows_weight(output)
        if norm is None or weight is None or weight.inputs != hidden.shape[2] or output.bias is not None:
            return None
        if not all(is_step(module, hidden, MOST_ROWS) for module in (model, body, self._layers[0])):
            return None
        window = self._window if self._window < start + count else 0  # a shorter text is seen whole
        # By kind of layer, the window and the positions of a pass. Layers of one call have the same.
        ways = {kind: (window if kind == _WINDOW else 0, kind if self._rotary_by_kind else "") for kind in {*self._kinds}}
        windows, turns = map(set, zip(*ways.values(), strict=True))
        masks = {own: _mask(own, count, start, device) if seen is None else seen for own in windows}
        rotary = {kind: self._rotary(body, hidden, start, kind, positions) for kind in turns}
        place = 0
        for stack in stacks:
            (own, kind), *others = {ways[kind] for kind in self._kinds[place : place + len(stack.layers)]}
            if others:
                return None
            place += len(stack.layers)
            if stack is stacks[-1]:
                return stack.logits(hidden, rotary[kind], start, masks[own], norm, weight, last, only_largest)
            hidden = stack(hidden, rotary[kind], start, masks[own])[-1]
        return None

    def _rotary(self, body: Any, hidden: Tensor, start: int, kind: str, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the cosine and sine ``[1, n, rotated]`` for hidden states ``[1, n, H]`` in layers of a kind, if any."""
        kinds = [kind] if kind else []
        if positions is not None:
            return body.rotary_emb(hidden, positions[None], *kinds)  # type: ignore[no-any-return]
        count, (first, *table) = hidden.shape[1], self._tables.get(kind, (0,))
        if not table or not 0 <= start - first <= table[0].shape[1] - count:
            ahead = torch.arange(start, start + max(count, self._ahead), device=hidden.device)[None]
            first, table = start, body.rotary_emb(hidden, ahead, *kinds)
            if self._ahead:
                self._tables[kind] = first, *table
        cosine, sine = (part[:, start - first : start - first + count] for part in table)
        return cosine, sine

    def _has_hooks(self, stack: DecoderStack, around: Sequence[Any], body: Any) -> bool:
        """Return whether a hook wants to know of the passes of a text; its stack is another one after any hook was added."""
        if self._stack is None or self._stack() is not stack:
            hooks = [
                hook
                for module in (*around, *body.layers)
                for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            ]
            same = [*map(id, self._layers)] == [*map(id, _kept_layers(body))]
            self._stack, self._tables = weakref.ref(stack), {}
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
        found, screened = (fused(view, tokens[:count], cache, count, only_largest=largest) for largest in (False, True))
        expected = view(input_ids=tokens[None, :count], past_key_values=cache, use_cache=True).logits[0]
        if found is None or screened is None or not torch.equal(found[1], expected):
            return
        if not all(map(torch.equal, screened[1].max(-1), expected.max(-1))):
            return
    vars(view)["cpu_pass"] = fused


def _mask(window: int, count: int, start: int, device: torch.device) -> Tensor | None:
    """Return the positions ``[1, 1, n, start + n]`` bool that each token sees, all with 0; None for one that sees all."""
    if count == 1 and not window:
        return None
    seen = torch.ones(1, 1, count, start + count, dtype=torch.bool, device=device).tril_(start)
    return seen.triu_(start + 1 - window) if window else seen


def _kept_layers(body: Any) -> list[Any]:
    return [layer for layer in getattr(body, "layers", ()) if not is_skipped(layer)]


def _kinds(model: PreTrainedModel, body: Any) -> list[str]:
    """Return what each layer sees: all positions before it, or a window of them.

    Raises:
        ValueError: a layer sees something else, or logits are changed.
    """
    config: Any = model.config.get_text_config(decoder=True)
    kind: Any = type(body)
    names = names_of(kind)
    kinds = ["full_attention"] * len(body.layers)
    if "create_sliding_window_causal_mask" in names and getattr(config, "sliding_window", None) is not None:
        kinds = list(config.layer_types) if "layer_types" in names else [_WINDOW] * len(body.layers)
    changes = (getattr(config, name, None) for name in ("final_logit_softcapping", "use_bidirectional_attention"))
    if any(changes) or not {*kinds} <= {"full_attention", _WINDOW}:
        raise ValueError(f"{type(model).__name__} has layers of another kind")
    return kinds
