"""Drafting through a view of the target whose weights have fewer bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from layerskip import SpeculativeConfig, Target, UnsupportedModel
from layerskip.decoding.drafter import Drafter
from layerskip.drafters.registry import build_drafter
from layerskip.kernels.cpu import Blocks, BlockWeight, has_kernels
from layerskip.models import packing
from layerskip.models.packing import few_rows_weight, set_packing
from layerskip.models.skip_view import decoding_view, quantized_view
from searches.space.search_space import SearchSpace
from searches.study.plan import drop_unsupported
from tests.accelerator import DEVICE
from tests.drafters.contract import SAMPLINGS, contract
from tests.families import build

pytestmark = pytest.mark.skipif(DEVICE != "cpu" or not has_kernels(), reason="needs a C++ compiler and AVX2 or AVX-512")


@pytest.fixture(autouse=True)
def small_weights() -> Iterator[None]:
    """Packs the small weights of tiny models, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))
        yield


def _drafter(target: Target, weights: str = "int4", **fields: object) -> Drafter:
    set_packing(target.model, True)
    given = {"method": "quantized", "weights": weights, "num_speculative_tokens": 3}
    return build_drafter(SpeculativeConfig.from_dict(given | fields), target)


TestInt4 = contract(_drafter, samplings=SAMPLINGS)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.004), (4, 0.05)])
def test_logits_of_a_view_are_near_those_of_the_target(bits: int, share: float) -> None:
    model = build("llama")
    set_packing(model, True)
    view, tokens = quantized_view(model, bits), torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        found, expected = view(input_ids=tokens).logits, model(input_ids=tokens).logits
    error = float((found - expected).abs().mean() / expected.abs().mean())
    assert share / 50 < error < share
    layers = [module for module in view.modules() if isinstance(module, torch.nn.Linear)]
    assert all(isinstance(few_rows_weight(layer), BlockWeight) for layer in layers)
    assert not any(isinstance(few_rows_weight(layer), BlockWeight) for layer in decoding_view(model).modules())
    assert quantized_view(model, bits) is view
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
        changed = quantized_view(model, bits)(input_ids=tokens).logits
    assert not torch.allclose(found, changed)


@pytest.mark.parametrize("width", [64, 96, 128, 7])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_the_nearest_ones(width: int, bits: int) -> None:
    weight = torch.randn(5, width)
    weight[2] = 0.25  # all the same
    blocks = Blocks.quantize(weight, bits)
    size = width // blocks.scales.shape[1]
    assert size == {64: 64, 96: 32, 128: 64, 7: 1}[width]
    levels = torch.arange(2**bits) * blocks.scales.unsqueeze(-1) + blocks.offsets.unsqueeze(-1)
    nearest = (weight.view(5, -1, size, 1) - levels.unsqueeze(-2)).abs().amin(-1)
    assert torch.allclose((weight - blocks.values()).abs(), nearest.flatten(1), atol=1e-6)
    assert float(nearest.amax()) <= float(blocks.scales.amax()) * 0.51 + 0.01
    assert torch.equal(blocks.scales.half().float(), blocks.scales)


def test_targets_without_faster_products_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    config = SpeculativeConfig("quantized")
    for model, reason in (
        (build("llama"), "its weights are not packed on a CPU"),
        (build("llama").bfloat16(), "its arithmetic is not float32|its weights are not packed on a CPU"),
    ):
        target = Target(model)
        if model.dtype == torch.bfloat16:
            set_packing(model, True)
        else:
            set_packing(model, False)
        with pytest.raises(UnsupportedModel, match=f"^quantized: ({reason})"):
            build_drafter(config, target)
        space = drop_unsupported(SearchSpace(layers=target.layers, protect_first=1, protect_last=1), target)
        assert "quantized" not in space.available_methods and "prompt_lookup" in space.available_methods
        assert "space.methods: quantized left out: its " in capsys.readouterr().out
