"""Loading of targets and draft models from the hub, a folder, a GGUF file or a wheel.

Weights are read from safetensors or GGUF only, never from pickles. Code from a model's repository runs only if the caller
allows it.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip.models.target import Target, TargetError
from layerskip.models.tokenizer import load_tokenizer
from layerskip.models.wheels import WHEELS, WheelError, find_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_target(
    name: str,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    pack_weights: bool | None = None,
) -> Target:
    """Load a model for decoding.

    Args:
        name: ``smollm2`` or ``gemma3`` (from their wheels), a local folder, a ``.gguf`` file, or a hub id.
        revision: branch, tag or commit of a hub id.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``auto`` (the fastest that the processor supports).
        device: a torch device name, or ``auto`` (CUDA if available, else the CPU).
        trust_remote_code: whether code from the model's repository may run.
        pack_weights: see :class:`~layerskip.models.target.Target`.

    Raises:
        TargetError: the model does not exist, or it cannot be loaded.
    """
    if not isinstance(trust_remote_code, bool):  # "no" would be true
        raise TargetError(f"trust_remote_code: {trust_remote_code!r} is neither true nor false")
    if pack_weights is not None and not isinstance(pack_weights, bool):
        raise TargetError(f"pack_weights: {pack_weights!r} is not true, false or null")
    torch_device = _device(device)
    torch_dtype = _dtype(dtype, torch_device)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
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
    tokenizer, model = _load(name, source, torch_dtype, options)
    return Target(model.to(torch_device).eval(), tokenizer, name, revision, pack_weights)  # type: ignore[arg-type]


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
            draft = load_target(name, dtype=target.dtype, device=str(target.device), pack_weights=target.pack_weights)
        except TargetError as error:
            reason = str(error).removeprefix("target: ").removeprefix("target.path: ")
            raise TargetError(f"draft: {reason}") from error.__cause__
        target.drafts[name] = draft
    draft = target.drafts[name]
    digests = {target.name: target.tokenizer_digest, name: draft.tokenizer_digest}
    without = [owner for owner, digest in digests.items() if digest is None]
    if without and not (same_tokenizer and target.tokenizer is None):
        raise TargetError(f"draft: {without[0]} has no tokenizer, so its tokens cannot be matched")
    if same_tokenizer and not without and len(set(digests.values())) > 1:
        raise TargetError(f"draft: the tokenizer of {name} is not that of {target.name}")
    return draft


def _load(name: str, source: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, PreTrainedModel]:
    weights: dict[str, Any] = {"use_safetensors": True}
    if "gguf_file" in options:
        # Transformers without GgufConfig always unpack GGUF files into dense weights.
        config = getattr(transformers, "GgufConfig", None)
        weights = {} if config is None else {"quantization_config": config(dequantize=True)}
    quiet = not transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    model: Any
    info: dict[str, Any]
    try:
        tokenizer = load_tokenizer(source, options)
        options |= weights | {"dtype": dtype, "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(source, **options)  # type: ignore[misc]
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each library involved raises errors of its own
        reason = " ".join(str(error).split())[:300]
        raise TargetError(f"target: cannot load {name}: {reason}") from error
    finally:
        if not quiet:
            transformers.utils.logging.enable_progress_bar()
    if getattr(model.config, "is_encoder_decoder", False):
        raise TargetError(f"target: {name} is {type(model).__name__}, an encoder-decoder; decoders only")
    if info["missing_keys"]:  # transformers would initialise them randomly
        raise TargetError(f"target: {name} has no weights for {min(info['missing_keys'])}")
    return tokenizer, model


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise TargetError(f"device: {device!r} is not one that torch knows; write cpu, cuda or cuda:1") from None
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise TargetError(f"device: {device} is not available; torch sees {torch.cuda.device_count()} CUDA devices")
    return parsed


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        return torch.bfloat16 if _processor_has_bfloat16() else torch.float32
    if dtype not in DTYPES:
        raise TargetError(f"dtype: {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _processor_has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 in hardware; where it emulates it, float32 is faster."""
    if platform.system() != "Linux":
        return False
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
