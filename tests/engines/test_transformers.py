"""Calls of transformers, executed: they generate what plain decoding does."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerskip import Export, SpeculativeConfig, StopRule, Target
from tests.tiny import save_tiny

PROMPT = "the cat in the hat, the cat in the"
LOOKUP = SpeculativeConfig("prompt_lookup", 5, prompt_lookup_min=1, prompt_lookup_max=3, match="first")
CONFIGS = {
    "none": SpeculativeConfig(),
    "lookup": LOOKUP,
    "model": SpeculativeConfig("draft_model", 3, draft_model="DRAFT", stop=StopRule("threshold", threshold=0.2)),
    "skip": SpeculativeConfig("layer_skip", 3, mask="layers:1"),
    "cascade": SpeculativeConfig("cascade", members=(LOOKUP, SpeculativeConfig("token_recycling", 3))),
}


@pytest.fixture(scope="module")
def expected(tiny_target: Target) -> str:
    inputs = tiny_target.tokenizer(PROMPT, return_tensors="pt")
    output = tiny_target.model.generate(**inputs, max_new_tokens=64, do_sample=False)
    return str(tiny_target.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_call_generates_the_text_of_plain_decoding(
    tiny_target: Target, expected: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS[name]
    if config.method == "draft_model":
        config = SpeculativeConfig(
            "draft_model", 3, draft_model=str(save_tiny(tmp_path / "draft", seed=1)), stop=config.stop
        )
    export = Export(Export.describe(tiny_target), config)
    export.save(tmp_path / "best.json")
    entry = export.engines(tmp_path / "best.json")["transformers"]
    assert "prepare" not in entry
    exec(compile(entry["call"], name, "exec"), {"prompt": PROMPT})
    assert capsys.readouterr().out == expected + "\n"
    assert (entry["method"] == "custom_generate") == (name in ("skip", "cascade"))
