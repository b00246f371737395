"""Decoder layers on a CPU, all in one call for the few rows of a decoding step.

Norms, and layers of the usual form without what a mask skips, run through :mod:`layerskip.kernels.cpu`. No model code is
copied and no family is named. A module has the usual form if its ``forward`` uses no other names than that form does, and if
a first result equals that of its own ``forward`` up to rounding. Everything else runs as it is: other modules, many rows,
batches, gradients and other caches.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from layerskip.device.trial import nearly_equal
from layerskip.kernels.cpu import MOST_ROWS, ROUNDED, DecoderLayer, DecoderStack, normalise
from layerskip.kernels.few_rows_linear import GATES
from layerskip.models.architecture import is_skipped
from layerskip.models.attention import NAME
from layerskip.models.cache import KVCache
from layerskip.models.packing import few_rows_weight

Tree = TypeVar("Tree", bound=nn.Module)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NORMED_ROWS = 64 * MOST_ROWS  # those of queries are rows of heads
_NORM = "mean pow rsqrt weight"
_NORM_MAY_USE = "_norm dtype eps float float32 to torch type_as variance_epsilon"
_ATTENTION = "apply_rotary_pos_emb config head_dim k_proj layer_idx o_proj q_proj scaling update v_proj"
_ATTENTION_MAY_USE = (
    "ALL_ATTENTION_FUNCTIONS _attn_implementation attention_dropout contiguous eager_attention_forward get_interface "
    "getattr is_sliding k_norm q_norm reshape shape sliding_window training transpose view"
)
_MLP = "act_fn down_proj gate_proj up_proj"
_LAYER = "input_layernorm mlp post_attention_layernorm self_attn"
_LAYER_MAY_USE = "post_feedforward_layernorm pre_feedforward_layernorm"


def fuse_layers(tree: Tree) -> Tree:
    """Let the modules of a tree that have a usual form run in few calls, if its weights are packed for few rows."""
    if all(few_rows_weight(layer) is None for layer in tree.modules()):
        return tree
    module: Any
    for module in tree.modules():
        kind: Any = type(module)
        if "forward" in vars(module) or isinstance(module, (_Norm, _DecoderLayer)):  # a replaced forward may do more
            continue
        if uses(module, _NORM, _NORM_MAY_USE) and (terms := _terms_of_norm(module)) is not None:
            module.offset, module.epsilon = terms
            module.__class__ = _fused(_Norm, kind)
        elif uses(module, _LAYER, _LAYER_MAY_USE):
            module.state = _State()
            module.__class__ = _fused(_DecoderLayer, kind)
    for parent in tree.modules():
        layers = [layer for layer in parent.children() if isinstance(layer, _DecoderLayer)]
        for place, layer in enumerate(layers, 1):
            layer.state.after = layers[place:]
        if layers and type(parent) is nn.ModuleList:
            parent.__class__ = _Layers
    return tree


def is_whole_layer(module: nn.Module) -> bool:
    """Return whether a module may run as one call, once a pass has shown its form; its attention gets its mask."""
    return isinstance(module, _DecoderLayer)


def stacks_of(layers: Sequence[Any], cache: KVCache) -> list[DecoderStack]:
    """Return what computes layers in few calls, as a text has shown; nothing if that is unknown, or the text is another."""
    found, place = list[DecoderStack](), 0
    while place < len(layers):
        run = layers[place].state.run if isinstance(layers[place], _DecoderLayer) else None
        if run is None or not run.is_known() or not run.serves(cache):
            return []
        found.append(run.stack)
        place += len(run.stack.layers)
    return found


class RowStacks:
    """The layers of a tree over independent rows, each in one call, as decoding steps compute them bit by bit.

    Args:
        layers: all of them, as :func:`fuse_layers` left them; a few steps have shown their form.

    Raises:
        ValueError: a layer does not run in one call.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        if not all(isinstance(layer, _DecoderLayer) and layer.state.is_right and layer._layer() for layer in layers):
            raise ValueError("layers: one of them does not run in one call")
        self._layers: Any = layers

    def read(self, attention: Sequence[bool], mlp: Sequence[bool], cache: KVCache) -> None:
        """Take the weights as they are read now, the sub-layers that are skipped, and where keys and values go."""
        self._cache, self._stacks = cache, list[DecoderStack | None]()
        for layer, *skipped in zip(self._layers, attention, mlp, strict=True):
            packed = layer._layer()
            packed.has_attention, packed.has_mlp = (not each for each in skipped)
            buffers = cache.room(layer.self_attn.layer_idx, 0)
            self._stacks.append(None if all(skipped) else DecoderStack([packed], [buffers]))

    def run(self, index: int, hidden: Tensor, positions: Any, seen: Tensor) -> Tensor:
        """Return the hidden states ``[1, n, H]`` after a layer; arguments as those of a :class:`DecoderStack`."""
        stack = self._stacks[index]
        return hidden if stack is None else stack(hidden, positions, self._cache.length, seen)[0]


