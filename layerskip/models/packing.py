"""Packed CPU weights: weights laid out once for oneDNN, not in every forward pass.

oneDNN needs a matrix in blocks. Torch passes it rows, which are laid out again in every call; for few rows, that takes
longer than the product. Here a second copy of a weight is packed once, for all module trees over the same tensors, and
multiplied with the operator that torch's own compiler emits. In bfloat16 the results equal those of
``torch.nn.functional.linear`` bit by bit, except where that function rounds before it adds a bias. In float32 the sums have
another order, and weights are packed for :mod:`layerskip.kernels.cpu` where it compiles.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from layerskip.device.memory import total_bytes
from layerskip.kernels.cpu import Blocks, BlockWeight, FewRowsWeight, FloatWeight, HalfWeight, IntegerWeight, has_kernels
from layerskip.models.positions import max_positions

Tree = TypeVar("Tree", bound=nn.Module)

_SHARE = 0.25  # of the machine's memory, the most that packed weights may take by default
_ROWS = 4  # rows of input for which layouts are chosen; a thousand rows lose nothing by it
_LEAST = {torch.float32: 2**17, torch.bfloat16: 2**14}  # values; of fewer, a call takes longer than the product
_SAMPLED = 8  # values that detect a change of a weight
_RANDOM = 64  # tokens from which inputs are weighed
_LEAST_IMPORTANCE = 1e-6  # of the mean importance, the least that an input has
_FILE_BLOCK = 32  # inputs of the smallest blocks of a file


def set_packing(model: nn.Module, pack: bool | None) -> None:
    """Set whether a model's weights are packed; None keeps the present setting, or the default of :func:`uses_packing`."""
    if pack is not None:
        _settings[model] = pack


def uses_packing(model: nn.Module) -> bool:
    """Return whether a model multiplies by packed weights: by default if they take at most a quarter of the memory."""
    packable = any(packable_layers(model))
    if packable and model not in _settings:  # with none packable now, some may be on another device
        _settings[model] = fits_packed(model)
    return packable and _settings[model]


