"""Blocks of GGUF files, against their unpacking by the library ``gguf`` and by transformers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from layerskip import SpeculativeConfig, TargetError, generate, load_target
from layerskip.kernels.cpu import BlockWeight, FewRowsWeight, has_kernels
from layerskip.models import packing
from layerskip.models.gguf_blocks import KINDS, unpack
from layerskip.models.loading import load_draft
from layerskip.models.packing import few_rows_weight, has_blocks
from layerskip.models.skip_view import copies_bytes, decoding_view
from layerskip.models.target import described_precision
from tests.accelerator import DEVICE
from tests.tiny import save_gguf, save_tiny

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
