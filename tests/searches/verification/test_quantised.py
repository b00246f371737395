"""Quantised targets of searches: on the command line, and of an export that is verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate

from layerskip import Export, SpeculativeConfig, TargetError, load_target
from searches.app.composition import compose_config
from searches.app.exported import load_exported_target
from searches.verification.report import differences

FP8 = "{_target_:transformers.FineGrainedFP8Config,weight_block_size:[32,32]}"


@pytest.mark.parametrize(
    "given", [FP8, "{quant_method:fp8,weight_block_size:[32,32]}", "fp8"], ids=["object", "mapping", "name"]
)
def test_a_command_line_can_give_any_configuration(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Without a GPU, transformers itself, or this package for a name, refuses it, and the field is named."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    fields = ["target=local", f"target.path={tiny_folder}", f"target.quantization={given}"]
    config = compose_config("layerskip", fields)
    with pytest.raises(Exception, match=r"target\.quantization: .*(GPU|CUDA)") as error:
        instantiate(config.target)
    assert isinstance(error.value.__cause__, TargetError)


def _conditions(target: Any) -> dict[str, Any]:
    return {
        "target": Export.describe(target),
        "environment": {},
        "prompts": {"digest": ""},
        "max_new_tokens": 1,
    }


def test_an_export_of_a_quantised_target_is_verified_on_one(tiny_folder: Path) -> None:
    pytest.importorskip("torchao")
    target = load_target(str(tiny_folder), dtype="float32", device="cpu", quantization="torchao-int8")
    dense = load_target(str(tiny_folder), dtype="float32", device="cpu")
    export = Export(Export.describe(target), SpeculativeConfig())
    fields = compose_config("verify", ["export=best.json", "target.device=cpu"]).target
    loaded = load_exported_target(fields, export)
    assert (loaded.quantization, loaded.digest) == ("torchao-int8", target.digest)
    assert differences(export, _conditions(loaded)) == []
    changed = [("target.quantization", "torchao-int8", "None")]
    assert [tuple(one.values()) for one in differences(export, _conditions(dense))] == changed
    plain = Export(Export.describe(dense), SpeculativeConfig())
    assert [one["field"] for one in differences(plain, _conditions(target))] == ["target.quantization"]
