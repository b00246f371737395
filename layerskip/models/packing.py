"""How does a CPU multiply by weights without laying them out anew in every pass?

oneDNN wants a matrix in blocks; torch hands it rows, which are laid out afresh in every call, and for the few rows of a step
of decoding that takes longer than the product. Here a weight is laid out once, for all trees of modules over the same
tensors, and multiplied by through the operator that torch's own compiler emits. In bfloat16 the results are those of
``torch.nn.functional.linear``, bit by bit, but where that rounds before it adds a bias; in float32 they are summed in
another order. A second copy of the weights is what it takes.
"""

from __future__ import annotations

import functools
import math
import platform
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.weak import WeakIdKeyDictionary

from layerskip.device.memory import total_bytes

Tree = TypeVar("Tree", bound=nn.Module)

_SHARE = 0.25  # of the machine's memory, that a model's layouts may take where nobody says
_ROWS = 4  # of the block that layouts are chosen for; those of a thousand lose nothing by it
_LEAST = {torch.float32: 2**17, torch.bfloat16: 2**14}  # values of a weight from where on this is faster
_SAMPLED = 8  # values that a layout is told by


def decide(model: nn.Module, pack: bool | None) -> None:
    """Say whether a model's weights shall be laid out; None leaves it to what was said before, or to :func:`packs`."""
    if pack is not None:
        _decided[model] = pack


def packs(model: nn.Module) -> bool:
    """Whether products by this model's weights are taken from a second layout of them.

    Unless it was decided: where the processor does so, and layouts take at most a quarter of the memory that there is.
    Small weights never are: calling the operator takes longer than their products.
    """
    if model in _decided:
        return _decided[model] and any(_linears(model))
    takes = sum(part.weight.nbytes for part in _linears(model))
    if takes:  # where none fits now, some may on another device
        _decided[model] = takes <= _SHARE * total_bytes()
    return _decided.get(model, False)


def packed_like(model: nn.Module, tree: Tree) -> Tree:
    """A tree of modules, whose linear layers multiply by laid out weights if that is done with the model's."""
    for part in _linears(tree) if packs(model) else ():
        if "forward" not in part.__dict__:  # which is somebody's who does more than multiply
            part.__class__ = _PackedLinear
            part.layout = _layouts.setdefault(part.weight, _Layout())
    return tree


def pack_matrices(tree: nn.Module) -> None:
    """Have :func:`multiply` lay out the matrices of a tree of modules when it first meets them."""
    for weight in tree.parameters():
        if weight.ndim == 2 and _fits(weight):
            _layouts.setdefault(weight, _Layout())


def refresh(tree: nn.Module) -> None:
    """Forget layouts of weights that were changed unseen, by way of their ``data``, as far as some of their values tell."""
    for part in tree.modules():
        if type(part) is _PackedLinear:
            part.layout.check(part.weight)


def multiply(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in]`` to ``[..., out]``, as :func:`torch.nn.functional.linear` has it; by a layout where there is one."""
    layout: _Layout | None = _layouts.get(weight)
    return linear(hidden, weight, bias) if layout is None else layout.multiply(hidden, weight, bias)


def lay_out(weight: Tensor) -> Tensor | None:
    """``[out, in]`` for :func:`multiply_by`; None where this processor gains nothing."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS) if _fits(weight) else None


def multiply_by(layout: Tensor, hidden: Tensor, bias: Tensor | None) -> Tensor:
    """``[..., in]`` to ``[..., out]``; no gradient goes through it."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, layout, bias, "none", [], "")
    return found


class _Layout:
    """That of a weight, made when it is first needed, and again where the weight was changed since."""

    def __init__(self) -> None:
        self._of: tuple[int, int] | None = None
        self._values: list[float] = []
        self._made: Tensor | None = None

    def multiply(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
        if learns or hidden.dtype != weight.dtype or not hidden.numel() or weight.is_inference():
            return linear(hidden, weight, bias)
        state = weight._version, weight.data_ptr()
        if state != self._of:
            self._made, self._of, self._values = lay_out(weight), state, _values(weight)
        if self._made is None or torch.is_autocast_enabled("cpu"):
            return linear(hidden, weight, bias)
        return multiply_by(self._made, hidden, bias)

    def check(self, weight: Tensor) -> None:
        """Forget it where the weight is elsewhere, or its values are others."""
        if self._of is not None and (weight.device.type != "cpu" or self._values != _values(weight)):
            self._of = self._made = None

    def __deepcopy__(self, memo: Any) -> _Layout:
        return _Layout()  # that of a copy

    def __reduce__(self) -> Any:
        return _Layout, ()


class _PackedLinear(nn.Linear):
    """A linear layer that multiplies by a layout of its weight."""

    layout: _Layout

    def forward(self, input: Tensor) -> Tensor:
        return self.layout.multiply(input, self.weight, self.bias)


def _values(weight: Tensor) -> list[float]:
    found: list[float] = weight.detach()[:: max(1, weight.shape[0] // _SAMPLED), 0].tolist()
    return found


def _linears(tree: nn.Module) -> Iterator[Any]:
    """The linear layers whose weights are to be laid out."""
    return (part for part in tree.modules() if type(part) is nn.Linear and _fits(part.weight))


def _fits(weight: Tensor) -> bool:
    """Whether a weight is one that gains by being laid out."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided and not weight.is_inference()
    large = weight.numel() >= _LEAST.get(weight.dtype, math.inf)
    return plain and large and weight.device.type == "cpu" and _multiplies(weight.dtype)


@functools.cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor, with this build of torch, multiplies by layouts, and rightly."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if dtype not in _LEAST or platform.machine() != "x86_64" or not available:
        return False
    source = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(size, 64, generator=source, device="cpu").to(dtype) for size in (96, 3))
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        found = multiply_by(torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS), hidden, None)
    except (RuntimeError, AttributeError):  # a build without these operators
        return False
    return torch.allclose(found, linear(hidden, weight), rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-4)


_layouts: Any = WeakIdKeyDictionary()
_decided: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