class _Norm(nn.Module):
    """A root-mean-square norm."""

    own: ClassVar[type[nn.Module]]  # whose forward computes everything else
    offset: int  # what is added to the weight, 0 or 1
    epsilon: float  # what is added to the mean of the squares

    def forward(self, hidden: Tensor) -> Any:
        factors = self.factors(hidden.shape[-1]) if is_step(self, hidden, _NORMED_ROWS) else None
        return self.own.forward(self, hidden) if factors is None else normalise(hidden, *factors)

    def factors(self, width: int) -> tuple[Tensor, float] | None:
        """Return the factors ``[width]`` and ``epsilon``; None where the weight is another one."""
        weight = self.weight
        if not isinstance(weight, Tensor) or weight.shape != (width,) or weight.dtype != torch.float32:
            return None
        return 1 + weight if self.offset else weight, self.epsilon


def factors_of_norm(norm: nn.Module, width: int) -> tuple[Tensor, float] | None:
    """Return the factors ``[width]`` and ``epsilon`` of a root-mean-square norm; None of another module."""
    return norm.factors(width) if isinstance(norm, _Norm) else None


def _terms_of_norm(norm: Any) -> tuple[int, float] | None:
    """Return what a norm adds to its weight, 0 or 1, and to the mean of the squares; None if it computes something else."""
    weight, epsilon = norm.weight, float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not _is_plain(weight):
        return None
    with torch.no_grad():
        rows = torch.linspace(-2, 3, weight.numel(), dtype=weight.dtype, device=weight.device)[None]
        expected = type(norm).forward(norm, rows)
        results = (normalise(rows, weight + offset, epsilon) for offset in (0, 1))
        return next(((offset, epsilon) for offset, found in enumerate(results) if nearly_equal(found, expected)), None)


def _activation(function: Any) -> int | None:
    """Return the index of an activation, which only all of its range tells from similar ones; None if it is another one."""
    grid = torch.linspace(-8, 8, 1601)
    own = function(grid)
    known = enumerate(GATES.values())
    return next((n for n, other in known if torch.allclose(own, other(grid), rtol=0, atol=1e-6)), None)


