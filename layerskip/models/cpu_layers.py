"""Decoder layers on a CPU, all in one call for the few rows of a decoding step.

A step of a small model is hundreds of small operators: a norm is six, rotary positions are twelve. Here norms, and layers of
the usual form without what a mask skips, run through :mod:`layerskip.kernels.cpu`. No model code is copied and no family is
named. A module has the usual form if its ``forward`` uses no other names than that form does, and if a first result equals
that of its own ``forward`` up to rounding. Everything else runs as it is: other modules, many rows, batches, gradients and
other caches.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from layerskip.device.trial import nearly_equal
from layerskip.kernels.cpu import ACTIVATIONS, MOST_ROWS, DecoderLayer, DecoderStack, FewRowsWeight, normalise
from layerskip.models.architecture import is_skipped
from layerskip.models.attention import NAME
from layerskip.models.cache import KVCache
from layerskip.models.packing import few_rows_weight, packed_weight

Tree = TypeVar("Tree", bound=nn.Module)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NORMED_ROWS = 64 * MOST_ROWS  # those of queries are rows of heads
_SHOWN = 4  # times that a layer shows its result to layers that may follow


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NORM = _words("mean pow rsqrt weight")
_NORM_MAY_USE = _words("_norm dtype eps float float32 to torch type_as variance_epsilon")
_ATTENTION = _words("apply_rotary_pos_emb config head_dim k_proj layer_idx o_proj q_proj scaling update v_proj")
_ATTENTION_MAY_USE = _words(
    "ALL_ATTENTION_FUNCTIONS _attn_implementation attention_dropout contiguous eager_attention_forward get_interface "
    "getattr is_sliding k_norm q_norm reshape shape sliding_window training transpose view"
)
_MLP = _words("act_fn down_proj gate_proj up_proj")
_LAYER = _words("input_layernorm mlp post_attention_layernorm self_attn")
_LAYER_MAY_USE = _words("post_feedforward_layernorm pre_feedforward_layernorm")


def fuse_layers(tree: Tree) -> Tree:
    """Let the modules of a tree that have a usual form run in few calls, if its weights are packed for few rows."""
    if all(few_rows_weight(layer) is None for layer in tree.modules()):
        return tree
    module: Any
    for module in tree.modules():
        kind: Any = type(module)
        if "forward" in module.__dict__ or isinstance(module, (_Norm, _DecoderLayer)):  # a replaced forward may do more
            continue
        if _uses(module, _NORM, _NORM_MAY_USE) and (offset := _norm_offset(module)) is not None:
            module.__class__ = _fused(_Norm, kind)
            module.offset = offset
        elif _uses(module, _LAYER, _LAYER_MAY_USE):
            module.__class__ = _fused(_DecoderLayer, kind)
    for parent in tree.modules():
        if type(parent) is nn.ModuleList and any(isinstance(layer, _DecoderLayer) for layer in parent):
            parent.__class__ = _Layers
        order = _Order()
        for layer in parent.children():
            if isinstance(layer, _DecoderLayer):
                layer.state.order = order
    return tree


def has_layers(tree: nn.Module) -> bool:
    """Return whether layers of a tree may run in few calls, once a pass has shown that they have the usual form."""
    return any(map(is_whole_layer, tree.modules()))


def is_whole_layer(module: nn.Module) -> bool:
    """Return whether a module may run as one call; it passes its mask on to its attention."""
    return isinstance(module, _DecoderLayer)


class _Norm(nn.Module):
    """A root-mean-square norm.

    Attributes:
        own: the type of the module, whose ``forward`` computes everything else.
        offset: what is added to the weight, 0 or 1.
    """

    own: ClassVar[type[nn.Module]]
    offset: int

    def forward(self, hidden: Tensor) -> Any:
        scale = self.scale_for(hidden.shape[-1]) if _is_step(self, hidden, _NORMED_ROWS) else None
        return self.own.forward(self, hidden) if scale is None else normalise(hidden, scale, self.epsilon)

    @property
    def epsilon(self) -> float:
        """The number that is added to the mean of the squares."""
        return _epsilon(self)

    def scale_for(self, width: int) -> Tensor | None:
        """Return the factors ``[width]``; None where the weight is another one."""
        weight = self.weight
        if not isinstance(weight, Tensor) or weight.shape != (width,) or weight.dtype != torch.float32:
            return None
        return 1 + weight if self.offset else weight


def _norm_offset(norm: Any) -> int | None:
    """Return what a norm adds to its weight, 0 or 1; None if it computes something else."""
    weight = norm.weight
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not _is_plain(weight):
        return None
    with torch.no_grad():
        rows = torch.linspace(-2, 3, weight.numel(), dtype=weight.dtype, device=weight.device)[None]
        expected = type(norm).forward(norm, rows)
        scales = enumerate((weight, 1 + weight))
        return next((n for n, scale in scales if nearly_equal(normalise(rows, scale, _epsilon(norm)), expected)), None)


def _epsilon(norm: Any) -> float:
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def _activation(function: Any) -> int | None:
    """Return the index of an activation, which only all of its range tells from similar ones; None if it is another one."""
    grid = torch.linspace(-8, 8, 1601)
    own = function(grid)
    known = enumerate(ACTIVATIONS.values())
    return next((n for n, other in known if torch.allclose(own, other(grid), rtol=0, atol=1e-6)), None)


def _is_step(module: nn.Module, rows: Any, most: int) -> bool:
    """Return whether an input of a module is that of a decoding step: at most so many rows, without gradients."""
    return (
        isinstance(rows, Tensor)
        and rows.dtype == torch.float32
        and rows.device.type == "cpu"
        and 0 < rows.numel() <= most * rows.shape[-1]
        and not (module.training or torch.is_grad_enabled() or torch.compiler.is_compiling())
        and not torch.is_autocast_enabled("cpu")
    )


class _Parts:
    """The modules, parameters and packed weights within a module, to notice a change at the start of a text."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._hooks = [hooks for each in modules[1:] for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        self._fields = [vars(each) for each in modules[1:]]
        self._forwards = list(map(_forward, self._fields))
        self._children = [each._modules for each in modules if each._modules]
        self._children_before = list(map(dict, self._children))
        self._packed = [packed for each in modules if (packed := packed_weight(each)) is not None]
        self._copies = [packed.copy for packed in self._packed]
        owned = [(each._parameters, *item) for each in modules for item in each._parameters.items() if item[1] is not None]
        self._owners, self._names = [owner for owner, _, _ in owned], [name for _, name, _ in owned]
        self._parameters: list[Any] = [part for _, _, part in owned]
        self._values = self._state()

    def _state(self) -> tuple[list[int], list[int]]:
        """Return what changes with the values of the parameters."""
        return list(map(_version, self._parameters)), list(map(_address, self._parameters))

    def is_unchanged(self) -> bool:
        """Return whether all parts are the same and have the same values, no hooks and no other ``forward``."""
        return (
            not any(self._hooks)
            and all(map(operator.is_, map(_forward, self._fields), self._forwards))
            and all(map(operator.is_, map(_copy, self._packed), self._copies))
            and self._children == self._children_before
            and all(map(operator.is_, map(dict.get, self._owners, self._names), self._parameters))
            and self._state() == self._values
        )


