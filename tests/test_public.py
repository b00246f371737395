"""The public interface, used as documented."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import layerskip
from tests.accelerator import DEVICE
from tests.tiny import save_tiny

PUBLIC = {
    "load_target",
    "generate",
    "measure",
    "save_draft_checkpoint",
    "SpeculativeConfig",
    "Sampling",
    "Export",
    "SkipMask",
    "PromptSet",
    "Measurement",
}
CONFIGS = [
    {"method": "none"},
    {"method": "layer_skip", "mask": "attention:6,7-9;mlp:2", "num_speculative_tokens": 4},
    {"method": "layer_skip", "mask": "layers:4-8", "num_speculative_tokens": 4},
    {"method": "layer_skip", "mask": "layers:4-6;mlp:1", "num_speculative_tokens": 2},
    {"method": "prompt_lookup", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 6},
    {"method": "draft_model", "draft_model": "some/hub-id", "num_speculative_tokens": 3},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("public") / "llama", num_hidden_layers=10)


def test_the_documented_example_works(folder: Path, tmp_path: Path) -> None:
    target = layerskip.load_target(str(folder), dtype="float32", device=DEVICE)
    config = layerskip.SpeculativeConfig.from_dict(
        {"method": "layer_skip", "mask": "attention:6,7-9;mlp:2", "num_speculative_tokens": 4}
    )
    result = layerskip.generate(target, "a prompt", config, sampling=layerskip.Sampling(temperature=0.0), max_new_tokens=64)
    assert target.tokenizer is not None
    inputs = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "a prompt"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    length = inputs["input_ids"].shape[1]
    expected = target.model.generate(**inputs, do_sample=False, max_new_tokens=64)
    assert result.tokens == expected[0, length:].tolist()
    assert result.text == target.tokenizer.decode(result.tokens)
    assert 0.0 <= result.stats.acceptance_rate <= 1.0
    assert 1.0 <= result.stats.mean_acceptance_length <= 5.0
    messages = [{"role": "user", "content": "a prompt"}]
    assert layerskip.generate(target, messages, config).tokens == result.tokens
    assert layerskip.generate(target, inputs["input_ids"][0].tolist(), config).tokens == result.tokens

    prompts = layerskip.PromptSet.of(["one prompt", "another"])
    measurement = layerskip.measure(target, prompts, config, max_new_tokens=8)
    assert isinstance(measurement, layerskip.Measurement)
    assert measurement.lossless.verdict == "exact"

    layerskip.Export(layerskip.Export.describe(target), config).save(tmp_path / "best.json")
    export = layerskip.Export.load(tmp_path / "best.json")
    assert export.config == config
    custom = target.model.generate(**inputs, do_sample=False, max_new_tokens=64, custom_generate=export.custom_generate())
    assert custom.equal(expected)


@pytest.mark.parametrize("fields", CONFIGS, ids=lambda fields: fields["method"])
def test_configurations_round_trip(fields: dict[str, object]) -> None:
    config = layerskip.SpeculativeConfig.from_dict(fields)
    written = config.to_dict()
    assert layerskip.SpeculativeConfig.from_dict(written) == config
    assert {name: written[name] for name in fields if name != "mask"} == {
        name: value for name, value in fields.items() if name != "mask"
    }


@pytest.mark.parametrize("fields", CONFIGS, ids=lambda fields: fields["method"])
@pytest.mark.parametrize("key", ["drafter", "gamma", "Kind"])
def test_an_unknown_key_is_refused_by_name(fields: dict[str, object], key: str) -> None:
    with pytest.raises(layerskip.ConfigError, match=f"^{key}: "):
        layerskip.SpeculativeConfig.from_dict(fields | {key: 1})


def test_masks_and_prompts_are_public() -> None:
    mask = layerskip.SkipMask.parse("attention:6,7-9;mlp:2", 30)
    assert [i for i, skipped in enumerate(mask.attention) if skipped] == [6, 7, 8, 9]
    assert [i for i, skipped in enumerate(mask.mlp) if skipped] == [2]
    assert len(layerskip.PromptSet.packaged()) >= 40


def test_all_public_names_exist_and_are_documented() -> None:
    assert set(layerskip.__all__) >= PUBLIC
    for name in layerskip.__all__:
        assert inspect.getdoc(getattr(layerskip, name)), name


def test_all_errors_are_value_errors() -> None:
    """A program can catch ValueError for any invalid input."""
    for name in layerskip.__all__:
        value = getattr(layerskip, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, ValueError)


def test_importing_layerskip_loads_no_search_program() -> None:
    check = "import sys, layerskip; print(*{'hydra', 'optuna', 'mlflow', 'searches'} & set(sys.modules))"
    completed = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == []


def test_generate_decodes_plainly_and_greedily_by_default(folder: Path) -> None:
    target = layerskip.load_target(str(folder), dtype="float32", device=DEVICE)
    result = layerskip.generate(target, [9, 30, 31])
    tokens = torch.tensor([[9, 30, 31]])
    expected = target.model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=64)
    assert result.tokens == expected[0, 3:].tolist()
    assert result.stats.drafted == 0