def is_step(module: nn.Module, rows: Any, most: int) -> bool:
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
        modules: list[Any] = list(module.modules())
        self._hooks = [hooks for each in modules[1:] for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        self._fields = [vars(each) for each in modules[1:]]
        self._tables: list[Any] = [table for each in modules for table in (each._modules, each._parameters) if table]
        self._packed = [vars(each) for each in modules if few_rows_weight(each) is not None]
        self._before = self._parts()
        self._parameters = [part for part in self._before if isinstance(part, Tensor)]
        self._values = self._state()

    def _parts(self) -> list[Any]:
        parts = [part for table in self._tables for part in table.values()]
        parts += [fields.get("forward") for fields in self._fields]
        return parts + [fields["packed"].copy for fields in self._packed]

    def _state(self) -> list[int]:
        """Return what changes with the values of the parameters."""
        return [number for part in self._parameters for number in (part._version, part.data_ptr())]

    def is_unchanged(self) -> bool:
        """Return whether all parts are the same and have the same values, no hooks and no other ``forward``."""
        parts = self._parts()
        same = len(parts) == len(self._before) and all(map(operator.is_, parts, self._before))
        return same and not any(self._hooks) and self._state() == self._values


class _Layers(nn.ModuleList):
    """Layers of which a slice of all is no copy; models take one in every pass."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(index)


_Inputs = tuple[Any, Any, Any, Any]
"""What a layer is called with: hidden states, mask, position embeddings, cache."""


def _inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Inputs:
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden, kwargs.get("attention_mask"), kwargs.get("position_embeddings"), kwargs.get("past_key_values")


class _State:
    """What is known of a layer. A copied layer has a new one."""

    is_right: bool | None = None  # whether a result of the packed layer was right; None before one was compared
    layer: DecoderLayer | None = None  # the packed layer, made of `parts`
    parts: _Parts | None = None
    after: Sequence[_DecoderLayer] = ()  # the layers that come after this one
    follows: bool | None = None  # whether its input is the result of the layer before; None before a pass has shown it
    run: _Run | None = None  # computes this layer and those that follow it
    # The inputs that it will have, with a reference to the cache, and its result, which the call of an earlier layer has
    # computed; with a copy of the hidden states while `follows` is None.
    ahead: tuple[tuple[Any, Any, Any, weakref.ref[KVCache]], Tensor, Tensor | None] | None = None

    def take(self, inputs: _Inputs) -> Tensor | None:
        """Return the result that was computed ahead; None if there is none, or it is that of other inputs."""
        if self.ahead is None:
            return None
        ((*expected, cache), output, values), self.ahead = self.ahead, None
        is_same = all(map(operator.is_, inputs, (*expected, cache())))
        self.follows = is_same and (values is None or torch.equal(inputs[0], values))
        return output if self.follows else None

    def __reduce__(self) -> Any:
        return _State, ()


class _Run:
    """A layer and those that follow it, as they were when a text began; made again after hooks were added anywhere."""

    def __init__(self, states: Sequence[_State], stack: DecoderStack, cache: KVCache) -> None:
        self.stack, self._followers = stack, states[1:]
        self._cache, self._begin, self._hooks = weakref.ref(cache), cache.length, RemovableHandle.next_id

    def serves(self, cache: KVCache) -> bool:
        """Return whether a pass continues the text, and no layer is known not to follow."""
        known = self._cache() is cache and self._hooks == RemovableHandle.next_id and cache.length >= self._begin
        return known and all(state.follows is not False for state in self._followers)

    def is_known(self) -> bool:
        """Return whether each of its layers is known to follow the one before."""
        return all(state.follows for state in self._followers)

    def compute(self, hidden: Tensor, mask: Tensor | None, positions: Any, cache: KVCache) -> Tensor:
        """Return the result of the first layer, and give the others theirs."""
        outputs = self.stack(hidden, positions, cache.length, mask).unbind()
        for state, before, output in zip(self._followers, outputs, outputs[1:], strict=False):
            state.ahead = (before, mask, positions, self._cache), output, None if state.follows else before.clone()
        return outputs[0]


class _DecoderLayer(nn.Module):
    """A whole layer: attention and a gated MLP with a norm before each, and norms after them or none; one may be skipped.

    Layers that follow it are computed by its call. Each of them returns its result if its inputs are those of this call, and
    is computed again otherwise.
    """

    own: ClassVar[type[nn.Module]]  # whose forward computes everything else
    state: _State

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return at once what an earlier layer has computed; the way to ``forward`` takes ten times as long."""
        fields = self.__dict__
        if self.state.ahead is not None and "forward" not in fields and not any(map(fields.__getitem__, _HOOKS)):
            output = self.state.take(_inputs(args, kwargs))
            if output is not None:
                return output
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, inputs = self.state, _inputs(args, kwargs)
        if (output := state.take(inputs)) is not None:
            return output
        run = None if state.is_right is False or len(args) > 1 else self._run(*inputs)
        if run is None:
            return self.own.forward(self, *args, **kwargs)
        if state.is_right:
            return run.compute(*inputs)
        expected = self.own.forward(self, *args, **kwargs)
        state.run = None  # after this pass, others may follow
        # Zeros are the same in all forms, and at the first position all forms of rotary positions are.
        if isinstance(expected, Tensor) and bool(expected.any()) and bool(inputs[2][1].any()):
            state.is_right = self._is_equal(run, expected, *inputs)
            if not state.is_right:  # it has left wrong keys in the cache
                return self.own.forward(self, *args, **kwargs)
        return expected

    def _run(self, hidden: Any, mask: Any, positions: Any, cache: Any) -> _Run | None:
        """Return what computes this layer and those that follow it; None where it has another form, or this is no step."""
        if type(cache) is not KVCache or not is_step(self, hidden, MOST_ROWS) or hidden.dim() != 3 or len(hidden) != 1:
            return None
        state, count, length = self.state, hidden.shape[1], cache.length + hidden.shape[1]
        if state.run is None or not state.run.serves(cache):
            state.run = self._make_run(cache, count)
        attention: Any = self.self_attn
        if state.run is None or length > cache.max_length or hidden.shape[2] != attention.q_proj.in_features:
            return None
        usual = _is_mask(mask, count, length) and _are_positions(positions, count, attention.head_dim)
        return state.run if usual else None

    def _make_run(self, cache: KVCache, count: int) -> _Run | None:
        own = self._prepare(cache, count)
        if own is None:
            return None
        layers, prepared = [self], [own]
        for following in self.state.after if self.state.is_right else ():
            if is_skipped(following):
                continue
            between = layers[-1]._forward_hooks or following._forward_pre_hooks  # which may change values in place
            next_own = None if between or following.state.follows is False else following._prepare(cache, count)
            if next_own is None or not following.state.is_right or next_own[0].shape != own[0].shape:
                break
            layers.append(following)
            prepared.append(next_own)
        return _Run([layer.state for layer in layers], DecoderStack(*zip(*prepared, strict=True)), cache)

    def _prepare(self, cache: KVCache, count: int) -> tuple[DecoderLayer, tuple[Tensor, Tensor] | None] | None:
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
                state.is_right = state.run = None
            state.layer = self._pack()
            state.parts = None if state.layer is None else _Parts(self)
        return state.layer

    def _pack(self) -> DecoderLayer | None:
        module: Any = self
        attention, mlp = module.self_attn, module.mlp
        if not uses(attention, _ATTENTION, _ATTENTION_MAY_USE) or not uses(mlp, _MLP):
            return None
        kept = [child for child in self.children() if not is_skipped(child)]
        parts = [part for child in kept for part in child.modules()]
        # By hooks, or by another ``forward`` than that of its type.
        changed = any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in parts)
        if changed or not all(_is_plain(part) and not part.is_inference() for part in self.parameters()):
            return None
        projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        gated = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        weights: list[Any] = [few_rows_weight(layer) for layer in (*projections, *gated)]
        activation = _activation(mlp.act_fn)
        if None in weights or any(layer.bias is not None for layer in gated) or activation is None:
            return None
        query, key, value, output, gate, up, down = weights
        hidden, width = query.inputs, attention.head_dim
        fit = (
            hidden == key.inputs == value.inputs == output.outputs == gate.inputs == up.inputs == down.outputs
            and query.outputs == output.inputs
            and key.outputs == value.outputs
            and gate.outputs == up.outputs == down.inputs
            and key.outputs % width == query.outputs % key.outputs == 0
            and isinstance(attention.scaling, float)
        )
        norms, sizes = self._norms(), [width] * 3 + [hidden] * 4
        factors = [factors_of_norm(norm, size) for norm, size in zip(norms, sizes, strict=True)]
        if not fit or factors.count(None) != norms.count(None):
            return None
        biases, has = [layer.bias for layer in projections], (attention in kept, mlp in kept)
        return DecoderLayer(weights, biases, factors, attention.scaling, width, activation, *has)

    def _norms(self) -> list[Any]:
        """Return the norms of a :class:`DecoderLayer`; None for one that is missing."""
        module: Any = self
        attention, after = module.self_attn, module.post_attention_layernorm
        norms = [getattr(attention, "q_norm", None), getattr(attention, "k_norm", None), None, module.input_layernorm]
        if hasattr(module, "pre_feedforward_layernorm"):
            norms += [after, module.pre_feedforward_layernorm, module.post_feedforward_layernorm]
        else:
            norms += [None, after, None]
        if is_skipped(attention):
            norms[:5] = [None] * 5
        if is_skipped(module.mlp):
            norms[5:] = [None] * 2
        return norms

    def _is_equal(self, run: _Run, expected: Tensor, hidden: Tensor, mask: Any, positions: Any, cache: KVCache) -> bool:
        """Compare what the packed layer adds to its input, and the keys and values that it writes, with those written."""
        attention: Any = self.self_attn
        count, has_attention = hidden.shape[1], run.stack.layers[0].has_attention
        buffers = cache.room(attention.layer_idx, count) if has_attention else None
        written = [each[:, :, cache.length : cache.length + count] for each in buffers or ()]
        before = [each.clone() for each in written]
        found, wanted = run.compute(hidden, mask, positions, cache) - hidden, expected - hidden
        rounding = 1e-6 * float(hidden.abs().amax()) / max(float(wanted.abs().amax()), 1e-6)
        # Of two values that differ in the last bit, a rounded one may be another code.
        tolerance = ROUNDED if run.stack.layers[0].rounds else 1e-4 + rounding
        return nearly_equal(found, wanted, tolerance) and all(map(nearly_equal, written, before))


