"""The device of ``searches.evaluate.gpu``, its memory bandwidth, and the floor that the bandwidth sets to a pass.

A pass over one token reads every weight and the cache of all tokens before it. No pass is faster than this reading, at the
bandwidth that a large copy on the device reaches; no figure of a data sheet is used.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from layerskip import Target
from layerskip.device.clock import now
from layerskip.device.memory import total_bytes
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from searches.app.record_header import record_header
from searches.evaluate.gpu_worker import Known, Report, Row

_COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes of the copied buffer; beyond any cache
_COPIES = 20  # of a timing, so that reading the clock does not count
_TIMINGS = 5


def describe_device(config: DictConfig, known: Known, report: Report) -> None:
    """Report the header of the record, and the device with its bandwidth and the target's floor, as rows."""
    target: Target = instantiate(config.target)
    report.row("header", record_header("layerskip.gpu/1", target))
    report.row("device", _device(target.device) | {"dtype": target.dtype} | floor_of(target))


def _device(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"type": device.type, "device": str(device), "bandwidth": copy_bandwidth(device)}
    if device.type != "cuda":
        return found | {"name": platform.machine(), "memory_bytes": total_bytes(), "processors": os.cpu_count()}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "processors": os.cpu_count(),
    }


@torch.inference_mode()
def copy_bandwidth(device: torch.device) -> float:
    """Return the memory bandwidth in bytes per second: that of the fastest large copy, with reads and writes counted."""
    source = torch.zeros(_COPIED.get(device.type, _COPIED["cuda"]), dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    copy.copy_(source)  # the first touch of the pages is slower
    fastest = float("inf")
    for _ in range(_TIMINGS):
        start = now(device)
        for _ in range(_COPIES):
            copy.copy_(source)
        fastest = min(fastest, (now(device) - start) / _COPIES)
    return 2 * source.nbytes / fastest


@torch.inference_mode()
def floor_of(target: Target) -> Row:
    """Return the bytes that a pass over one token reads: ``weight_bytes``, and ``cache_bytes`` per token before it."""
    cache = KVCache(target.layers, 1, device=target.device)
    forward(target.model, torch.zeros(1, dtype=torch.int64, device=target.device), cache, last=1)
    return {"weight_bytes": read_bytes(target.model), "cache_bytes": cache.nbytes}


def read_bytes(model: Any) -> int:
    """Return the bytes of all weights but an input embedding that is not the output layer, too: a pass reads one row of it.

    Args:
        model: a causal language model of transformers.
    """
    embedding: nn.Parameter = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    return sum(int(weight.nbytes) for weight in model.parameters()) - (0 if tied else embedding.nbytes)


def floor_tokens_per_second(floor: Known, context: float, bandwidth: float) -> float:
    """Return the tokens per second of plain decoding at which reading alone takes all the time.

    Args:
        floor: of :func:`floor_of`.
        context: tokens in the cache, on average.
        bandwidth: bytes per second.
    """
    return bandwidth / float(floor["weight_bytes"] + floor["cache_bytes"] * context)
