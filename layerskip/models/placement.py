"""Models on several devices, which accelerate places and runs through hooks on their modules.

A hook moves the arguments of a module to its device, and the model's output back to the device of its input. Weights
without room on a GPU are offloaded: they stay in memory or on the disk and are copied for every pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.config import ConfigError


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
    """Check that a model is on one device.

    Args:
        model: the model, placed by ``target.device_map``.
        what: what needs it, in the plural.

    Raises:
        ConfigError: it is on several, or some of its weights are offloaded.
    """
    if is_split(model) or any(part.is_meta for part in model.parameters()):
        raise ConfigError(f"target.device_map: {what} need a target whose weights are all on one device")


def stored_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the names and tensors of a model's state, including the offloaded ones."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            owner, _, own = name.rpartition(".")
            hook: Any = model.get_submodule(owner)._hf_hook
            tensor = hook.weights_map[own]
        if isinstance(tensor, Tensor):
            yield name, tensor