def _is_mask(mask: Tensor | None, count: int, length: int) -> bool:
    """Return whether a mask says which positions each row sees; None says that a single row sees all."""
    if mask is None:
        return count == 1
    return mask.dtype == torch.bool and mask.is_cpu and mask.shape == (1, 1, count, length) and mask.stride(3) == 1


def _are_positions(parts: Any, count: int, width: int) -> bool:
    """Return whether position embeddings are a cosine and a sine of one text, for at most the width of a head."""
    if not (isinstance(parts, tuple) and len(parts) == 2 and parts[0].shape == parts[1].shape):
        return False
    return all(p.dtype == torch.float32 and p.shape[:-1] == (1, count) and p.shape[-1] <= width for p in parts)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a kernel can read a tensor."""
    usual = tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
    return usual and type(tensor) in (Tensor, nn.Parameter)


def uses(module: Any, needed: str, possible: str = "") -> bool:
    """Return whether the ``forward`` of a module uses all needed names, and others only as far as they are possible."""
    kind: Any = type(module)
    return set(needed.split()) <= names_of(kind) <= {*needed.split(), *possible.split()}


@functools.cache
def names_of(module: Any) -> frozenset[str]:
    """Return the names that the ``forward`` of a type uses, with those of the ``_norm`` that some norms call."""
    functions = [inspect.unwrap(getattr(module, name)) for name in ("forward", "_norm") if hasattr(module, name)]
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    for code in codes:
        codes += [each for each in code.co_consts if inspect.iscode(each)]  # comprehensions and functions within
    return frozenset(name for code in codes for name in code.co_names)


@functools.cache
def _fused(form: Any, module: Any) -> type[nn.Module]:
    return type(module.__name__, (form, module), {"own": module, "__module__": module.__module__})
