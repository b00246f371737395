"""Blocks of GGUF files, against their unpacking by the library ``gguf`` and by transformers."""

from __future__ import annotations

import copy
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip import SpeculativeConfig, TargetError, generate, load_target
from layerskip.device.trial import nearly_equal
from layerskip.kernels.cpu import BlockWeight, FewRowsWeight, has_kernels
from layerskip.models import packing
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.gguf_blocks import KINDS, unpack
from layerskip.models.loading import load_draft
from layerskip.models.packing import few_rows_weight, has_blocks
from layerskip.models.skip_view import copies_bytes, decoding_view
from layerskip.models.target import described_precision
from tests.accelerator import DEVICE
from tests.tiny import _gguf_name, reading_once, save_gguf, save_tiny

pytestmark = pytest.mark.skipif(DEVICE != "cpu" or not has_kernels(), reason="needs a C++ compiler and AVX2 or AVX-512")
_HALVES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}  # places of the numbers of float16; else the first two
_SIZES = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)


@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_blocks_have_the_values_that_gguf_reads(kind: str) -> None:
    own = gguf.GGMLQuantizationType[kind]
    source = numpy.random.default_rng(0)
    data = source.integers(0, 256, (5, 3, gguf.GGML_QUANT_SIZES[own][1]), dtype=numpy.uint8)
    for place in _HALVES.get(kind, (0, 2)):
        halves = source.standard_normal((5, 3, 1)).astype(numpy.float16)
        data[..., place : place + 2] = halves.view(numpy.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(data.reshape(5, -1), own))
    assert torch.equal(unpack(data.reshape(5, -1), own, expected).values(), expected)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0"])  # codes of 4 and of 8 bits
def test_a_native_target_decodes_as_the_float32_model_of_its_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))
    folder = save_tiny(tmp_path / "tiny", **_SIZES)
    stored = load_file(folder / "model.safetensors")
    for weight in stored.values():
        if weight.ndim == 2:
            weight[5, :32] = weight[6, :32]  # their rows are told apart by other values
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    file = str(save_gguf(folder, tmp_path / "tiny.gguf", kind))
    native, dense = (load_target(file, dtype=dtype, device="cpu") for dtype in ("native", "float32"))
    layers = [module for module in decoding_view(native.model).modules() if isinstance(module, torch.nn.Linear)]
    assert len(layers) == 3 * 7 + 1
    assert all(isinstance(few_rows_weight(layer), FewRowsWeight) for layer in layers)
    tokens = generate(native, [7, 8, 9], max_new_tokens=24).tokens
    assert tokens == generate(dense, [7, 8, 9], max_new_tokens=24).tokens
    assert (native.dtype, native.precision, dense.precision) == ("float32", "native", "float32")
    assert native.describe() == dense.describe() | {"weights": "blocks"}
    assert native.digest != dense.digest  # or one would predict by the cost profile of the other
    assert described_precision(native.describe()) == "native"
    assert load_draft(native, file).precision == "mixed"  # a draft may be rounded
    with torch.no_grad():
        layers[0].weight.mul_(0.5)
    assert not isinstance(few_rows_weight(layers[0]), BlockWeight)  # the blocks are of other values
    assert has_blocks(native.model)


_WIDE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_BLOCKS = {  # by the last part of a module's name; blocks of 2 and 3 bits are unpacked
    "Q4_K_M": {"": "Q4_K", "v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K"},
    "Q5_K_S": {"": "Q5_K"},
    "Q3_K_M": {"": "Q3_K", "v_proj": "Q5_K", "o_proj": "Q4_K", "down_proj": "Q4_K", "lm_head": "Q6_K"},
    "Q2_K": {"": "Q2_K", "v_proj": "Q3_K", "lm_head": "Q6_K"},
}