def fits_packed(model: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """Return whether a model has weights to pack that take at most a quarter of the memory, in a dtype or in its own."""
    size = sum(layer.weight.numel() * (dtype or layer.weight.dtype).itemsize for layer in packable_layers(model))
    return bool(0 < size <= _SHARE * total_bytes())


def pack_like(model: nn.Module, tree: Tree) -> Tree:
    """Let the linear layers of a module tree multiply by packed weights if the model does.

    All trees over the same tensors share their packed copies.
    """
    for layer in packable_layers(tree) if uses_packing(model) else ():
        if "forward" not in layer.__dict__:  # a replaced forward may do more than multiply
            layer.__class__ = _PackedLinear
            read_at(layer, 0)
    return tree


def read_at(tree: nn.Module, bits: int) -> None:
    """Let the packed linear layers of a module tree read their weights at 8 or 4 bits, or as they are stored with 0."""
    for layer in tree.modules():
        if type(layer) is _PackedLinear:
            layer.packed = _packed[bits].setdefault(layer.weight, _PackedWeight(bits))


def drop_stale_packing(tree: nn.Module) -> None:
    """Drop packed copies of weights that were changed through ``.data``, as far as a sample of their values shows it."""
    for layer in tree.modules():
        if type(layer) is _PackedLinear:
            layer.packed.check(layer.weight)


def multiply(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`torch.nn.functional.linear`, ``[..., in]`` to ``[..., out]``, by the packed weight if there is one."""
    packed: _PackedWeight | None = _packed[0].get(weight)
    return linear(hidden, weight, bias) if packed is None else packed.multiply(hidden, weight, bias)


Product = Callable[[Tensor, Tensor | None], Tensor]
"""Of hidden states ``[..., in]`` and an optional bias ``[out]``, to ``[..., out]``."""


def pack_weight(weight: Tensor) -> Product | None:
    """Return the product by a packed weight ``[out, in]``, without gradients; None where packing does not help."""
    if not _is_packable(weight):
        return None
    if HalfWeight.fits(weight):
        return HalfWeight(weight)
    return FloatWeight(weight) if weight.dtype == torch.float32 and has_kernels() else _reorder(weight)


def _reorder(weight: Tensor) -> Product:
    """Return the product by a weight in the layout of oneDNN."""
    packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS), torch.ops.mkldnn._linear_pointwise
    return lambda hidden, bias: multiply(hidden, packed, bias, "none", [], "")


def refuse_quantized(model: nn.Module) -> str:
    """Return why products at fewer bits are no faster for a model; empty if they are."""
    if not any(packable_layers(model)) or not uses_packing(model):
        return "its weights are not packed on a CPU"
    if next(packable_layers(model)).weight.dtype != torch.float32:
        return "its arithmetic is not float32; target.dtype=mixed is"
    return "" if has_kernels() else "it needs a C++ compiler, and a processor with AVX2"


def keep_blocks(weight: Tensor, blocks: Blocks) -> None:
    """Multiply by blocks wherever a weight ``[out, in]`` with their values is packed, until it changes."""
    _packed[0].setdefault(weight, _PackedWeight()).keep(weight, BlockWeight(weight, blocks))


FindBlocks = Callable[[Tensor, int], Blocks | None]
"""Of a weight ``[out, in]`` and a number of bits, to blocks with its values and codes of so many bits; None without."""


def offer_blocks(weight: Tensor, find: FindBlocks) -> None:
    """Let drafts at fewer bits multiply by the blocks that are found for a weight, except those of a deep copy of it."""
    _offered[weight] = find


def offers_blocks(model: nn.Module) -> bool:
    """Return whether drafts of a model multiply by blocks that are found for it."""
    return any(weight in _offered for weight in model.parameters())


def _blocks(weight: Tensor, bits: int) -> Blocks:
    """Return the blocks of a weight by which a draft at some bits multiplies."""
    find: FindBlocks | None = _offered.get(weight)
    found = None if find is None else find(weight, bits)
    # Scales of 32 bits, as of K-quants, take more bytes than codes of the weight with others.
    if found is not None and found.has_half_scales:
        return found
    return Blocks.quantize(weight, bits, _importance.get(weight))


def weigh_inputs(model: PreTrainedModel) -> None:
    """Measure the inputs of a model's linear layers once, so that weights at fewer bits keep what large inputs meet.

    Random tokens serve as well as texts, and need no tokenizer.
    """
    layers = [layer for layer in packable_layers(model) if layer.weight not in _importance]
    if not layers:
        return
    text = model.config.get_text_config(decoder=True)
    count = min(_RANDOM, max_positions(model) or _RANDOM)
    tokens = torch.randint(text.vocab_size, (1, count), generator=torch.Generator().manual_seed(0), device="cpu")
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(_weigh))
        model(input_ids=tokens, use_cache=False)
    for layer in layers:  # those that tokens do not reach, too, such as a vision tower's
        _importance.setdefault(layer.weight, None)


def _weigh(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
    squares = args[0].detach().float().flatten(0, -2).square().mean(0)
    if not squares.isfinite().all() or not squares.any():  # as of an expert without tokens
        return
    squares = squares.clamp_min(_LEAST_IMPORTANCE * squares.mean())  # a text may use inputs that random tokens do not
    if (before := _importance.get(layer.weight)) is not None:  # another layer has the same weight
        squares = torch.maximum(squares, before)
    # Powers of two, because sums differ in their last bits from run to run, and copies should seldom do.
    _importance[layer.weight] = squares.log2_().round_().exp2_()


def copy_bytes(weight: Tensor, bits: int) -> int:
    """Return the bytes of the copy of a weight at 8 or 4 bits, or those that it will have; in blocks of a file, the most."""
    made: _PackedWeight | None = _packed[bits].get(weight)
    if made is not None and isinstance(made.copy, FewRowsWeight):
        return made.copy.nbytes
    return IntegerWeight.bytes_for(weight, bits, *([_FILE_BLOCK] if weight in _offered else []))


def has_blocks(model: nn.Module) -> bool:
    """Return whether a model multiplies by blocks."""
    return any(_in_blocks(weight) for weight in model.parameters()) and uses_packing(model)


def _in_blocks(weight: Tensor) -> bool:
    packed: _PackedWeight | None = _packed[0].get(weight)
    return packed is not None and isinstance(packed.copy, BlockWeight) and packed.state == _state(weight)


def few_rows_weight(layer: nn.Module) -> FewRowsWeight | None:
    """Return the packed weight of a linear layer if it has few bytes and float32 sums."""
    if type(layer) is not _PackedLinear or layer.weight.is_inference():
        return None
    product = layer.packed.product(layer.weight)
    return product if isinstance(product, FewRowsWeight) else None


class _PackedWeight:
    """The packed copy of a weight, made on first use and again after the weight has changed; at fewer ``bits`` if not 0."""

    def __init__(self, bits: int = 0) -> None:
        self._bits = bits
        self.state: tuple[int, int] | None = None  # of the weight when it was packed
        self._sample: list[float] = []
        self.copy: Product | None = None  # None where packing does not help

    def multiply(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        left_to_torch = (
            torch.compiler.is_compiling()
            or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias)))
            or hidden.dtype != weight.dtype
            or weight.is_inference()
            or not hidden.numel()
            or torch.is_autocast_enabled("cpu")
        )
        product = None if left_to_torch else self.product(weight)
        return linear(hidden, weight, bias) if product is None else product(hidden, bias)

    def product(self, weight: Tensor) -> Product | None:
        """Return the product by the packed copy of a weight, as it is now; None where packing does not help."""
        if self.state != _state(weight):
            self.keep(weight, IntegerWeight(weight, _blocks(weight, self._bits)) if self._bits else pack_weight(weight))
        return self.copy

    def keep(self, weight: Tensor, copy: Product | None) -> None:
        """Take the packed copy of a weight, as it is now."""
        self.copy, self.state, self._sample = copy, _state(weight), _sample(weight)

    def check(self, weight: Tensor) -> None:
        """Drop the copy if the weight has moved to another device or its sampled values have changed."""
        if self.state is not None and (weight.device.type != "cpu" or self._sample != _sample(weight)):
            self.state = self.copy = None

    def __reduce__(self) -> Any:
        return _PackedWeight, (self._bits,)  # a copied weight is packed again


class _PackedLinear(nn.Linear):
    """A linear layer that multiplies by a packed weight."""

    packed: _PackedWeight

    def forward(self, input: Tensor) -> Tensor:
        return self.packed.multiply(input, self.weight, self.bias)


def _state(weight: Tensor) -> tuple[int, int]:
    return weight._version, weight.data_ptr()


def _sample(weight: Tensor) -> list[float]:
    values: list[float] = weight.detach()[:: max(1, weight.shape[0] // _SAMPLED), 0].tolist()
    return values


def packable_layers(tree: nn.Module) -> Iterator[Any]:
    """Return the linear layers whose weights can be packed."""
    return (layer for layer in tree.modules() if type(layer) is nn.Linear and _is_packable(layer.weight))


def _is_packable(weight: Tensor) -> bool:
    """Return whether packing a weight is possible and faster."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided and not weight.is_inference()
    if not plain or weight.device.type != "cpu" or not _is_supported(weight.dtype):
        return False
    if weight.numel() >= _LEAST[weight.dtype]:
        return True
    return weight.numel() >= _LEAST[torch.bfloat16] and has_kernels()


@functools.cache
def _is_supported(dtype: torch.dtype) -> bool:
    """Return whether this processor and build of torch multiply by packed weights, with correct results."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if dtype not in _LEAST or platform.machine() != "x86_64" or not available:
        return False
    source = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(size, 64, generator=source, device="cpu").to(dtype) for size in (96, 3))
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        product = _reorder(weight)(hidden, None)
    except (RuntimeError, AttributeError):  # a build without these operators
        return False
    return torch.allclose(product, linear(hidden, weight), rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-4)


_packed: dict[int, Any] = {bits: WeakIdKeyDictionary() for bits in (0, 8, 4)}  # by weight
_importance: Any = WeakIdKeyDictionary()  # by weight, the mean squares ``[in]`` of its inputs
_offered: Any = WeakIdKeyDictionary()  # by weight, what finds its blocks
_settings: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
