"""Quantised weights, by the integrations of transformers: bitsandbytes, torchao, FP8 and what else it supports.

A quantised target is a target like others: its output is compared with its own plain decoding, not with that of the model
it was made from. Drafting needs one more property: the result of a token must not depend on the other tokens of its pass.
Weight-only quantisation has it, and so has a quantisation of activations with one scale per token. A scale for a whole pass
has not, nor have the outliers of LLM.int8() (arXiv 2208.07339, section 3), whose columns are those of all tokens together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.config import ConfigError

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 8
_OUTLIER = 100.0  # times the other rows
_NOISE = 4.0  # times the difference of two equal runs, which is 0 unless a kernel adds in any order


def quantization_config(quantization: object, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the configuration of transformers for a value of ``target.quantization``.

    Args:
        quantization: a name of :data:`NAMES`, a mapping as in the ``quantization_config`` of a checkpoint's ``config.json``,
            or a configuration object of transformers.
        dtype: of the activations.
        device: where the weights will be.

    Raises:
        ConfigError: the name is unknown, a package is missing, or the device has no kernels for it.
    """
    if isinstance(quantization, Mapping):
        return _plain(quantization)
    if hasattr(quantization, "quant_method"):
        return quantization
    if not isinstance(quantization, str) or quantization not in _NAMED:
        raise ConfigError(
            f"target.quantization: {quantization!r} is not one of {', '.join(NAMES)}, nor a mapping with quant_method"
        )
    package, make = _NAMED[quantization]
    if package is not None and find_spec(package) is None:
        raise ConfigError(f"target.quantization: {quantization} needs the package {package}: pip install {package}")
    if quantization in _CUDA_ONLY and device.type != "cuda":
        raise ConfigError(f"target.quantization: {quantization} needs a CUDA device, not {device.type}")
    return make(dtype)


def as_recorded(quantization: object) -> str | dict[str, Any]:
    """Return a value of ``target.quantization`` as JSON can hold it, in a form that :func:`quantization_config` accepts."""
    if isinstance(quantization, str):
        return quantization
    fields: Any = quantization
    recorded: dict[str, Any] = json.loads(
        json.dumps(_plain(fields if isinstance(fields, Mapping) else fields.to_dict()), default=str)
    )
    return recorded


def _plain(value: Any) -> Any:
    """Return nested mappings and lists of any type, such as those of a configuration file, as dicts and lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Return the plain tensors that a tensor is made of, with names: itself, or the parts of a wrapper as in torchao."""
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is None:
        yield name, tensor
        return
    for part in parts()[0]:
        yield from plain_tensors(f"{name}.{part}", getattr(tensor, part))


def is_dense(layer: nn.Module | None) -> bool:
    """Return whether a layer has a ``weight`` of plain numbers, whose rows can be read."""
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and not hasattr(weight, "__tensor_flatten__") and weight.dtype in _PLAIN


def check_dense(layer: nn.Module | None, model: PreTrainedModel, what: str) -> None:
    """Check that the rows of a model's output layer can be read.

    Args:
        layer: the output layer.
        model: the model.
        what: what reads them, in the plural.

    Raises:
        ConfigError: they are quantised.
    """
    if getattr(model, "is_quantized", False) and not is_dense(layer):
        raise ConfigError(f"target.quantization: {what} read rows of the output layer, which is quantised")


def rows_depend(model: PreTrainedModel) -> str | None:
    """Return the name of a quantised linear layer whose result for a row depends on other rows; None if there is none.

    One layer of each type runs on rows of the same shape, so the same kernels run. The last rows become outliers; the
    results of the first ones must stay the same bit by bit, or as near as when the same rows run twice.
    """
    if not getattr(model, "is_quantized", False):
        return None
    seen: set[object] = set()
    layer: Any
    for name, layer in model.named_modules():
        weight, width = getattr(layer, "weight", None), getattr(layer, "in_features", None)
        kind = type(layer), type(weight), getattr(weight, "dtype", None)
        if not isinstance(width, int) or is_dense(layer) or kind in seen or _has_offloaded(layer):
            continue
        seen.add(kind)
        place = next((part.device for part in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))
        source = torch.Generator().manual_seed(0)
        rows = torch.randn(_ROWS, width, generator=source, device="cpu")
        changed = torch.cat((rows[: _ROWS // 2], _OUTLIER * rows[_ROWS // 2 :]))
        runs = (layer(some.to(place, model.dtype)[None])[0, : _ROWS // 2].float() for some in (rows, rows, changed))
        first, again, beside = runs
        if not (first - beside).abs().max() <= _NOISE * (first - again).abs().max():  # NaN fails too
            return str(name)
    return None


def _has_offloaded(layer: nn.Module) -> bool:
    return any(part.is_meta for part in (*layer.parameters(), *layer.buffers()))


def _bitsandbytes_4bit(dtype: torch.dtype) -> Any:
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _bitsandbytes_8bit(dtype: torch.dtype) -> Any:
    if dtype != torch.float16:
        raise ConfigError("target.quantization: bitsandbytes-8bit multiplies in float16; set target.dtype=float16")
    # Without a threshold there are no outliers, which would make tokens of a pass depend on each other.
    return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def _torchao_int8(dtype: torch.dtype) -> Any:
    return _torchao("Int8WeightOnlyConfig", version=2)


def _torchao_int4(dtype: torch.dtype) -> Any:
    if dtype != torch.bfloat16:
        raise ConfigError("target.quantization: torchao-int4 has kernels for target.dtype=bfloat16 only")
    # Torch has the kernels of this layout; those of the default are in a package of their own.
    return _torchao("Int4WeightOnlyConfig", group_size=64, int4_packing_format="tile_packed_to_4d")


def _torchao(name: str, **fields: Any) -> Any:
    # By default torchao changes settings of the whole process, among them the precision of float32 products.
    made = getattr(import_module("torchao.quantization"), name)(set_inductor_config=False, **fields)
    return transformers.TorchAoConfig(made)


def _fp8(dtype: torch.dtype) -> Any:
    return transformers.FineGrainedFP8Config()


_NAMED: dict[str, tuple[str | None, Callable[[torch.dtype], Any]]] = {
    "bitsandbytes-4bit": ("bitsandbytes", _bitsandbytes_4bit),
    "bitsandbytes-8bit": ("bitsandbytes", _bitsandbytes_8bit),
    "torchao-int8": ("torchao", _torchao_int8),
    "torchao-int4": ("torchao", _torchao_int4),
    "fp8": (None, _fp8),
}
_CUDA_ONLY = ("torchao-int4", "fp8")
NAMES = tuple(_NAMED)
"""The short names of ``target.quantization``."""