_version, _copy, _address = operator.attrgetter("_version"), operator.attrgetter("copy"), Tensor.data_ptr


def _forward(fields: dict[str, Any]) -> Any:
    return fields.get("forward")


class _Inputs(NamedTuple):
    """What a layer is called with; the cache is only named, so that it is not kept."""

    hidden: Any
    mask: Any
    positions: Any
    cache: int

    @classmethod
    def of(cls, hidden: Any, arguments: Mapping[str, Any]) -> _Inputs:
        cache = id(arguments.get("past_key_values"))
        return cls(hidden, arguments.get("attention_mask"), arguments.get("position_embeddings"), cache)

    def are(self, other: _Inputs) -> bool:
        same = self.hidden is other.hidden and self.mask is other.mask and self.positions is other.positions
        return same and self.cache == other.cache


class _Layers(nn.ModuleList):
    """Layers of which a slice of all is no copy; models take one in every pass."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(index)


class _Order:
    """The order of a model's layers; ``last`` is a result that the next may have as its input, and a copy of its values."""

    last: tuple[_LayerState, _Inputs, Tensor] | None = None


class _LayerState:
    """A packed layer and the parts that it was made of, and its place among the layers; a copied module has a new one.

    Attributes:
        next: the layer that had the result of this one as its input.
        follows: whether this layer's input is the result of another; None before a pass has shown it.
        run: the layers that this one computes.
        ahead: the inputs that this layer will have, and its result, which the call of an earlier layer has computed.
        shown: how often the result was shown to the other layers.
    """

    parts: _Parts | None = None
    layer: DecoderLayer | None = None
    next: _DecoderLayer | None = None
    follows: bool | None = None
    run: _Run | None = None
    ahead: tuple[_Inputs, Tensor] | None = None
    shown = 0

    def __init__(self) -> None:
        self.order = _Order()

    @property
    def is_settled(self) -> bool:
        """Whether it is known which layer has this one's result as its input, if any."""
        return self.shown >= _SHOWN if self.next is None else self.next.state.follows is not None

    def __deepcopy__(self, memo: Any) -> _LayerState:
        return _LayerState()

    def __reduce__(self) -> Any:
        return _LayerState, ()


