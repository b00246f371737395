"""Decoder layers compiled for captured passes, so that a pass launches few kernels.

``torch.compile`` fuses the some thirty kernels of a decoder layer. All layers of one kind share one compiled function, also
those of other views, so that a new skip mask compiles little.

For this, every layer has a second module tree over the same tensors. Its linear layers of one input, such as the projections
to queries, keys and values, are one product. Their weights become parts of one buffer, so that nothing is stored twice.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from layerskip.kernels.few_rows_linear import MAX_ROWS, few_rows_linear, has_kernel
from layerskip.models.cache import KVCache

_LARGE = 2**22  # values of a weight
_VARIANTS = 2**16  # compiled functions in one process: one for each kind of layer, shape and dtype
_OPTIONS: dict[str, Any] = {  # of the compiler; versions of it lack some
    "combo_kernels": True,  # independent kernels are launched as one
    "combo_kernel_peak_memory_pct_threshold": None,  # also if memory is needed for longer
    "emulate_precision_casts": True,  # rounds where the uncompiled layer does
    "score_fusion_memory_threshold": 1,  # kernels that share any input are launched as one
    "triton.cudagraphs": False,
    "triton.max_tiles": 1,  # kernels of several tiles are launched separately
}
COMPILE_MODES = ("auto", "off")
_EAGER_ONLY = "eager_only"

MaskOf = Callable[[Any], Any]
"""Converts the attention mask that a model gives to its layers."""

_log = logging.getLogger(__name__)
_modes: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_compiled: weakref.WeakKeyDictionary[PreTrainedModel, CompiledLayers | None] = weakref.WeakKeyDictionary()
_refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_troubled: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # by a failure that may have passed
_unfused: set[tuple[type[nn.Module], torch.Size]] = set()
_parallel_layers: weakref.WeakKeyDictionary[nn.Module, list[list[str]]] = weakref.WeakKeyDictionary()
_groups: Any = WeakIdKeyDictionary()  # a mark of the group for every weight that was laid out


def set_compiling(model: nn.Module, mode: str | None) -> None:
    """Set whether the layers of captured passes are compiled: ``auto``, on CUDA, or ``off``. None changes nothing."""
    if mode is not None:
        _modes[model] = mode


def compile_mode(model: nn.Module) -> str:
    """Return the mode that was set for a model, or ``auto``."""
    return _modes.get(model, "auto")


def eager_only(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a replaced forward pass that compiled layers leave out, because their masks are converted already."""
    setattr(forward, _EAGER_ONLY, True)
    return forward


def path_of_layers(model: nn.Module) -> str | None:
    """Return the dotted name of the list of a model's decoder layers; None if there is no such list."""
    if not isinstance(model, PreTrainedModel):
        return None
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return next((path for path, module in lists if len(module) == count), None)


def compiled_layers(model: nn.Module) -> CompiledLayers | None:
    """Return the compiled layers of a model; None where layers are not compiled, or cannot be."""
    if model in _refused or compile_mode(model) == "off" or not isinstance(model, PreTrainedModel):
        return None
    if not _on_gpu(next(model.parameters())):
        return None
    if model not in _compiled:
        path = path_of_layers(model)
        _compiled[model] = None if path is None else CompiledLayers(model, path)
    return _compiled[model]


def simplify_compiling(model: nn.Module, layers: CompiledLayers, reason: str, may_pass: bool = False) -> None:
    """Compile a model's layers with fewer fusions from now on, or where there are none not at all, and log why.

    A failure that ``may_pass`` changes nothing the first time.
    """
    if may_pass and model not in _troubled:
        _troubled.add(model)
        _log.warning("%s: its layers could not be compiled and are tried again: %s", type(model).__name__, reason)
        return
    if layers.fuses:
        layers.fuses = False
        _unfused.add(_kind(model))  # else every view of such a model would be tried
        _log.warning("%s: products of its layers cannot be fused with what surrounds them: %s", type(model).__name__, reason)
        return
    _refused.add(model)
    _log.warning("%s: its layers cannot be compiled and run as they are: %s", type(model).__name__, reason)