def _unpacked(folder: Path, file: Path) -> PreTrainedModel:
    """Return the model of a folder with the weights of a file as ``gguf`` alone reads them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stored = {part.name: part for part in gguf.GGUFReader(file).tensors}
    for name, weight in model.named_parameters():
        part = stored[_gguf_name(name)]
        values = torch.tensor(gguf.quants.dequantize(part.data, part.tensor_type)).view(weight.shape)
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp rotates adjacent pairs
            values = values.view(-1, _WIDE["head_dim"] // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        weight.data.copy_(values)
    return model


@pytest.mark.parametrize("name", _BLOCKS)
def test_files_with_k_quants_have_the_logits_of_their_unpacked_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In steps and in verifications; also where only some types of blocks are read as they are in the file."""
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))
    reading_once(monkeypatch)
    folder = save_tiny(tmp_path / "tiny", num_hidden_layers=2, tie_word_embeddings=False, **_WIDE)
    file = save_gguf(folder, tmp_path / "tiny.gguf", _BLOCKS[name])
    exact, tokens = _unpacked(folder, file), torch.arange(7, 27)
    rounded = copy.deepcopy(exact)
    for weight in rounded.parameters():
        weight.data.copy_(weight.data.bfloat16())
    for dtype, reference in (("native", exact), ("float32", exact), ("mixed", rounded)):
        target = load_target(str(file), dtype=dtype, device="cpu", pack_weights=True)
        view, cache = decoding_view(target.model), KVCache(target.layers, len(tokens))
        with torch.inference_mode():
            expected = reference(tokens[None]).logits[0]
            for block in torch.split(tokens, (9, 1, 1, 1, 5, 3)):
                logits = forward(view, block, cache, last=len(block))
                assert nearly_equal(logits, expected[cache.length : cache.length + len(block)], 1e-4)
                cache.length += len(block)
    kinds = [_BLOCKS[name].get(part, _BLOCKS[name][""]) for part in (*2 * _LINEAR, "lm_head")]
    kept = sum(kind in KINDS for kind in kinds)
    warning = f"target.dtype=native: {kept} of {len(kinds)} linear layers are in blocks; the others are dense"
    assert [record.getMessage() for record in caplog.records] == ([warning] if kept < len(kinds) else [])


@pytest.mark.parametrize("dtype", ["float32", "mixed"])
@pytest.mark.parametrize(
    ("kind", "bits", "exact"),
    [("Q4_1", 4, True), ("Q4_0", 8, True), ("Q5_0", 8, True), ("Q8_0", 8, True), ("Q8_0", 4, False), ("Q5_0", 4, False)],
)
def test_a_draft_of_fewer_bits_reads_the_blocks_of_the_file(
    kind: str, bits: int, exact: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their values are the file's; those of the target may be rounded. Others are quantised again."""
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))
    folder = save_tiny(tmp_path / "tiny", **_SIZES)
    file = str(save_gguf(folder, tmp_path / "tiny.gguf", kind))
    target, stored = (load_target(file, dtype=name, device="cpu", pack_weights=True) for name in (dtype, "float32"))
    layer, own = (each.model.get_submodule("model.layers.1.mlp.down_proj").weight for each in (target, stored))
    found = packing._blocks(layer, bits)
    assert torch.equal(found.values(), own.detach()) == exact
    config = SpeculativeConfig.from_dict({"method": "quantized", "weights": f"int{bits}", "num_speculative_tokens": 3})
    expected = copies_bytes(target.model, config.plans(target.layers))
    drafted = generate(target, [7, 8, 9], config, max_new_tokens=24)
    made = copies_bytes(target.model, config.plans(target.layers))
    assert 0 < sum(made.values()) <= sum(expected.values())
    assert made == expected or not exact or kind == "Q4_0"  # codes of 4 bits stay so for a draft at 8
    assert drafted.tokens == generate(target, [7, 8, 9], max_new_tokens=24).tokens
    assert drafted.stats.acceptance_rate > 0.6 or not exact
    with monkeypatch.context() as patch:
        patch.setattr("layerskip.models.loading.offer_file_blocks", lambda *_, **__: None)
        without = load_target(file, dtype=dtype, device="cpu", pack_weights=True)
    assert without.digest != target.digest  # or one would predict by the cost profile of the other
    with torch.no_grad():
        layer.mul_(0.5)
    assert not torch.equal(packing._blocks(layer, bits).values(), own.detach())


def test_a_draft_does_without_a_file_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))
    file = save_gguf(save_tiny(tmp_path / "tiny", **_SIZES), tmp_path / "tiny.gguf", "Q4_0")
    target = load_target(str(file), dtype="mixed", device="cpu", pack_weights=True)
    plain = generate(target, [7, 8, 9], max_new_tokens=24).tokens
    file.unlink()
    drafted = generate(target, [7, 8, 9], SpeculativeConfig("quantized", 3), max_new_tokens=24)
    assert drafted.tokens == plain


def test_what_is_not_in_blocks_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    plain = save_gguf(tiny_folder, tmp_path / "plain.gguf")
    for source, packs, reason in (
        (plain, None, "needs linear layers in one of Q4_0, .*plain.gguf has none"),
        (tiny_folder, None, "is for a .gguf file, and "),
        (plain, False, "needs packed weights"),
    ):
        with pytest.raises(TargetError, match=f"^target.dtype: native {reason}"):
            load_target(str(source), dtype="native", device="cpu", pack_weights=packs)
