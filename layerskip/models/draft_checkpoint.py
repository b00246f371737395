"""How does a mask of whole layers leave this program? As an ordinary checkpoint of the kept layers.

Any engine takes it as a plain draft model for the target it was cut from. The folder holds safetensors, a configuration with
its per-layer fields cut along, and the tokenizer. Before it is kept, what was written is loaded again and compared with the
skipped view, because a family may number its layers in a way that cutting does not know.
"""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip.files import full_disk_told
from layerskip.mask import MaskError, SkipMask
from layerskip.models.architecture import UnsupportedModel, architecture
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.skip_view import skip_view
from layerskip.models.target import Target

_PROBE_LENGTH = 12


def save_draft_checkpoint(target: Target, mask: SkipMask, folder: str | Path) -> Path:
    """Save the layers that a mask keeps as a model of their own.

    Args:
        target: the model to cut.
        mask: skips whole layers only, and not all of them.
        folder: is made; must not exist, or be empty.

    Returns:
        The folder.

    Raises:
        MaskError: the mask skips half a layer, or all of them.
        UnsupportedModel: the cut model would not compute what the skipped one does.
        FileExistsError: the folder has something in it.
    """
    if not mask.is_whole_layers:
        raise MaskError("mask: a checkpoint of kept layers needs both sub-layers of a layer skipped together")
    kept = [i for i in range(mask.layers) if not mask.attention[i]]
    if not kept:
        raise MaskError("mask: skips every layer; nothing would be left to save")
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: is not empty")
    view = skip_view(target.model, mask)
    cut = _cut(target.model, kept)
    # Elsewhere first, so that a folder of this name is always a whole and checked one.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as place:
        partial = Path(place) / folder.name
        with full_disk_told(folder, Path(place) / "more"):
            cut.save_pretrained(partial)
            if target.tokenizer is not None:
                target.tokenizer.save_pretrained(partial)
        _check(target, view, partial, len(kept))
        partial.replace(folder)
    return folder


def _cut(model: PreTrainedModel, kept: list[int]) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        _cut_fields(part, model.config.get_text_config(decoder=True).num_hidden_layers, kept)
    path = architecture(model).path
    place = {str(old): str(new) for new, old in enumerate(kept)}
    layer_name = re.compile(rf"{re.escape(path)}\.(\d+)\.")
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        match = layer_name.match(name)
        if match is None:
            weights[name] = tensor
        elif match[1] in place:
            weights[f"{path}.{place[match[1]]}.{name[match.end() :]}"] = tensor
    cut = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    assert isinstance(cut, PreTrainedModel)
    try:
        cut.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise UnsupportedModel(
            f"{type(model).__name__}: its configuration tells layers apart by their number, which cutting does not know"
        ) from error
    cut.generation_config = copy.deepcopy(model.generation_config)
    return cut


def _cut_fields(config: Any, layers: int, kept: list[int]) -> None:
    """Cut every list with one entry per layer, and move every list of layer indices along."""
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
    found = forward(loaded, tokens, KVCache(layers, _PROBE_LENGTH, device=target.device), last=1)
    slack = 1e-3 if target.model.dtype == torch.float32 else 5e-2
    if not float((expected - found).abs().max()) <= slack * float(expected.abs().max()):  # not a number fails too
        raise UnsupportedModel(
            f"{target.architecture}: a checkpoint of its kept layers does not compute what the skipped model does; "
            "something in its configuration depends on the layer's number"
        )
