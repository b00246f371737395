"""Self-drafts as checkpoints of their own: the layers that a plan keeps, at its formats, for engines that load draft models.

A checkpoint is loaded again and compared before it is there, because the code of a model family may depend on layer numbers.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip.device.trial import nearly_equal
from layerskip.draft_plan import NAMES, DraftPlan, PlanError
from layerskip.files import atomic_folder
from layerskip.models.architecture import Architecture, UnsupportedModel, architecture
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.skip_view import skip_view
from layerskip.models.target import Target
from layerskip.models.weights import check_not_split

_PROBE_LENGTH = 12  # tokens on which a checkpoint is compared
_GROUP = 64  # inputs of a weight of 4 bits that share a scale, as in the program's own drafts
_LEAST_GROUP = 32  # of vLLM's kernels


def save_draft_checkpoint(target: Target, plan: DraftPlan, folder: str | Path) -> Path:
    """Save the layers of a target that a plan keeps as a model of their own, and return its folder, which is created.

    Weights with a format are stored as ``compressed-tensors``, which vLLM, SGLang and transformers load. At 4 bits they have
    symmetric codes in groups of 64 inputs, or 32. At 8 bits they have a scale per output, and inputs are rounded to 8 bits,
    too. The output layer and the embeddings keep their bits. The source of such drafts is ML-SpecQD (arXiv 2503.13565).

    Raises:
        PlanError: the plan skips only one sub-layer of a layer, or all layers.
        UnsupportedModel: the target is quantised, the saved model does not compute the same as the skipped view, or the plan
            has formats and the package ``compressed-tensors`` is missing.
        ConfigError: the target is on several devices.
        FileExistsError: the folder is not empty.
    """
    field = "weights" if plan.formats else "mask"
    if not plan.is_whole_layers:
        raise PlanError(f"{field}: a checkpoint of kept layers needs both sub-layers of a layer skipped together")
    if getattr(target.model, "is_quantized", False):
        raise UnsupportedModel("target.quantization: no checkpoint can be cut out of a quantised model")
    check_not_split(target.model, "checkpoints of kept layers")
    if not (kept := [i for i in range(plan.layers) if not plan.attention[i]]):
        raise PlanError(f"{field}: skips every layer, so no layer is left to save")
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: is not empty")
    is_quantized = any(plan.sublayer_bits)
    if is_quantized and importlib.util.find_spec("compressed_tensors") is None:
        raise UnsupportedModel("weights: writing fewer bits needs compressed-tensors, of this package's extra quantised")
    expected = _logits(target, skip_view(target.model, plan.without_formats()))
    cut = Target(_cut(target.model, kept), target.tokenizer)
    if is_quantized:
        _compare(target, _logits(target, cut.model), expected)
    # Written to a temporary folder first, so that the final folder is always complete and checked.
    with atomic_folder(folder) as partial:
        if is_quantized:
            compressor = _quantized(cut.model, architecture(target.model), plan, kept)
            expected = _logits(target, cut.model)
            compressor.compress_model(cut.model)
            cut.save(partial)
            compressor.update_config(str(partial))
        else:
            cut.save(partial)
        loaded = AutoModelForCausalLM.from_pretrained(partial, dtype=target.model.dtype, use_safetensors=True)
        _compare(target, _logits(target, loaded), expected)
    return folder


def _cut(model: PreTrainedModel, kept: list[int]) -> PreTrainedModel:
    config, layers = copy.deepcopy(model.config), model.config.get_text_config(decoder=True).num_hidden_layers
    for part in {id(part): part for part in (config, config.get_text_config(decoder=True))}.values():
        _cut_fields(part, layers, kept)
    path = architecture(model).path
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(f"{path}.")}
    for place, index in enumerate(kept):
        weights |= model.get_submodule(f"{path}.{index}").state_dict(prefix=f"{path}.{place}.")
    cut: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    try:
        cut.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise UnsupportedModel(f"{type(model).__name__}: its configuration distinguishes layers by number") from error
    cut.generation_config = copy.deepcopy(model.generation_config)
    cut.eval()
    return cut


def _cut_fields(config: Any, layers: int, kept: list[int]) -> None:
    """Reduce every list with one entry per layer to the kept layers, and renumber every list of layer indices."""
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list)}
    for name, value in lists.items():
        if len(value) == layers and name != "architectures" and not name.endswith("token_id"):
            setattr(config, name, [value[i] for i in kept])
        elif name.endswith("_layers") and all(isinstance(i, int) and 0 <= i < layers for i in value):
            setattr(config, name, [kept.index(i) for i in value if i in kept])
    config.num_hidden_layers = len(kept)


def _quantized(model: PreTrainedModel, whole: Architecture, plan: DraftPlan, kept: list[int]) -> Any:
    """Let the linear layers of a cut model compute at the formats of a plan; return what compresses their weights.

    ``whole`` describes the model before the cut.
    """
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    layers: dict[int, dict[str, nn.Linear]] = {bits: {} for bits in plan.formats}
    for place, index in enumerate(kept):
        block = whole.blocks[index]
        for names, bits in ((block.attention, plan.attention_bits[index]), (block.mlp, plan.mlp_bits[index])):
            for name in (f"{whole.path}.{place}.{name}" for name in names if bits):
                found = model.get_submodule(name).named_modules(prefix=name)
                layers[bits] |= {name: module for name, module in found if type(module) is nn.Linear}
    groups = {NAMES[bits]: _scheme(bits, found) for bits, found in layers.items() if found}
    if not groups:
        raise UnsupportedModel(f"{type(model).__name__}: its layers have no linear layers to read at fewer bits")
    config = QuantizationConfig(config_groups=groups, quantization_status="frozen")
    apply_quantization_config(model, config, show_progress=False)
    for module in (module for found in layers.values() for module in found.values()):
        rows: Any = module
        weights = rows.quantization_scheme.weights
        size = weights.group_size or module.in_features
        low, high = module.weight.detach().view(module.out_features, -1, size).aminmax(dim=-1)
        scales, zeros = calculate_qparams(low, high, weights)
        rows.weight_scale.data.copy_(scales)
        rows.weight_zero_point.data.copy_(zeros)
    return ModelCompressor.from_pretrained_model(model)


def _scheme(bits: int, layers: dict[str, nn.Linear]) -> Any:
    """Return how linear layers, by name, compute at some bits."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    targets = [f"re:(.*\\.)?{re.escape(name)}$" for name in layers]  # vLLM's names of a draft's layers begin otherwise
    if bits == 4:
        size = math.gcd(_GROUP, *(layer.in_features for layer in layers.values()))
        if size < _LEAST_GROUP:
            raise UnsupportedModel(f"weights: 4 bits need layers whose inputs are a multiple of {_LEAST_GROUP}")
        weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=size)
        return QuantizationScheme(targets=targets, weights=weights)
    weights = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    inputs = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    return QuantizationScheme(targets=targets, weights=weights, input_activations=inputs)


@torch.inference_mode()
def _logits(target: Target, model: Any) -> Tensor:
    tokens = torch.arange(_PROBE_LENGTH, device=target.device) % target.vocabulary
    return forward(model.to(target.device).eval(), tokens, KVCache(target.layers, _PROBE_LENGTH), last=1)


def _compare(target: Target, found: Tensor, expected: Tensor) -> None:
    if not nearly_equal(found, expected):
        reason = "differs from the skipped model; something in its configuration depends on layer numbers"
        raise UnsupportedModel(f"{target.architecture}: a checkpoint of its kept layers {reason}")
