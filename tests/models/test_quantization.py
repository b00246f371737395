"""Quantised targets: the same output as transformers' generate of the same model, and one line for what cannot work.

The packages are optional: the extra ``quantised`` installs torchao, which quantises on a CPU, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from layerskip import ConfigError, Export, SpeculativeConfig, Target, TargetError, UnsupportedModel, generate, load_target
from layerskip.config import StopRule
from layerskip.drafters.eagle import Eagle
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.readout import Readout
from layerskip.models import weights
from layerskip.models.packing import uses_packing
from layerskip.models.skip_view import decoding_view
from tests.models.passes import LENGTH, METHODS, PROMPT, assert_every_method_gives, greedy
from tests.tiny import VOCABULARY, save_gguf, save_tiny

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def _torchao(name: str = "Int8WeightOnlyConfig", granularity: str = "", **changes: Any) -> Any:
    ao = pytest.importorskip("torchao.quantization")
    fields = {"granularity": getattr(ao, granularity)()} if granularity else {}
    return transformers.TorchAoConfig(getattr(ao, name)(set_inductor_config=False, version=2, **fields), **changes)


def _load(folder: Path, how: Any) -> Target:
    if isinstance(how, str):
        pytest.importorskip(how.partition("-")[0])
    return load_target(str(folder), dtype="float32", device="cpu", quantization=how)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models without and with sliding windows, shorter than prompt and output."""
    base = tmp_path_factory.mktemp("dense")
    return {family: save_tiny(base / family, family, idle=[1], **SIZES) for family in ("llama", "gemma3_text")}


@pytest.mark.parametrize(("family", "name"), [("llama", "bitsandbytes-4bit"), ("gemma3_text", "torchao-int8")])
def test_a_quantised_target_decodes_as_in_transformers(folders: dict[str, Path], family: str, name: str) -> None:
    target = _load(folders[family], name)
    assert_every_method_gives(greedy(target), target)


def test_weights_are_quantised_and_the_views_share_them(folders: dict[str, Path]) -> None:
    """Heads read the dense output layer. Where packing is asked for, it alone may be packed."""
    target, name = _load(folders["llama"], "torchao-int8"), "model.layers.1.mlp.up_proj"
    weight = target.model.get_submodule(name).weight
    own = load_target(str(folders["llama"]), dtype="float32", device="cpu").model.get_submodule(name).weight.detach()
    assert weight.qdata.dtype == torch.int8
    assert 0 < float((weight.dequantize() - own).abs().max()) <= float(own.abs().max()) / 127
    assert decoding_view(target.model).get_submodule(name).weight is weight
    assert (target.vocabulary, target.hidden, target.dtype) == (VOCABULARY, 64, "float32")
    head, packed = EagleHead(EagleShape.of(target)).eval(), Target(target.model, pack_weights=True)
    drafter = Eagle(head, target, 3, StopRule())
    for method in (drafter, SpeculativeConfig()):
        assert generate(packed, PROMPT, method, max_new_tokens=LENGTH).tokens == greedy(target)
    view = decoding_view(packed.model)
    kinds = {type(layer) for layer in view.get_submodule("model").modules() if isinstance(layer, nn.Linear)}
    assert kinds == {nn.Linear}
    assert (type(view.get_output_embeddings()) is not nn.Linear) == uses_packing(packed.model)


def test_rows_of_a_quantised_output_layer_are_refused(folders: dict[str, Path]) -> None:
    target = _load(folders["llama"], _torchao(include_input_output_embeddings=True))
    assert generate(target, PROMPT, max_new_tokens=LENGTH).tokens == greedy(target)
    with pytest.raises(ConfigError, match=r"^target\.quantization: heads read rows of the output layer"):
        Readout(target, None)


@pytest.mark.parametrize("kind", ["none", "layer_skip"])
def test_scales_of_a_whole_pass_are_refused_and_those_of_tokens_are_not(folders: dict[str, Path], kind: str) -> None:
    """With one scale for all, a token's result would depend on the tokens that are verified with it."""
    whole, each = (_torchao("Int8DynamicActivationInt8WeightConfig", name) for name in ("PerTensor", "PerRow"))
    target, config = _load(folders["llama"], whole), SpeculativeConfig.from_dict(METHODS[kind])
    with pytest.raises(UnsupportedModel, match=r"^target\.quantization: .*q_proj .* beside other tokens") as error:
        generate(target, PROMPT, config, max_new_tokens=4)
    assert "\n" not in str(error.value)
    target = _load(folders["llama"], each)
    assert generate(target, PROMPT, config, max_new_tokens=LENGTH).tokens == greedy(target)


def test_an_export_tells_a_quantised_target_apart_and_loads_it_again(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["llama"]
    dense = load_target(str(folder), dtype="float32", device="cpu")
    for how in ("torchao-int8", _torchao()):
        target = _load(folder, how)
        Export(target.describe(), SpeculativeConfig()).save(tmp_path / "best.json")
        stored = json.loads((tmp_path / "best.json").read_text())["target"]
        assert {name for name in stored if stored[name] != dense.describe().get(name)} == {"quantization"}
        again = _load(folder, stored["quantization"])
        assert again.describe() == stored
        assert again.digest == target.digest != dense.digest
    assert "quantization" not in dense.describe()


def test_a_checkpoint_that_is_quantised_needs_no_setting(folders: dict[str, Path], tmp_path: Path) -> None:
    target = _load(folders["llama"], "torchao-int8")
    target.save(tmp_path)
    stored = _load(tmp_path, None)
    assert stored.model.get_submodule("model.layers.0.mlp.up_proj").weight.qdata.dtype == torch.int8
    assert stored.weights_sample == target.weights_sample
    config = SpeculativeConfig.from_dict(METHODS["layer_skip"])
    assert generate(stored, PROMPT, config, max_new_tokens=LENGTH).tokens == greedy(target)


@pytest.mark.parametrize(
    ("name", "installed", "words"),
    [
        ("int3", True, list(weights.QUANTIZATIONS)),
        ("torchao-int8", False, ["the package torchao"]),
        ("bitsandbytes-4bit", False, ["the package bitsandbytes"]),
        ("fp8", True, ["CUDA"]),
        ("torchao-int4", True, ["CUDA"]),
        ("bitsandbytes-8bit", True, ["target.dtype=float16"]),
        ({"quant_method": "hqq", "nbits": 4}, True, ["hqq"]),  # as transformers names it
    ],
    ids=str,
)
def test_what_cannot_be_quantised_is_refused_with_its_reason(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, name: Any, installed: bool, words: list[str]
) -> None:
    monkeypatch.setattr(weights, "find_spec", lambda _: installed or None)
    with pytest.raises(TargetError, match=r"^target\.quantization: ") as error:
        load_target(str(tiny_folder), dtype="float32", device="cpu", quantization=name)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "method"), [("torchao-int4", "torchao"), ("fp8", "fp8")])
def test_a_mode_for_a_card_is_a_setting_of_transformers(name: str, method: str) -> None:
    found = weights.quantization_config(name, torch.bfloat16, torch.device("cuda"))
    assert found.quant_method == method


def test_files_and_models_of_which_nothing_can_be_quantised_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"^target\.quantization: .*GGUF"):
        _load(save_gguf(tiny_folder, tmp_path / "tiny.gguf"), "torchao-int8")
    with pytest.raises(TargetError, match=r"^target\.quantization: .*no layer"):
        _load(tiny_folder, _torchao(modules_to_not_convert=["model", "lm_head"]))
