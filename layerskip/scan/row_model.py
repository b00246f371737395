"""How do many drafts run at once? One pass over rows that share nothing but the target's keys and values.

A row is one token of one draft. It sees the target's states of its own continuation before its draft began, and the states that
its own draft has written since; each row skips what its own mask skips. So drafts from every position of a text, and of
several masks, take one pass of the model per drafted token. The model is a twin of the target over the same tensors, run on
a :class:`~layerskip.models.cache.KVCache` as decoding is; its attention sub-layers are handed the mask of these rows, in which the
window or chunk of each layer is the one that the family's own mask functions gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from layerskip.mask import SkipMask
from layerskip.models.architecture import Architecture, Form, UnsupportedModel, architecture, hidden_states, returned
from layerskip.models.attention import attend_in_parts
from layerskip.models.bridge import Bridge, Bridges
from layerskip.models.cache import KVCache
from layerskip.models.draft_head import DraftHead
from layerskip.models.forward import forward
from layerskip.models.skip_view import twin


class RowModel:
    """A target whose passes run over independent rows.

    Args:
        model: the target's.

    Raises:
        UnsupportedModel: its sub-layers cannot be skipped, or its attention takes no mask by name.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        found = architecture(model)
        self.model = model
        self.layers = len(found.blocks)
        self.found = found
        self._twin = twin(model)
        self.additive = self._twin.config.get_text_config(decoder=True)._attn_implementation == "eager"
        self._keeps: dict[tuple[str, int], Tensor | bool] = {}
        self._masks: list[Tensor] = []
        self._spans: dict[tuple[str, int], list[tuple[Tensor | None, Bridge]]] = {}  # with the rows that they serve
        self._watched: tuple[str, int] | None = None
        self._seen: tuple[Tensor, Tensor] | None = None
        self._calls: dict[int, tuple[tuple[Any, ...], dict[str, Any], Tensor]] | None = None
        self._late: tuple[int, Tensor] | None = None
        self._until: int | None = None
        self._reached: Tensor | None = None
        self._gate(found)

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.model.device

    def _gate(self, found: Architecture) -> None:
        blocks = self._twin.get_submodule(found.path)
        for index, block in enumerate(found.blocks):
            layer = blocks.get_submodule(str(index))
            layer.forward = self._layer(layer.forward, index, block.form)
            for kind, names in (("attention", block.attention), ("mlp", block.mlp)):
                for name in names:
                    child, leads = layer.get_submodule(name), name == names[0]
                    child.forward = self._child(child.forward, kind, index, block.child_forms[name], leads)

    def _layer(self, original: Callable[..., Any], index: int, form: Form) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._until is not None and index >= self._until:
                if index == self._until:
                    self._reached = hidden_states(args, kwargs)
                return returned(hidden_states(args, kwargs), form)
            if self._late is not None and index < self._late[0]:
                return returned(hidden_states(args, kwargs), form)
            if self._late is not None and index == self._late[0]:
                args, kwargs = _handed(args, kwargs, self._late[1])
            if self._keeps["attention", index] is False and self._keeps["mlp", index] is False:
                hidden = hidden_states(args, kwargs)
                return returned(self._crossed(hidden, ("layers", index), hidden), form)
            output = original(*args, **kwargs)
            if ("layers", index) in self._spans:  # of some rows alone
                crossed = self._crossed(
                    hidden_states(args, kwargs), ("layers", index), output if form is None else output[0]
                )
                output = crossed if form is None else (crossed, *output[1:])
            if self._calls is not None:
                self._calls[index] = args, kwargs, output if form is None else output[0]
            return output

        return forward

    def _child(self, original: Callable[..., Any], kind: str, index: int, form: Form, leads: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            keep, hidden = self._keeps[kind, index], hidden_states(args, kwargs)
            if keep is False:
                output = returned(torch.zeros_like(hidden), form)
            else:
                if kind == "attention" and "attention_mask" in kwargs:
                    kwargs["attention_mask"] = self._masks[index]
                output = original(*args, **kwargs)
            given = output if form is None else output[0]
            if keep is not True and keep is not False:
                # where, not a product: what a skipped sub-layer would give may be infinite
                given = torch.where(keep, given, 0.0)
            if leads:
                given = self._crossed(hidden, (kind, index), given)
                if self._watched == (kind, index):
                    self._seen = hidden, given
            return given if form is None else (given, *output[1:])

        return forward

    def _crossed(self, hidden: Tensor, place: tuple[str, int], output: Tensor) -> Tensor:
        """An output with what the bridges of a place add to it, each to its own rows."""
        for rows, bridge in self._spans.get(place, ()):
            added = bridge(hidden)
            output = output + (added if rows is None else torch.where(rows, added, 0.0))
        return output

    def layers_alone(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, visible: Sequence[Tensor]
    ) -> tuple[list[Callable[[Tensor], Tensor]], list[Tensor]]:
        """Every layer as a function of the hidden states ``[1, R, H]`` of the same rows, and the whole model's own states.

        Args:
            tokens, positions, cache, visible: as for :meth:`run`; the functions work as long as the cache is as it is.

        Returns:
            one function per layer, which does what :meth:`prepare` last asked for; the states before the first layer, then
            behind each.
        """
        self._calls = {}
        try:
            self.run(tokens, positions, cache, visible, [SkipMask.none(self.layers)], torch.zeros_like(tokens))
            calls = [self._calls[index] for index in range(self.layers)]
        finally:
            self._calls = None
        blocks = self._twin.get_submodule(self.found.path)

        def alone(index: int) -> Callable[[Tensor], Tensor]:
            args, kwargs, _ = calls[index]
            layer, form = blocks.get_submodule(str(index)), self.found.blocks[index].form

            def function(hidden: Tensor) -> Tensor:
                places, names = _handed(args, kwargs, hidden)
                output: Any = layer(*places, **names)
                found: Tensor = output if form is None else output[0]
                return found

            return function

        first = hidden_states(*calls[0][:2])
        return [alone(index) for index in range(self.layers)], [first, *(output for _, _, output in calls)]

    def refusal(self, reason: str) -> UnsupportedModel:
        """The error that names the model."""
        return UnsupportedModel(f"{type(self.model).__name__}: cannot be scanned: {reason}")

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache,
        visible: Sequence[Tensor],
        masks: Sequence[SkipMask],
        of: Tensor,
        parts: Sequence[tuple[int, int]] = (),
        bridges: Sequence[Bridges | None] = (),
        late: tuple[int, Tensor] | None = None,
    ) -> Tensor:
        """One pass; writes the rows' keys and values behind ``cache.length``, which it leaves where it is.

        Args:
            tokens: ``[R]`` int64.
            positions: ``[R]`` int64: where each token stands in its own text.
            cache: what the rows may see, and they themselves behind it.
            visible: per layer ``[R, cache.length + R]`` bool; equal layers share one tensor.
            masks: what is skipped, each for at least one row.
            of: ``[R]`` int64: the mask of each row.
            parts: runs of rows that see few of the others' keys, as :func:`~layerskip.models.attention.attend_in_parts` takes them.
            bridges: of every mask; none where they are left out.
            late: a layer, and the hidden states ``[1, R, H]`` that it is handed; those before it are not computed, and
                write nothing.

        Returns:
            ``[R, V]`` logits.
        """
        self.prepare(visible, masks, of, parts, bridges)
        self._late = late
        try:
            return forward(self._twin, tokens, cache, last=tokens.shape[0], positions=positions)
        finally:
            self._late = None

    def states(self, layer: int, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """The hidden states ``[1, R, H]`` that a layer is handed in a pass; it sees and skips as :meth:`prepare` last set.

        The layer and those behind it compute and write nothing.

        Args:
            layer: its number.
            tokens, positions, cache: as for :meth:`run`.
        """
        self._until = layer
        try:
            forward(self._twin, tokens, cache, last=0, positions=positions)
        finally:
            self._until = None
        found, self._reached = self._reached, None
        assert found is not None
        return found

    def narrow(self, head: DraftHead) -> None:
        """Give the logits ``[R, v]`` of a draft head's tokens alone, from now on."""
        head.narrow(self._twin)

    def watch(self, kind: str, index: int) -> None:
        """Note what one sub-layer reads and gives from now on; :meth:`seen` tells."""
        self._watched, self._seen = (kind, index), None

    def seen(self) -> tuple[Tensor, Tensor]:
        """What the watched sub-layer last read, and what it or its bridge gave, ``[1, R, H]`` each."""
        assert self._seen is not None
        return self._seen

    def prepare(
        self,
        visible: Sequence[Tensor],
        masks: Sequence[SkipMask],
        of: Tensor,
        parts: Sequence[tuple[int, int]] = (),
        bridges: Sequence[Bridges | None] = (),
    ) -> None:
        """Set what the next passes see and skip; arguments are those of :meth:`run`."""
        dtype = self.model.dtype
        forms: dict[int, Tensor] = {}
        for mask in visible:
            if id(mask) not in forms:
                forms[id(mask)] = (_bias(mask, dtype) if self.additive else mask)[None, None]
        if parts and not self.additive and of.device.type == "cpu":  # elsewhere one large call is faster
            for form in forms.values():
                attend_in_parts(form, parts)
        self._masks = [forms[id(mask)] for mask in visible]
        for index in range(self.layers):
            for kind in ("attention", "mlp"):
                keeps = [not getattr(mask, kind)[index] for mask in masks]
                if all(keeps) or not any(keeps):
                    self._keeps[kind, index] = keeps[0]
                else:
                    self._keeps[kind, index] = torch.tensor(keeps, device=of.device)[of][None, :, None]
        self._spans = {}
        for number, own in enumerate(bridges):
            rows = None if len(masks) == 1 else (of == number)[None, :, None]
            for gap, bridge in () if own is None else own.parts():
                self._spans.setdefault((gap.kind, gap.first), []).append((rows, bridge))


def _handed(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A module's arguments with other hidden states among them."""
    own = hidden_states(args, kwargs)
    places = tuple(hidden if value is own else value for value in args)
    return places, {name: hidden if value is own else value for name, value in kwargs.items()}


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