def prepare_compiling(model: nn.Module) -> None:
    """Lay a model's weights out as compiled layers read them, if it has these; before capturing, as this moves weights."""
    body: Any = getattr(model, "body", model)  # of a head
    if compiled_layers(body) is None:
        return
    with contextlib.suppress(Exception):  # models of any code; nothing is laid out then
        if body not in _parallel_layers:
            _parallel_layers[body] = []  # stays if the pass fails
            _parallel_layers[body] = _find_parallel_layers(body)
        for names in _parallel_layers[body]:
            layers: list[Any] = [body.get_submodule(name) for name in names]
            _join_rows([layer.weight for layer in layers])
            if layers[0].bias is not None:
                _join_rows([layer.bias for layer in layers])


@torch.inference_mode()
def _find_parallel_layers(model: PreTrainedModel) -> list[list[str]]:
    """Return the names of plain linear layers that read one input in a pass, group by group, and mark their weights."""
    calls: list[tuple[str, Tensor]] = []
    plain = [(name, module) for name, module in model.named_modules() if _is_plain(module)]
    with contextlib.ExitStack() as hooks:
        for name, module in plain:
            hooks.enter_context(module.register_forward_pre_hook(lambda _, args, name=name: calls.append((name, args[0]))))
        width = model.config.get_text_config(decoder=True).hidden_size
        model(inputs_embeds=torch.zeros(1, 2, width, dtype=model.dtype, device=model.device), use_cache=False)
    times = Counter(name for name, _ in calls)
    once = [(name, given) for name, given in calls if times[name] == 1]
    found = []
    for _, group in itertools.groupby(once, key=lambda call: (call[0].rpartition(".")[0], id(call[1]))):
        names = [name for name, _ in group]
        layers: list[Any] = [model.get_submodule(name) for name in names]
        kinds = {(layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
        if len(layers) > 1 and len(kinds) == 1 and not any(layer.weight in _groups for layer in layers):
            found.append(names)
            mark = object()
            for layer in layers:
                _groups[layer.weight] = mark
    return found


def _join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors of several rows as one tensor, of which they become parts if they are not yet."""
    if not _adjacent(parts):
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.cat([part.detach() for part in parts])
            for part, rows in zip(parts, torch.split(whole, [part.shape[0] for part in parts]), strict=True):
                part.data = rows
    first = parts[0].detach()
    return first.as_strided((sum(part.shape[0] for part in parts), *first.shape[1:]), first.stride())


def _adjacent(parts: Sequence[Tensor]) -> bool:
    ends = itertools.accumulate((part.nbytes for part in parts), initial=parts[0].data_ptr())
    storages = {part.untyped_storage().data_ptr() for part in parts}
    return len(storages) == 1 and all(part.data_ptr() == end for part, end in zip(parts, ends, strict=False))


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of plain weights that can be moved, and to which nothing is attached."""
    if type(module).forward is not nn.Linear.forward or "forward" in module.__dict__ or not isinstance(module, nn.Linear):
        return False
    weight = module.weight
    is_plain = type(weight) is nn.Parameter and type(weight.data) is Tensor
    is_movable = is_plain and weight.is_contiguous() and not weight.is_inference()
    return is_movable and not (module._forward_pre_hooks or module._forward_hooks)


class FusedLinear(nn.Module):
    """A linear layer in a compiled tree, or a group of parallel ones, whose products it computes together.

    A single row is multiplied by a small weight in a sum over the products, which the compiler fuses with what surrounds it.
    Every output then computes the row's own operators again, which takes longer than reading a large weight.
    """

    weight: Tensor
    bias: Tensor | None
    outputs: list[Tensor] | None = None

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.sizes: list[int] = [layer.weight.shape[0] for layer in layers]
        self.few_rows = has_kernel(layers[0].weight)
        self.register_buffer("weight", _join_rows([layer.weight for layer in layers]))
        self.register_buffer("bias", None if layers[0].bias is None else _join_rows([layer.bias for layer in layers]))

    def _compute(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all layers of the group."""
        rows = hidden.numel() // hidden.shape[-1]
        if self.few_rows and rows <= MAX_ROWS and (rows > 1 or self.weight.numel() >= _LARGE):
            output = few_rows_linear(hidden.contiguous(), self.weight)
            output = output if self.bias is None else output + self.bias
        elif rows != 1:
            output = linear(hidden, self.weight, self.bias)
        elif len(set(self.sizes)) > 1:
            output = self._sum(hidden, self.weight, self.bias)
        else:  # sums of one shape are fused with each other and with what follows
            weights = torch.split(self.weight, self.sizes)
            biases = [None] * len(weights) if self.bias is None else torch.split(self.bias, self.sizes)
            return tuple(self._sum(hidden, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        return torch.split(output, self.sizes, -1) if len(self.sizes) > 1 else (output,)

    @staticmethod
    def _sum(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = (hidden.reshape(-1).float() * weight.float()).sum(-1)
        output = output if bias is None else output + bias.float()
        return output.to(hidden.dtype).view(*hidden.shape[:-1], -1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output of the first layer, ``[..., out]``; :class:`_FollowingLinear` returns those of the others."""
        first, *others = self._compute(hidden)
        self.outputs = others or None
        return first


class _FollowingLinear(nn.Module):
    """A linear layer whose output the first of its parallel layers has computed; ``place`` is its own among the others."""

    def __init__(self, first: FusedLinear, place: int) -> None:
        super().__init__()
        self._first = (first,)  # in a tuple, which registers no sub-module
        self._place, self._is_last = place, place == len(first.sizes) - 2

    def forward(self, hidden: Tensor) -> Tensor:
        first = self._first[0]
        assert first.outputs is not None
        output = first.outputs[self._place]
        if self._is_last:
            first.outputs = None
        return output


def _fuse_parallel_layers(tree: nn.Module) -> None:
    """Replace the linear layers of a module tree, a second one over a model's tensors, by fused ones."""
    groups: dict[object, list[tuple[str, Any]]] = {}
    for name, layer in tree.named_modules():
        if _is_plain(layer):
            groups.setdefault(_groups.get(layer.weight, layer), []).append((name, layer))
    for marked in groups.values():
        together = sorted(marked, key=lambda part: part[1].weight.data_ptr())
        # Weights are not moved here, because other captured passes may read them.
        adjacent = _adjacent([layer.weight for _, layer in together])
        for group in [together] if adjacent else [[part] for part in together]:
            names, layers = zip(*group, strict=True)
            first = FusedLinear(layers)
            tree.set_submodule(names[0], first)
            for place, name in enumerate(names[1:]):
                tree.set_submodule(name, _FollowingLinear(first, place))


class CompiledLayers:
    """The compiled decoder layers, at ``path``, of a model or of a view of it.

    A layer whose own forward pass was replaced, as one that is skipped, runs as it is. So does every layer in a pass of
    another thread, which may share the view and has a cache of its own. With ``fuses``, products are fused with what
    surrounds them (:mod:`layerskip.kernels.product_fusion`).
    """

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        self._model, self._path = weakref.ref(model), path  # a view's layers may refer to the view, which must not be kept
        types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["" for _ in self._layers]
        self._first_of_type = [types.index(kind) for kind in types]
        self.fuses = _kind(model) not in _unfused
        self._trees: dict[int, nn.Module] = {}
        self._addresses: tuple[int, ...] = ()  # of the weights that the trees read
        self._lock, self._thread = threading.RLock(), 0  # of the thread whose passes are compiled

    @property
    def _layers(self) -> Any:
        model = self._model()
        assert model is not None
        return model.get_submodule(self._path)

    @contextlib.contextmanager
    def running(self, mask_of: MaskOf) -> Iterator[None]:
        """Run the layers compiled within the ``with`` block, with converted masks, for one thread at a time."""
        limits = torch._dynamo.config.patch(recompile_limit=_VARIANTS, accumulated_recompile_limit=_VARIANTS)
        with self._lock, limits:
            self._thread = threading.get_ident()
            layers, replaced = self._layers, []
            addresses = tuple(part.data_ptr() for part in (*layers.parameters(), *layers.buffers()))
            if addresses != self._addresses:  # weights have moved, or were replaced
                self._trees, self._addresses = {}, addresses
            for index, layer in enumerate(layers):
                inside = (part for part in layer.modules() if part is not layer)
                if "forward" not in layer.__dict__ and not any(p._forward_hooks or p._forward_pre_hooks for p in inside):
                    layer.forward = functools.partial(self._run, index, mask_of)
                    replaced.append(layer)
            try:
                yield
            finally:
                for layer in replaced:
                    del layer.__dict__["forward"]

    def _run(self, index: int, mask_of: MaskOf, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            layer = self._layers[index]
            return type(layer).forward(layer, hidden, *args, **kwargs)
        cache: KVCache | None = kwargs.get("past_key_values")
        if index not in self._trees:
            self._trees[index] = self._tree(index)
            _fuse_parallel_layers(self._trees[index])
        if cache is not None:
            kwargs["attention_mask"] = mask = mask_of(kwargs["attention_mask"])
            kwargs["past_key_values"] = buffers = cache.layer_buffers(index, hidden.shape[1])
            # Caches of all lengths share one compiled function; each took seconds in the middle of decoding.
            for part, dimension in ((mask, 3), (buffers.keys, 2), (buffers.values, 2)):
                if isinstance(part, Tensor):
                    torch._dynamo.maybe_mark_dynamic(part, dimension)
        return _compiled_run(self.fuses)(self._trees[index], hidden, args, kwargs)

    def _tree(self, index: int) -> nn.Module:
        """Return a second module tree over a layer's tensors."""
        layer: nn.Module = self._layers[index]
        parts = list(layer.modules())
        shared = [*layer.parameters(), *layer.buffers(), *(part.config for part in parts if hasattr(part, "config"))]
        # Modules without tensors may be given state from outside, such as a head's embeddings. Replaced forward passes may
        # refer to a whole model, which must not be copied.
        shared += [part for part in parts if not any(part.children()) and not part._parameters and not part._buffers]
        shared += [part.__dict__["forward"] for part in parts if "forward" in part.__dict__]
        tree = copy.deepcopy(layer, {id(thing): thing for thing in shared})
        tree._forward_hooks.clear()  # they run on the layer itself
        tree._forward_pre_hooks.clear()
        for part in tree.modules():
            if hasattr(part.__dict__.get("forward"), _EAGER_ONLY):
                del part.__dict__["forward"]
            if "layer_idx" in part.__dict__:  # compiled functions are valid for one index
                part.layer_idx = self._first_of_type[index]  # type: ignore[assignment]
        tree.__dict__.pop("forward", None)
        return tree


def _run(layer: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer(hidden, *args, **kwargs)


@functools.cache
def _compiled_run(fuses: bool) -> Callable[..., Any]:
    """Return the compiled call of a layer; made on first use, because importing the compiler takes seconds."""
    from torch._inductor import config

    options = {name: value for name, value in _OPTIONS.items() if name in config.get_config_copy()}
    if fuses:
        from layerskip.kernels.product_fusion import ProductFusion

        options["post_grad_custom_pre_pass"] = ProductFusion()
    return torch.compile(_run, fullgraph=True, dynamic=False, options=options)


def _kind(model: nn.Module) -> tuple[type[nn.Module], torch.Size]:
    """Return what a model has in common with its views: its class and the shape of its first weight."""
    return type(model), next(model.parameters()).shape


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"
