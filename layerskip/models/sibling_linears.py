"""Linear layers that read one input, such as the projections to queries, keys and values, laid out as one matrix.

One product with the matrix launches one kernel in place of several. The weights become parts of one buffer, row after row,
so that nothing is stored twice; their values and shapes stay.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.weak import WeakIdKeyDictionary

from layerskip.kernels.few_rows_linear import MAX_ROWS, few_rows_linear, has_kernel

_LARGE = 2**22  # values of a weight


def lay_out_siblings(model: nn.Module, run: Callable[[], object]) -> None:
    """Lay the weights of a model's sibling layers out as matrices, unless they are.

    Args:
        model: the model.
        run: runs a pass, in which siblings are found. It is run once for a model.
    """
    if model not in _siblings:
        _siblings[model] = []  # stays if the pass fails
        _siblings[model] = _find_siblings(model, run)
    for names in _siblings[model]:
        layers: list[Any] = [model.get_submodule(name) for name in names]
        join_rows([layer.weight for layer in layers])
        if layers[0].bias is not None:
            join_rows([layer.bias for layer in layers])


def _find_siblings(model: nn.Module, run: Callable[[], object]) -> list[list[str]]:
    """Return the names of plain linear layers that read one input, group by group, and mark their weights."""
    calls: list[tuple[str, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, args, name=name: calls.append((name, args[0])))
        for name, module in model.named_modules()
        if _is_plain(module)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(name for name, _ in calls)
    once = ((name, given) for name, given in calls if times[name] == 1)
    found = []
    for _, group in itertools.groupby(once, key=lambda call: (call[0].rpartition(".")[0], id(call[1]))):
        names = [name for name, _ in group]
        layers: list[Any] = [model.get_submodule(name) for name in names]
        if len(layers) > 1 and _fit(layers):
            found.append(names)
            mark = object()
            for layer in layers:
                _groups[layer.weight] = mark
    return found


def join_rows(parts: Sequence[Tensor]) -> Tensor:
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
    """Return whether a module is a linear layer of plain weights that nothing has been attached to."""
    if type(module).forward is not nn.Linear.forward or "forward" in module.__dict__:
        return False
    attached = module._forward_pre_hooks or module._forward_hooks
    return isinstance(module, nn.Linear) and not attached and _is_movable(module)


def _is_movable(layer: nn.Linear) -> bool:
    weight = layer.weight
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor
    return plain and weight.is_contiguous() and not weight.is_inference()


def _fit(layers: Sequence[Any]) -> bool:
    kinds = {(layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    return len(kinds) == 1 and not any(layer.weight in _groups for layer in layers)


class FusedLinear(nn.Module):
    """A linear layer in a compiled tree. It computes the product of its siblings with its own.

    A single row is multiplied by a small weight in a sum over the products, which the compiler fuses with what surrounds it.
    Every output then computes the row's own operators again. With a large weight this takes longer than reading the weight,
    so the kernel for few rows is used.

    Args:
        layers: the linear layer, or those of a group.
        single_rows: whether to write out the product of a single row.
    """

    weight: Tensor
    bias: Tensor | None
    outputs: list[Tensor] | None = None

    def __init__(self, layers: Sequence[Any], single_rows: bool) -> None:
        super().__init__()
        self.sizes: list[int] = [layer.weight.shape[0] for layer in layers]
        self.single_rows, self.few_rows = single_rows, has_kernel(layers[0].weight)
        self.register_buffer("weight", join_rows([layer.weight for layer in layers]))
        self.register_buffer("bias", None if layers[0].bias is None else join_rows([layer.bias for layer in layers]))

    def compute(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all layers of the group."""
        rows = hidden.numel() // hidden.shape[-1]
        if self.few_rows and rows <= MAX_ROWS and (rows > 1 or self.weight.numel() >= _LARGE):
            output = few_rows_linear(hidden.contiguous(), self.weight)
            return self._split(output if self.bias is None else output + self.bias)
        if not (self.single_rows and rows == 1):
            return self._split(linear(hidden, self.weight, self.bias))
        if len(set(self.sizes)) > 1:
            return self._split(self._sum(hidden, self.weight, self.bias))
        # Sums of one shape are fused with each other and with what follows.
        weights = torch.split(self.weight, self.sizes)
        biases = [None] * len(weights) if self.bias is None else torch.split(self.bias, self.sizes)
        return tuple(self._sum(hidden, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def _split(self, output: Tensor) -> tuple[Tensor, ...]:
        return torch.split(output, self.sizes, -1) if len(self.sizes) > 1 else (output,)

    @staticmethod
    def _sum(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = (hidden.reshape(-1).float() * weight.float()).sum(-1)
        output = output if bias is None else output + bias.float()
        return output.to(hidden.dtype).view(*hidden.shape[:-1], -1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output of the first layer, ``[..., out]``; :class:`FollowingLinear` returns those of the others."""
        first, *others = self.compute(hidden)
        self.outputs = others or None
        return first


class FollowingLinear(nn.Module):
    """A linear layer whose output its first sibling has computed.

    Args:
        first: the first layer of the group.
        place: the place of this layer among the others.
    """

    def __init__(self, first: FusedLinear, place: int) -> None:
        super().__init__()
        self._first = (first,)  # in a tuple, which registers no sub-module
        self._place, self._is_last = place, place == len(first.sizes) - 2

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output of this layer, ``[..., out]``."""
        first = self._first[0]
        assert first.outputs is not None
        output = first.outputs[self._place]
        if self._is_last:
            first.outputs = None
        return output


def fuse_siblings(tree: nn.Module, single_rows: bool) -> None:
    """Replace the linear layers of a module tree, a second one over a model's tensors, by fused ones.

    Args:
        tree: the tree.
        single_rows: see :class:`FusedLinear`.
    """
    plain: list[tuple[str, Any]] = [(name, part) for name, part in tree.named_modules() if _is_plain(part)]
    groups: dict[object, list[tuple[str, Any]]] = {}
    for name, layer in plain:
        groups.setdefault(_groups.get(layer.weight, layer), []).append((name, layer))
    for marked in groups.values():
        together = sorted(marked, key=lambda part: part[1].weight.data_ptr())
        # Weights are not moved here, because other captured passes may read them.
        adjacent = _adjacent([layer.weight for _, layer in together])
        for group in [together] if adjacent else [[part] for part in together]:
            _fuse(tree, group, single_rows)


def _fuse(tree: nn.Module, group: Sequence[tuple[str, Any]], single_rows: bool) -> None:
    if len(group) > 1 or single_rows:
        names, layers = zip(*group, strict=True)
        first = FusedLinear(layers, single_rows)
        tree.set_submodule(names[0], first)
        for place, name in enumerate(names[1:]):
            tree.set_submodule(name, FollowingLinear(first, place))


_siblings: weakref.WeakKeyDictionary[nn.Module, list[list[str]]] = weakref.WeakKeyDictionary()
_groups: Any = WeakIdKeyDictionary()
"""A mark of the group for every weight that was laid out."""
