"""The report of a verification names everything that differs from the export's conditions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerskip import Export, SpeculativeConfig, Target
from layerskip.models.environment import environment
from searches.verification.report import compute_speed_change, differences

LOOKUP = SpeculativeConfig("prompt_lookup", 16, ngram_min=1, ngram_max=2)
SECONDS = {"baseline_prefill_seconds": 1.0, "baseline_decode_seconds": 10.0}
HERE: dict[str, Any] = {"prompts": {"digest": "abc"}, "max_new_tokens": 48}
RECORDS = Path(__file__).parents[3] / "notebooks" / "records"


def test_every_difference_is_named(tiny_target: Target) -> None:
    here = environment(tiny_target)
    there = here | {"threads": 999, "versions": here["versions"] | {"torch": "1.0"}}
    conditions = {
        "target": Export.describe(tiny_target),
        "environment": here,
        "prompts": {"digest": "abc"},
        "max_new_tokens": 48,
    }
    same = {"prompts_digest": "abc", "max_new_tokens": 48, "speedup": 1.5}
    assert differences(Export(conditions["target"], LOOKUP, evidence=same, environment=here), conditions) == []
    other = Export(conditions["target"], LOOKUP, evidence=same | {"max_new_tokens": 128}, environment=there)
    found = {difference["field"]: difference["exported"] for difference in differences(other, conditions)}
    assert found == {"environment.threads": "999", "environment.versions.torch": "1.0", "evidence.max_new_tokens": "128"}


@pytest.mark.parametrize(
    ("share", "sentence"),
    [
        (0.15, "computes slower, and drafts gain less"),
        (0.07, "computes faster, and drafts gain more"),
        (0.11, None),
    ],
)
def test_a_change_of_compute_speed_is_reported(share: float, sentence: str | None, tiny_target: Target) -> None:
    export = _export(tiny_target, **SECONDS)
    measured = {"baseline_prefill_seconds": 30 * share, "baseline_decode_seconds": 30.0}  # three repeats
    change = compute_speed_change(export, HERE | {"measured": measured})
    assert (change is None) if sentence is None else (change is not None and sentence in change)


@pytest.mark.parametrize(
    "figures",
    [
        pytest.param({"baseline_decode_seconds": 10.0}, id="no seconds of prefill"),
        pytest.param({"baseline_prefill_seconds": "1", "baseline_decode_seconds": 10.0}, id="not a number"),
        pytest.param({"baseline_prefill_seconds": 1.0, "baseline_decode_seconds": 0.0}, id="nothing decoded"),
        pytest.param(SECONDS | {"max_new_tokens": 128}, id="other work"),
        pytest.param(SECONDS | {"prompts_digest": "xyz"}, id="of other prompts"),
        pytest.param(SECONDS | {"prompts_digest": None}, id="of unknown prompts"),
    ],
)
def test_incomparable_figures_report_no_change(figures: dict[str, Any], tiny_target: Target) -> None:
    measured = {"baseline_prefill_seconds": 3.0, "baseline_decode_seconds": 10.0}
    assert compute_speed_change(_export(tiny_target, **figures), HERE | {"measured": measured}) is None


def test_no_change_is_reported_for_the_kept_record() -> None:
    export = Export.load(RECORDS / "best-packed-smollm2-2-cores.json")
    record = json.loads((RECORDS / "verify-packed-smollm2-2-cores.json").read_text(encoding="utf-8"))
    assert compute_speed_change(export, record) is None


def _export(target: Target, **evidence: Any) -> Export:
    evidence = {"prompts_digest": "abc", "max_new_tokens": 48} | evidence
    stated = {name: value for name, value in evidence.items() if value is not None}
    return Export(Export.describe(target), LOOKUP, evidence=stated)
