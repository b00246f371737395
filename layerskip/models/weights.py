"""Weights on several devices, and quantised ones, as transformers loads them.

Accelerate moves arguments to a module's device and the output back, by hooks. Weights without room on a GPU are offloaded:
they are copied from memory or from the disk for every pass.

A quantised target is compared with its own plain decoding. Drafting needs one more property: the result of a token must not
depend on the other tokens of its pass. Weight-only quantisation has it, and so have activations with one scale per token. A
scale for a whole pass has not, nor have the outliers of LLM.int8() (arXiv 2208.07339, section 3), which are those of a pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.config import ConfigError

QUANTIZATIONS = ("bitsandbytes-4bit", "bitsandbytes-8bit", "torchao-int8", "torchao-int4", "fp8")
"""The short names of ``target.quantization``. They begin with the package that they need, except ``fp8``."""
_CUDA_ONLY = ("torchao-int4", "fp8")
_DTYPES = {"bitsandbytes-8bit": torch.float16, "torchao-int4": torch.bfloat16}  # of the only kernels
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_HALF = 4  # of the rows of a trial
_OUTLIER = 100.0  # times the other rows
_NOISE = 4.0  # times the difference of two equal runs, which is 0 unless a kernel adds in any order


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's input embeddings, on which tokens enter and logits come out."""
    embeddings: Any = model.get_input_embeddings()
    device: torch.device = next(embeddings.parameters()).device
    if device.type == "meta":  # offloaded: its device is that of its hook
        device = torch.empty(0, device=embeddings._hf_hook.execution_device).device
    return device


def is_split(model: nn.Module) -> bool:
    """Return whether the passes of a model run on several devices."""
    return len({str(place) for place in vars(model).get("hf_device_map", {}).values()} - {"cpu", "disk"}) > 1


def check_not_split(model: nn.Module, what: str) -> None:
    """Raise a :class:`ConfigError` unless all weights of a model are on one device, as ``what``, in the plural, need it."""
    if is_split(model) or any(part.is_meta for part in model.parameters()):
        raise ConfigError(f"target.device: {what} need a target whose weights are all on one device")


def stored_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the plain tensors of a model's state with names, offloaded ones and the parts of quantised ones included."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            owner, _, own = name.rpartition(".")
            hook: Any = model.get_submodule(owner)._hf_hook
            tensor = hook.weights_map[own]
        if isinstance(tensor, Tensor):
            yield from _plain_tensors(name, tensor)


def _plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Return a tensor, or the parts of a wrapper as in torchao."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _plain_tensors(f"{name}.{part}", getattr(tensor, part))


def is_dense(layer: nn.Module | None) -> bool:
    """Return whether a layer has a ``weight`` of plain numbers, whose rows can be read."""
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and not hasattr(weight, "__tensor_flatten__") and weight.dtype in _PLAIN


def check_dense(layer: nn.Module | None, model: PreTrainedModel, what: str) -> None:
    """Raise a :class:`ConfigError` if a model's output layer is quantised, whose rows ``what``, in the plural, read."""
    if getattr(model, "is_quantized", False) and not is_dense(layer):
        raise ConfigError(f"target.quantization: {what} read rows of the output layer, which is quantised")


def quantization_config(quantization: object, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the configuration of transformers for a value of ``target.quantization`` and a dtype of activations.

    It is a name of :data:`QUANTIZATIONS`, a mapping as in a checkpoint's ``config.json``, or an object of transformers;
    :class:`ConfigError` if the name is unknown, a package is missing, or the device or dtype has no kernels for it.
    """
    if isinstance(quantization, Mapping) or hasattr(quantization, "quant_method"):
        return _plain(quantization)
    if not isinstance(quantization, str) or quantization not in QUANTIZATIONS:
        names = ", ".join(QUANTIZATIONS)
        raise ConfigError(f"target.quantization: {quantization!r} is not one of {names}, nor a mapping with quant_method")
    package, needed = quantization.partition("-")[0], _DTYPES.get(quantization, dtype)
    if package != "fp8" and find_spec(package) is None:
        raise ConfigError(f"target.quantization: {quantization} needs the package {package}: pip install {package}")
    if quantization in _CUDA_ONLY and device.type != "cuda":
        raise ConfigError(f"target.quantization: {quantization} needs a CUDA device, not {device.type}")
    if dtype != needed:
        name = str(needed).removeprefix("torch.")
        raise ConfigError(f"target.quantization: {quantization} multiplies in {name}; set target.dtype={name}")
    if quantization == "bitsandbytes-4bit":
        return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    if quantization == "bitsandbytes-8bit":
        # Without a threshold there are no outliers, which would make tokens of a pass depend on each other.
        return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    if quantization == "torchao-int8":
        return _torchao("Int8WeightOnlyConfig", version=2)
    if quantization == "torchao-int4":
        # Torch has the kernels of this layout; those of the default are in a package of their own.
        return _torchao("Int4WeightOnlyConfig", group_size=64, int4_packing_format="tile_packed_to_4d")
    return transformers.FineGrainedFP8Config()


def _torchao(name: str, **fields: Any) -> Any:
    # By default torchao changes settings of the whole process, among them the precision of float32 products.
    made = getattr(import_module("torchao.quantization"), name)(set_inductor_config=False, **fields)
    return transformers.TorchAoConfig(made)


def as_recorded(quantization: Any) -> Any:
    """Return a value of ``target.quantization`` as JSON can hold it, in a form that :func:`quantization_config` accepts."""
    fields = quantization if isinstance(quantization, str | Mapping) else quantization.to_dict()
    return json.loads(json.dumps(_plain(fields), default=str))


def _plain(value: Any) -> Any:
    """Return nested mappings and lists of any type, such as those of a configuration file, as dicts and lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def rows_depend(model: PreTrainedModel) -> str | None:
    """Return the name of a quantised linear layer whose result for a row depends on other rows; None if there is none.

    One layer of each type runs on rows of the same shape, so the same kernels run. The last rows become outliers; the
    results of the first ones must stay the same bit by bit, or as near as when the same rows run twice.
    """
    if not getattr(model, "is_quantized", False):
        return None
    seen: set[object] = set()
    for name, layer in model.named_modules():
        weight, width = getattr(layer, "weight", None), getattr(layer, "in_features", None)
        parts = [*layer.parameters(), *layer.buffers()]
        kind = type(layer), type(weight), getattr(weight, "dtype", None)
        if not isinstance(width, int) or is_dense(layer) or kind in seen or any(part.is_meta for part in parts):
            continue
        seen.add(kind)
        place = parts[0].device if parts else torch.device("cpu")
        rows = torch.randn(2 * _HALF, width, generator=torch.Generator().manual_seed(0), device="cpu")
        changed = torch.cat((rows[:_HALF], _OUTLIER * rows[_HALF:]))
        first, again, beside = (layer(x.to(place, model.dtype)[None])[0, :_HALF].float() for x in (rows, rows, changed))
        if not (first - beside).abs().max() <= _NOISE * (first - again).abs().max():  # NaN fails too
            return str(name)
    return None
