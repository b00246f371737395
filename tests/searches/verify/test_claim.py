"""Verdicts on claims, and the conditions that a report names, for every case of a claim and a measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate

from layerskip import Export, PromptSet, SpeculativeConfig, Target, TargetError, load_target
from layerskip.models.environment import environment
from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.app.targets import load_exported_target
from searches.verify import Claim, Speedup, differences, judge, judge_plain

RECORDS = Path(__file__).parents[3] / "notebooks" / "records"
TOLERANCE = 0.2  # the lowest speedup is 1.2 by the claim's value, 1.12 by its lower end
AS_CLAIMED, SLOWER = Speedup(1.5, 1.4, 1.6), Speedup(0.9, 0.8, 0.99)
FAR, TIE = Speedup(1.08, 1.05, 1.11), Speedup(1.0, 0.9, 1.11)  # both below what the claim allows
DOCTORED_VALUE = Speedup(3.0, 1.4, 1.6)
CLAIM = Claim(AS_CLAIMED)
OTHER = Claim(AS_CLAIMED, mean_acceptance_length=4.0, other_work=True)


@pytest.mark.parametrize(
    ("claim", "measured", "losslessness", "name", "clear"),
    [
        (CLAIM, AS_CLAIMED, "exact", "confirmed", True),
        (CLAIM, AS_CLAIMED, "near_tie", "confirmed", True),
        (CLAIM, Speedup(1.3, 1.2, 1.4), "exact", "confirmed", True),  # the intervals just meet
        (CLAIM, Speedup(1.5, 1.01, 2.2), "exact", "confirmed", True),  # wide, but above plain decoding
        (Claim(), Speedup(1.05, 1.01, 1.09), "exact", "confirmed", True),
        (CLAIM, Speedup(1.3, 1.2, 1.39), "exact", "weaker", True),  # significantly below the claim
        (CLAIM, Speedup(1.19, 1.01, 2.0), "exact", "weaker", False),  # wide, the value far below the claim
        (CLAIM, Speedup(1.1, 1.0, 1.2), "exact", "weaker", False),  # touches plain decoding
        (Claim(), Speedup(1.0, 0.9, 1.1), "exact", "weaker", False),
        (CLAIM, AS_CLAIMED, "unchecked", "weaker", False),
        (CLAIM, AS_CLAIMED, "different", "refuted", True),
        (CLAIM, SLOWER, "exact", "refuted", True),
        (CLAIM, FAR, "exact", "refuted", True),
        (CLAIM, TIE, "exact", "refuted", True),
        (Claim(DOCTORED_VALUE), AS_CLAIMED, "exact", "refuted", True),
        (Claim(Speedup(1.2, 1.4, 1.6)), AS_CLAIMED, "exact", "refuted", True),  # a value below its interval
        (Claim(Speedup(3.0, 1.4, 3.2)), AS_CLAIMED, "exact", "weaker", False),  # value and upper end doctored
        (Claim(Speedup(0.8, 0.7, 0.9)), Speedup(0.8, 0.7, 0.9), "exact", "refuted", True),  # slower, as claimed
        # Evidence of other prompts is not refuted for being out of reach.
        (OTHER, AS_CLAIMED, "exact", "confirmed", True),
        (OTHER, FAR, "exact", "weaker", True),
        (OTHER, TIE, "exact", "weaker", False),
        (OTHER, SLOWER, "exact", "refuted", True),
        (replace(OTHER, speedup=DOCTORED_VALUE), AS_CLAIMED, "exact", "refuted", True),
        (replace(OTHER, speedup=Speedup(6.0, 5.0, 7.0)), AS_CLAIMED, "exact", "refuted", True),  # more than its rounds allow
    ],
)
def test_a_claim_is_judged(claim: Claim, measured: Speedup, losslessness: str, name: str, clear: bool) -> None:
    verdict = judge(claim, measured, losslessness, TOLERANCE)
    assert (verdict.name, verdict.clear) == (name, clear), verdict.reason
    if name != "refuted":
        assert "prompts=" in verdict.reason or not claim.other_work


@pytest.mark.parametrize("measured", [Speedup(1.5, 1.5, 1.5), Speedup(0.8, 0.8, 0.8)], ids=["faster", "slower"])
def test_few_outputs_with_a_speed_confirm_and_refute_nothing(measured: Speedup) -> None:
    """The interval of a single prompt is a point."""
    verdict = judge(CLAIM, measured, "exact", TOLERANCE, prompts=1)
    assert (verdict.name, verdict.clear) == ("weaker", False)
    assert verdict.reason == "the outputs of only 1 prompts go on after their first token; 5 are the least."


@pytest.mark.parametrize(
    ("repeatable", "now", "name"),
    [(True, 3.9, "confirmed"), (True, 3.7, "confirmed"), (True, 3.5, "refuted"), (False, 1.8, "confirmed")],
)
def test_fewer_tokens_per_round_on_the_same_prompts_refute(repeatable: bool, now: float, name: str) -> None:
    """The machine does not change them, so they refute even a speedup within reach."""
    claim = Claim(AS_CLAIMED, mean_acceptance_length=4.0, repeatable=repeatable)
    verdict = judge(claim, AS_CLAIMED, "exact", TOLERANCE, now)
    assert (verdict.name, verdict.clear) == (name, True), verdict.reason


def test_the_record_claiming_4_is_refuted_unless_its_evidence_is_of_other_prompts() -> None:
    export = Export.load(RECORDS / "best-packed-smollm2-2-cores.json")
    measured = json.loads((RECORDS / "verify-doctored-packed-smollm2-2-cores.json").read_text(encoding="utf-8"))["measured"]
    found = Speedup(*(measured[name] for name in ("speedup", "speedup_low", "speedup_high")))
    held_out = PromptSet.packaged().split()[1]
    doctored = {"speedup": 4.0, "speedup_low": 3.5, "speedup_high": 4.6, "mean_acceptance_length": 5.0}
    doctored["tokens_per_second"] = 4.0 * export.evidence["baseline_tokens_per_second"]

    def verdict(decoded: PromptSet, max_new_tokens: int = 48, rounds: float | None = None, **changes: object) -> str:
        claim = Claim.of(replace(export, evidence={**export.evidence, **changes}), held_out, decoded, max_new_tokens)
        return judge(claim, found, measured["losslessness"]["verdict"], TOLERANCE, rounds).name

    assert export.evidence["max_new_tokens"] == 48
    rounds = float(export.evidence["mean_acceptance_length"])
    assert [verdict(held_out, rounds=rounds * share) for share in (1.0, 0.8)] == ["confirmed", "refuted"]
    # In shorter outputs, the last round has a larger share and lookups have less text.
    assert verdict(held_out, 16, rounds * 0.8) == "confirmed"
    assert verdict(held_out, 16, rounds, **doctored) == "weaker"
    assert verdict(held_out, **doctored) == "refuted"
    few = held_out.take(6)
    for same in ({}, {"prompts": None}, {"prompts_digest": few.digest, "prompts": None}, {"prompts_digest": None}):
        assert verdict(few, **doctored, **same) == "refuted"  # part of the same work, or prompts not stated
    assert verdict(held_out, **doctored, prompts_digest=held_out.take(12).digest, prompts=12) == "refuted"
    for other in ("0" * 64, "", 7, ["a"], PromptSet.packaged().split()[0].digest):
        assert verdict(held_out, **doctored, prompts_digest=other) == "weaker"
    assert verdict(held_out, **doctored | {"mean_acceptance_length": 1.8}, prompts_digest="0" * 64) == "refuted"


@pytest.mark.parametrize(
    ("claim", "name"),
    [
        (None, "confirmed"),
        (Speedup(1.0000001, 0.9, 1.1), "confirmed"),
        (Speedup(0.95, 0.9, 1.1), "refuted"),
        (Speedup(1.0, 1.2, 1.4), "refuted"),
    ],
)
def test_plain_decoding_has_a_speedup_of_one(claim: Speedup | None, name: str) -> None:
    assert judge_plain(claim).name == name


def test_evidence_has_an_interval_a_value_or_nothing() -> None:
    whole = {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 2, "tokens": 3}
    assert Speedup.claimed(whole) == Speedup(1.5, 1.4, 2.0)
    assert Speedup.claimed({"speedup": 1.5}) == Speedup(1.5, 1.5, 1.5)
    assert Speedup.claimed({"tokens_per_second": 40.0}) is None


@pytest.mark.parametrize(
    ("evidence", "named"),
    [
        ({"speedup": "fast"}, "speedup"),
        ({"speedup": 0.0}, "speedup"),
        ({"speedup_low": 1.0, "speedup_high": 2.0}, "speedup"),
        ({"speedup": 1.5, "speedup_low": 1.4}, "speedup_high"),
        ({"speedup": 1.5, "speedup_low": 2.0, "speedup_high": 1.0}, "speedup_low"),
    ],
)
def test_a_bad_speedup_in_the_evidence_is_refused(evidence: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=f"evidence.{named}:"):
        Speedup.claimed(evidence)


LOOKUP = SpeculativeConfig("prompt_lookup", 16, prompt_lookup_min=1, prompt_lookup_max=2)


def _conditions(target: Target, here: Any, digest: str = "", max_new_tokens: int = 1) -> dict[str, Any]:
    described = {"target": target.describe(), "environment": here}
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


FP8 = "{_target_:transformers.FineGrainedFP8Config,weight_block_size:[32,32]}"


def test_a_command_line_can_give_any_configuration(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, transformers itself refuses it, and the field is named."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    fields = ["target=local", f"target.path={tiny_folder}", f"target.quantization={FP8}"]
    config = compose_config("layerskip", fields)
    with pytest.raises(Exception, match=r"target\.quantization: .*(GPU|CUDA)") as error:
        instantiate(config.target)
    assert isinstance(error.value.__cause__, TargetError)


def test_an_export_of_a_quantised_target_is_verified_on_one(tiny_folder: Path) -> None:
    pytest.importorskip("torchao")
    target = load_target(str(tiny_folder), dtype="float32", device="cpu", quantization="torchao-int8")
    dense = load_target(str(tiny_folder), dtype="float32", device="cpu")
    export = Export(target.describe(), SpeculativeConfig())
    fields = compose_config("verify", ["export=best.json", "target.device=cpu"]).target
    loaded = load_exported_target(fields, export)
    assert (loaded.quantization, loaded.digest) == ("torchao-int8", target.digest)
    assert differences(export, _conditions(loaded, {})) == []
    changed = [("target.quantization", "torchao-int8", "None")]
    assert [tuple(one.values()) for one in differences(export, _conditions(dense, {}))] == changed
    plain = Export(dense.describe(), SpeculativeConfig())
    assert [one["field"] for one in differences(plain, _conditions(target, {}))] == ["target.quantization"]
