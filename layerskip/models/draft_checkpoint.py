"""Export of a mask of whole layers as an ordinary checkpoint of the kept layers.

Any inference engine can use it as a draft model for the original target. The folder contains safetensors, a configuration
whose per-layer fields are reduced to the kept layers, and the tokenizer. The checkpoint is loaded again and compared with
the skipped view before it is kept, because the code of a model family may depend on layer numbers in an unknown way.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip.files import atomic_folder
from layerskip.mask import MaskError, SkipMask
from layerskip.models.architecture import UnsupportedModel, architecture
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.skip_view import skip_view
from layerskip.models.target import Target
from layerskip.models.weights import check_not_split

_PROBE_LENGTH = 12


def save_draft_checkpoint(target: Target, mask: SkipMask, folder: str | Path) -> Path:
    """Save the layers of a target that a mask keeps as a model of their own, and return its folder, which is created.

    Raises:
        MaskError: the mask skips only one sub-layer of a layer, or all layers.
        UnsupportedModel: the target is quantised, or the saved model does not compute the same as the skipped view.
        ConfigError: the target is on several devices.
        FileExistsError: the folder is not empty.
    """
    if not mask.is_whole_layers:
        raise MaskError("mask: a checkpoint of kept layers needs both sub-layers of a layer skipped together")
    if getattr(target.model, "is_quantized", False):
        raise UnsupportedModel("target.quantization: no checkpoint can be cut out of a quantised model")
    check_not_split(target.model, "checkpoints of kept layers")
    kept = [i for i in range(mask.layers) if not mask.attention[i]]
    if not kept:
        raise MaskError("mask: skips every layer, so no layer is left to save")
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: is not empty")
    view = skip_view(target.model, mask)
    cut = _cut(target.model, kept)
    # Written to a temporary folder first, so that the final folder is always complete and checked.
    with atomic_folder(folder) as partial:
        cut.save_pretrained(partial)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(partial)
        _check(target, view, partial, len(kept))
    return folder


def _cut(model: PreTrainedModel, kept: list[int]) -> PreTrainedModel:
    config, layers = copy.deepcopy(model.config), model.config.get_text_config(decoder=True).num_hidden_layers
    for part in {id(part): part for part in (config, config.get_text_config(decoder=True))}.values():
        _cut_fields(part, layers, kept)
    path = architecture(model).path
    layer_name = re.compile(rf"{re.escape(path)}\.(\d+)\.")
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        match = layer_name.match(name)
        if match is None:
            weights[name] = tensor
        elif int(match[1]) in kept:
            weights[f"{path}.{kept.index(int(match[1]))}.{name[match.end() :]}"] = tensor
    cut = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    assert isinstance(cut, PreTrainedModel)
    try:
        cut.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        reason = "its configuration distinguishes layers by number in an unknown way"
        raise UnsupportedModel(f"{type(model).__name__}: {reason}") from error
    cut.generation_config = copy.deepcopy(model.generation_config)
    return cut


def _cut_fields(config: Any, layers: int, kept: list[int]) -> None:
    """Reduce every list with one entry per layer to the kept layers, and renumber every list of layer indices."""
    for name, value in vars(config).items():
        if not isinstance(value, list) or not value:
            continue
        if len(value) == layers and name != "architectures" and not name.endswith("token_id"):
            setattr(config, name, [value[i] for i in kept])
        elif name.endswith("_layers") and all(isinstance(i, int) and 0 <= i < layers for i in value):
            setattr(config, name, [kept.index(i) for i in value if i in kept])
    config.num_hidden_layers = len(kept)


@torch.inference_mode()
def _check(target: Target, view: PreTrainedModel, folder: Path, layers: int) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=target.model.dtype, use_safetensors=True)
    loaded = loaded.to(target.device).eval()
    tokens = torch.arange(_PROBE_LENGTH, device=target.device) % target.vocabulary
    expected = forward(view, tokens, KVCache(target.layers, _PROBE_LENGTH, device=target.device), last=1)
    logits = forward(loaded, tokens, KVCache(layers, _PROBE_LENGTH, device=target.device), last=1)
    tolerance = 1e-3 if target.model.dtype == torch.float32 else 5e-2
    if not float((expected - logits).abs().max()) <= tolerance * float(expected.abs().max()):  # NaN fails too
        reason = "something in its configuration depends on layer numbers"
        difference = "a checkpoint of its kept layers differs from the skipped model"
        raise UnsupportedModel(f"{target.architecture}: {difference}; {reason}")
