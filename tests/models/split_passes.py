"""Passes of a model on two devices, whose tensors have devices and shapes but no values. It runs as a process.

Torch refuses every operation on tensors of two devices, as on real ones. The two devices belong to a backend that this
process registers.
"""

# ruff: noqa: E402  The backend is registered before anything is imported that lists the devices.

from __future__ import annotations

import copy

from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("toy")

import accelerate.hooks
import pytest
import torch
from accelerate import dispatch_model
from torch._subclasses.fake_tensor import FakeTensorMode

from layerskip.config import ConfigError
from layerskip.decoding import tree
from layerskip.draft_plan import DraftPlan
from layerskip.heads.readout import Readout
from layerskip.models import architecture
from layerskip.models import cache as cache_module
from layerskip.models.architecture import UnsupportedModel
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.forward import forward
from layerskip.models.graph_capture import CapturingCache
from layerskip.models.skip_view import decoding_view, skip_view
from layerskip.models.target import Target
from layerskip.models.weights import input_device
from layerskip.scan.row_model import RowModel
from tests.families import build

FIRST, SECOND = ("embed_tokens", "rotary_emb", "layers.0", "layers.1"), ("layers.2", "layers.3", "norm")
PLACES = {f"model.{name}": f"toy:{int(name in SECOND)}" for name in FIRST + SECOND} | {"lm_head": "toy:1"}


def _place(name: str) -> str:
    return next(place for part, place in PLACES.items() if name.startswith(part))


def check(mode: FakeTensorMode) -> None:
    """Run all kinds of passes; each must give its logits on the first device."""
    whole = build("gemma3_text")  # with sliding windows
    known = architecture.architecture(whole)
    with mode, torch.no_grad():
        tensors = (*whole.named_parameters(), *whole.named_buffers())
        memo = {id(own): torch.empty(own.shape, dtype=own.dtype, device=_place(name)) for name, own in tensors}
        model = copy.deepcopy(whole, memo)
        dispatch_model(model, PLACES, skip_keys=model._skip_keys_device_placement)
        architecture._known[model] = known  # detection compares values
        device = input_device(model)
        assert str(device) == "toy:0"
        for view in (model, decoding_view(model), skip_view(model, DraftPlan.parse("attention:1;mlp:3;layers:2", 4))):
            cache = KVCache(4, 32, device=device)
            assert forward(view, torch.arange(3, 9, device=device), cache, last=2).device == device
            cache.length = 6
            assert forward(view, torch.arange(3, 4, device=device), cache, last=1).device == device
        cache = KVCache(4, 32, device=device)
        forward(model, torch.arange(3, 9, device=device), cache, last=1)
        cache.length = 6
        assert {str(states.device) for states in cache.buffers()} == {"toy:0", "toy:1"}
        trees = tree.TreeModel(model)
        assert trees.run(torch.arange(3, 7, device=device), (-1, -1, 0), cache).device == device
        cache.gather([0, 2, 3])
        assert not isinstance(acquire_cache(model, 4, 16, device, static_shapes=True), CapturingCache)
        with pytest.raises(ConfigError, match=r"^target\.device: heads need "):
            Readout(Target(model), None)
        with pytest.raises(UnsupportedModel, match=r"^target\.device: scans need "):
            RowModel(model)


if __name__ == "__main__":
    accelerate.hooks.set_module_tensor_to_device = lambda *_, **__: None  # all tensors are in place
    tree.copy_to_device = lambda values, device: torch.tensor(values).to(device)  # there is no pinned memory
    cache_module.copy_to_device = tree.copy_to_device
    tree.TreeModel._check = lambda *_: None  # compares values
    check(FakeTensorMode())
