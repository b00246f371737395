"""The public interface, used as documented."""

from __future__ import annotations

import inspect
from pathlib import Path

import layerskip
from layerskip import Target

PUBLIC = {"load_target", "generate", "measure", "save_draft_checkpoint", "Sampling", "PromptSet", "Measurement"}


def test_the_documented_example_works(tiny_target: Target, tmp_path: Path) -> None:
    target, words = tiny_target, tiny_target.tokenizer
    assert words is not None
    config = layerskip.SpeculativeConfig.from_dict({"method": "layer_skip", "mask": "attention:0;mlp:1"})
    messages = [{"role": "user", "content": "a prompt"}]
    inputs = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    expected = target.model.generate(**inputs, do_sample=False, max_new_tokens=64)
    result = layerskip.generate(target, "a prompt", config, sampling=layerskip.Sampling(temperature=0.0), max_new_tokens=64)
    assert result.tokens == expected[0, inputs["input_ids"].shape[1] :].tolist()
    assert result.text == words.decode(result.tokens)
    assert 0.0 <= result.stats.acceptance_rate <= 1.0
    assert 1.0 <= result.stats.mean_acceptance_length <= 5.0
    plain = layerskip.generate(target, messages)
    assert (plain.tokens, plain.stats.drafted) == (result.tokens, 0)

    measurement = layerskip.measure(target, layerskip.PromptSet.of(["one prompt", "another"]), config, max_new_tokens=8)
    assert isinstance(measurement, layerskip.Measurement)
    assert measurement.lossless.verdict == "exact"

    layerskip.Export(layerskip.Export.describe(target), config).save(tmp_path / "best.json")
    export = layerskip.Export.load(tmp_path / "best.json")
    assert export.config == config
    custom = target.model.generate(**inputs, do_sample=False, max_new_tokens=64, custom_generate=export.custom_generate())
    assert custom.equal(expected)


def test_all_public_names_exist_and_are_documented_and_all_errors_are_value_errors() -> None:
    """A program can catch ValueError for any invalid input."""
    assert set(layerskip.__all__) >= PUBLIC
    for name in layerskip.__all__:
        value = getattr(layerskip, name)
        assert inspect.getdoc(value), name
        assert not (isinstance(value, type) and issubclass(value, Exception)) or issubclass(value, ValueError)