class _Run:
    """A layer and those that follow it, as they were when a text began; made again after hooks were added anywhere."""

    def __init__(self, states: Sequence[_LayerState], stack: DecoderStack, cache: KVCache) -> None:
        self.stack, self.followers, self._last = stack, states[1:], states[-1]
        self._cache, self._begin, self._hooks = weakref.ref(cache), cache.length, RemovableHandle.next_id

    def serves(self, cache: KVCache) -> bool:
        """Return whether a pass continues the text, and the layers still follow each other."""
        known = self._cache() is cache and self._hooks == RemovableHandle.next_id and cache.length >= self._begin
        return known and self._last.is_settled and all(state.follows for state in self.followers)


class _DecoderLayer(nn.Module):
    """A whole layer: attention and a gated MLP with a norm before each, and norms after them or none; one may be skipped.

    Layers whose input is the result of another are computed by the call of the first. Each of them returns its result if its
    inputs are those of this call, and is computed again otherwise.

    Attributes:
        own: the type of the module, whose ``forward`` computes everything else.
        is_right: whether a result was compared, and is right; None before.
    """

    own: ClassVar[type[nn.Module]]
    is_right: bool | None = None

    @property
    def state(self) -> _LayerState:
        state: _LayerState | None = self.__dict__.get("_state")
        if state is None:
            state = self.__dict__["_state"] = _LayerState()
        return state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return at once what an earlier layer has computed; the way to ``forward`` takes ten times as long."""
        state: _LayerState | None = self.__dict__.get("_state")
        if state is None or (ahead := state.ahead) is None or state.order.last is not None or not state.is_settled:
            return super().__call__(*args, **kwargs)
        called = _Inputs.of(args[0] if args else kwargs.get("hidden_states"), kwargs)
        own = self.__dict__
        if any(map(own.__getitem__, _HOOKS)) or "forward" in own or not called.are(ahead[0]):
            return super().__call__(*args, **kwargs)
        state.ahead = None
        return ahead[1]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, inputs = self.state, _Inputs.of(args[0] if args else kwargs.get("hidden_states"), kwargs)
        ahead, state.ahead = state.ahead, None
        last, state.order.last = state.order.last, None
        if state.follows is None and last is not None and self.is_right:
            before, expected, values = last
            state.follows = inputs.are(expected) and torch.equal(inputs.hidden, values)
            before.next = self if state.follows else before.next
        if ahead is not None and inputs.are(ahead[0]):
            output: Any = ahead[1]
        else:
            state.follows = False if ahead is not None else state.follows
            output = self._run_alone(*args, **kwargs)
        if not state.is_settled and self.is_right and isinstance(output, Tensor):
            state.shown += 1
            state.order.last = state, inputs._replace(hidden=output), output.clone()
        return output

    def _run_alone(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the packed layer, and those that follow it, if it has the usual form and this is a step."""
        rows: Any = args[0] if args else kwargs.get("hidden_states")
        usual = self.is_right is not False and len(args) < 2 and _is_step(self, rows, MOST_ROWS)
        parts = self._prepare(*args, **kwargs) if usual else None
        if parts is None:
            return self.own.forward(self, *args, **kwargs)
        if self.is_right:
            return self._compute(parts, *args, **kwargs)
        expected = self.own.forward(self, *args, **kwargs)
        # Zeros are the same in all forms, and at the first position all forms of rotary positions are.
        if isinstance(expected, Tensor) and bool(expected.any()) and bool(kwargs["position_embeddings"][1].any()):
            self.is_right = self._computes(expected, rows, parts, kwargs["past_key_values"])
            if not self.is_right:  # it has left wrong keys in the cache
                return self.own.forward(self, *args, **kwargs)
        return expected

    def _prepare(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_embeddings: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        if type(past_key_values) is not KVCache or hidden_states.dim() != 3 or hidden_states.shape[0] != 1:
            return None
        count, start = hidden_states.shape[1], past_key_values.length
        run = self._run(past_key_values, count)
        attention: Any = self.self_attn
        if run is None or hidden_states.shape[2] != attention.q_proj.in_features:
            return None
        if not _are_positions(position_embeddings, count, attention.head_dim):
            return None
        alone = attention_mask is None and count == 1
        if not alone and not _is_mask(attention_mask, count, start + count):
            return None
        return run, position_embeddings, start, attention_mask

    def _run(self, cache: KVCache, count: int) -> _Run | None:
        """Return this layer and those that follow it; None if this one has no room, or parts of another form."""
        state = self.state
        if state.run is not None and state.run.serves(cache):
            return state.run if cache.length + count <= cache.max_length else None
        state.run, own = None, self._prepare_own(cache, count)
        if own is None:
            return None
        layers, prepared = [self], [own]
        while (following := layers[-1].state.next) is not None and following.state.follows:
            between = layers[-1]._forward_hooks or following._forward_pre_hooks  # which may change values in place
            next_own = None if between else following._prepare_own(cache, count)
            if next_own is None or not following.is_right or next_own[0].shape != own[0].shape:
                break
            layers.append(following)
            prepared.append(next_own)
        packed, buffers = zip(*prepared, strict=True)
        state.run = _Run([layer.state for layer in layers], DecoderStack(packed, buffers), cache)
        return state.run

    def _prepare_own(self, cache: KVCache, count: int) -> tuple[DecoderLayer, tuple[Tensor, Tensor] | None] | None:
        """Return the packed layer and its keys and values, if it has attention; None without room or in another form."""
        attention: Any = self.self_attn
        layer = self._layer() if attention.config._attn_implementation == NAME else None
        if layer is None or not cache.buffers():  # before the first pass, none has buffers
            return None
        if not layer.has_attention:
            return layer, None
        buffers = cache.room(attention.layer_idx, count)
        heads = 1, attention.k_proj.out_features // attention.head_dim
        usual = buffers is not None and all(
            each.shape[:2] == heads and each.shape[3] == attention.head_dim and _is_plain(each) for each in buffers
        )
        return (layer, buffers) if usual else None

    def _layer(self) -> DecoderLayer | None:
        """Return the packed layer, as its parameters are now; None if a part has another form or hooks."""
        state = self.state
        if state.parts is None or not state.parts.is_unchanged():
            if state.parts is not None:  # other parts may have another form
                self.is_right = None
            state.layer = self._pack()
            state.parts = None if state.layer is None else _Parts(self)
        return state.layer

    def _pack(self) -> DecoderLayer | None:
        module: Any = self
        attention, mlp, norms = module.self_attn, module.mlp, self._norms()
        kept = [part for part in (attention, mlp) if not is_skipped(part)]
        if not _uses(attention, _ATTENTION, _ATTENTION_MAY_USE) or not _uses(mlp, _MLP):
            return None
        known = all(isinstance(norm, _Norm) for norm in norms if norm is not None)
        skipped = {id(part) for sublayer in (attention, mlp) if sublayer not in kept for part in sublayer.modules()}
        changed = any(_is_changed(part) for part in self.modules() if part is not self and id(part) not in skipped)
        if not known or changed or not all(_is_plain(part) and not part.is_inference() for part in self.parameters()):
            return None
        projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        weights = _few_rows_weights(projections)
        inner = _few_rows_weights((mlp.gate_proj, mlp.up_proj, mlp.down_proj), biased=False)
        activation = _activation(mlp.act_fn)
        if weights is None or inner is None or activation is None or not isinstance(attention.scaling, float):
            return None
        (query, key, value, output), (gate, up, down) = weights, inner
        hidden, width = query.inputs, attention.head_dim
        fit = (
            hidden == key.inputs == value.inputs == output.outputs == gate.inputs == up.inputs == down.outputs
            and query.outputs == output.inputs
            and key.outputs == value.outputs
            and gate.outputs == up.outputs == down.inputs
            and key.outputs % width == query.outputs % key.outputs == 0
        )
        sizes = [width, width, *[hidden] * 4]
        scales = [None if norm is None else norm.scale_for(size) for norm, size in zip(norms, sizes, strict=True)]
        if not fit or [scale is None for scale in scales] != [norm is None for norm in norms]:
            return None
        both = [None if scale is None else (scale, norm.epsilon) for norm, scale in zip(norms, scales, strict=True)]
        biases = [layer.bias for layer in projections]
        has = attention in kept, mlp in kept
        return DecoderLayer([*weights, *inner], biases, both, attention.scaling, width, activation, *has)

    def _norms(self) -> list[Any]:
        """Return the norms of queries and keys, and before and after attention and the MLP; None for one that is missing."""
        module: Any = self
        own = [getattr(module.self_attn, name, None) for name in ("q_norm", "k_norm")]
        of_attention, of_mlp = [*own, module.input_layernorm, None], [module.post_attention_layernorm, None]
        if hasattr(self, "pre_feedforward_layernorm"):
            of_attention[3] = module.post_attention_layernorm
            of_mlp = [module.pre_feedforward_layernorm, module.post_feedforward_layernorm]
        of_attention = [None] * 4 if is_skipped(module.self_attn) else of_attention
        return [*of_attention, *([None] * 2 if is_skipped(module.mlp) else of_mlp)]

    def _computes(self, expected: Tensor, hidden: Tensor, parts: Any, cache: KVCache) -> bool:
        """Compare what the packed layer adds to its input, and the keys and values that it writes, with those written."""
        _, positions, start, mask = parts
        own = self._prepare_own(cache, hidden.shape[1])
        assert own is not None
        layer, buffers = own
        written = [each[:, :, start : start + hidden.shape[1]] for each in buffers or ()]
        before = [each.clone() for each in written]
        (output,) = DecoderStack([layer], [buffers])(hidden, positions, start, mask)
        found, wanted = output - hidden, expected - hidden
        rounding = 1e-6 * float(hidden.abs().amax()) / max(float(wanted.abs().amax()), 1e-6)
        return nearly_equal(found, wanted, 1e-4 + rounding) and all(map(nearly_equal, written, before))

    def _compute(self, parts: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        run, positions, start, mask = parts
        outputs: tuple[Tensor, ...] = run.stack(hidden_states, positions, start, mask)
        cache = id(kwargs["past_key_values"])
        for state, before, output in zip(run.followers, outputs, outputs[1:], strict=False):
            state.ahead = _Inputs(before, mask, positions, cache), output
        return outputs[0]


def _is_mask(mask: Tensor | None, count: int, length: int) -> bool:
    """Return whether a mask says which positions each row sees."""
    if mask is None or mask.dtype != torch.bool or mask.device.type != "cpu":
        return False
    return mask.shape == (1, 1, count, length) and mask.stride(3) == 1


def _few_rows_weights(layers: Sequence[Any], biased: bool = True) -> list[FewRowsWeight] | None:
    """Return the weights of layers that are all packed for few rows; None where one is not, or has an unwanted bias."""
    weights = [
        weight for layer in layers if (weight := few_rows_weight(layer)) is not None and (biased or layer.bias is None)
    ]
    return weights if len(weights) == len(layers) else None


def _are_positions(parts: Any, count: int, width: int) -> bool:
    """Return whether position embeddings are a cosine and a sine of one text, for at most the width of a head."""
    if not (isinstance(parts, tuple) and len(parts) == 2 and parts[0].shape == parts[1].shape):
        return False
    return all(p.dtype == torch.float32 and p.shape[:-1] == (1, count) and p.shape[-1] <= width for p in parts)


def _is_changed(module: nn.Module | None) -> bool:
    """Return whether a module has hooks or another ``forward`` than its type's; None for a part that a model lacks."""
    return module is not None and bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a kernel can read a tensor."""
    usual = tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
    return usual and type(tensor) in (Tensor, nn.Parameter)


def _uses(module: Any, needed: frozenset[str], possible: frozenset[str] = frozenset()) -> bool:
    """Return whether the ``forward`` of a module uses all needed names, and others only as far as they are possible."""
    kind: Any = type(module)
    return needed <= _names(kind) <= needed | possible


@functools.cache
def _names(module: Any) -> frozenset[str]:
    """Return the names that the ``forward`` of a type uses, with those of the ``_norm`` that some norms call."""
    functions = [inspect.unwrap(getattr(module, name)) for name in ("forward", "_norm") if hasattr(module, name)]
    return frozenset(name for function in functions if hasattr(function, "__code__") for name in function.__code__.co_names)


@functools.cache
def _fused(form: Any, module: Any) -> type[nn.Module]:
    return type(module.__name__, (form, module), {"own": module, "__module__": module.__module__})
