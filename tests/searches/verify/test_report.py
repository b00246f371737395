"""The report of a verification names everything that differs from the export's conditions, quantisation included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate

from layerskip import Export, SpeculativeConfig, Target, TargetError, load_target
from layerskip.models.environment import environment
from searches.app.composition import compose_config
from searches.app.targets import load_exported_target
from searches.verify import compute_speed_change, differences

LOOKUP = SpeculativeConfig("prompt_lookup", 16, prompt_lookup_min=1, prompt_lookup_max=2)
SECONDS = {"baseline_prefill_seconds": 1.0, "baseline_decode_seconds": 10.0}


def _conditions(target: Target, here: Any, digest: str = "", max_new_tokens: int = 1) -> dict[str, Any]:
    described = {"target": Export.describe(target), "environment": here}
    return described | {"prompts": {"digest": digest}, "max_new_tokens": max_new_tokens}


def test_every_difference_is_named(tiny_target: Target) -> None:
    here = environment(tiny_target)
    there = here | {"threads": 999, "versions": here["versions"] | {"torch": "1.0"}}
    conditions = _conditions(tiny_target, here, "abc", 48)
    same = {"prompts_digest": "abc", "max_new_tokens": 48, "speedup": 1.5}
    assert differences(Export(conditions["target"], LOOKUP, evidence=same, environment=here), conditions) == []
    other = Export(conditions["target"], LOOKUP, evidence=same | {"max_new_tokens": 128}, environment=there)
    found = {difference["field"]: difference["exported"] for difference in differences(other, conditions)}
    assert found == {"environment.threads": "999", "environment.versions.torch": "1.0", "evidence.max_new_tokens": "128"}


def _speed_change(target: Target, evidence: dict[str, Any], share: float) -> str | None:
    """Return the sentence on a machine whose prefill takes a share of plain decoding's time."""
    stated = {"prompts_digest": "abc", "max_new_tokens": 48} | evidence
    export = Export(Export.describe(target), LOOKUP, evidence={k: v for k, v in stated.items() if v is not None})
    measured = {"baseline_prefill_seconds": 30 * share, "baseline_decode_seconds": 30.0}  # three repeats
    return compute_speed_change(export, {"prompts": {"digest": "abc"}, "max_new_tokens": 48, "measured": measured})


@pytest.mark.parametrize(("share", "sentence"), [(0.15, "slower, and drafts gain less"), (0.07, "faster, and drafts gain")])
def test_a_change_of_compute_speed_is_reported(share: float, sentence: str, tiny_target: Target) -> None:
    change = _speed_change(tiny_target, SECONDS, share)
    assert change is not None and sentence in change
    assert _speed_change(tiny_target, SECONDS, 0.11) is None


@pytest.mark.parametrize(
    "metrics",
    [
        {"baseline_decode_seconds": 10.0},
        {"baseline_prefill_seconds": 1.0, "baseline_decode_seconds": 0.0},
        SECONDS | {"max_new_tokens": 128},
        SECONDS | {"prompts_digest": None},
    ],
)
def test_incomparable_figures_report_no_change(metrics: dict[str, Any], tiny_target: Target) -> None:
    assert _speed_change(tiny_target, metrics, 0.3) is None


FP8 = "{_target_:transformers.FineGrainedFP8Config,weight_block_size:[32,32]}"


@pytest.mark.parametrize("given", [FP8, "fp8"])
def test_a_command_line_can_give_any_configuration(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Without a GPU, transformers itself, or this package for a name, refuses it, and the field is named."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    fields = ["target=local", f"target.path={tiny_folder}", f"target.quantization={given}"]
    config = compose_config("layerskip", fields)
    with pytest.raises(Exception, match=r"target\.quantization: .*(GPU|CUDA)") as error:
        instantiate(config.target)
    assert isinstance(error.value.__cause__, TargetError)


def test_an_export_of_a_quantised_target_is_verified_on_one(tiny_folder: Path) -> None:
    pytest.importorskip("torchao")
    target = load_target(str(tiny_folder), dtype="float32", device="cpu", quantization="torchao-int8")
    dense = load_target(str(tiny_folder), dtype="float32", device="cpu")
    export = Export(Export.describe(target), SpeculativeConfig())
    fields = compose_config("verify", ["export=best.json", "target.device=cpu"]).target
    loaded = load_exported_target(fields, export)
    assert (loaded.quantization, loaded.digest) == ("torchao-int8", target.digest)
    assert differences(export, _conditions(loaded, {})) == []
    changed = [("target.quantization", "torchao-int8", "None")]
    assert [tuple(one.values()) for one in differences(export, _conditions(dense, {}))] == changed
    plain = Export(Export.describe(dense), SpeculativeConfig())
    assert [one["field"] for one in differences(plain, _conditions(target, {}))] == ["target.quantization"]
