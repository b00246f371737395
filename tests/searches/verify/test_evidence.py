"""A lossy export is measured only if allowed, and evidence of other prompts is not refuted by these.

The whole program runs, except for decoding: measurements are given, so that results do not depend on the machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from layerskip import Export, PromptSet, SpeculativeConfig, Target
from layerskip.decoding.stats import DecodeStats
from layerskip.drafters.datastore import Datastore
from layerskip.files import digest
from layerskip.measure.losslessness import Divergence, Losslessness
from layerskip.measure.measurement import Sample
from searches.study.bench import BASELINE, ModelBench
from tests.searches.conftest import Launch

LOOKUP = SpeculativeConfig("prompt_lookup", 16)
LOSSY = SpeculativeConfig.from_dict({"method": "prompt_lookup", "accept": {"method": "threshold", "threshold": 0.0}})
HONEST = {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6}
DOCTORED = {"speedup": 4.0, "speedup_low": 3.5, "speedup_high": 4.6}
HERE = PromptSet.packaged().split()[1].digest

Verify = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verified(tiny_folder: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Verify a configuration with some evidence, measured at 1.5 to 1.6; return the exit code, stdout and stderr."""

    def program(config: SpeculativeConfig, evidence: Mapping[str, Any], *overrides: str, changed: bool = False) -> Any:
        output = Losslessness(1, (Divergence("0", 0, 1.0, 0.0),) if changed else ())

        def compare(
            bench: ModelBench, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, **_: object
        ) -> Iterator[dict[str, Sample]]:
            (name,) = configs
            for index, item in enumerate(prompts):
                spent = {BASELINE: 1.0, name: 1.0 / (1.5 + index % 2 / 10)}
                yield {
                    name: Sample(item.id, item.category, 10, 10, 0.1, seconds, 0, DecodeStats(), output)
                    for name, seconds in spent.items()
                }

        target = {"name": str(tiny_folder), "architecture": "LlamaForCausalLM", "layers": 3, "dtype": "float32"}
        Export(target, config, evidence=evidence).save(tmp_path / "best.json")
        monkeypatch.setattr(ModelBench, "compare", compare)
        done = launch("verify", "best.json", "outputs=outputs", "target.device=cpu", *overrides, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    return program


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([], "config.accept: threshold"),
        (["allow_lossy=perhaps"], "allow_lossy:"),
    ],
)
def test_a_lossy_export_is_refused_in_one_line_unless_asked_for(
    overrides: list[str], named: str, verified: Verify, tmp_path: Path
) -> None:
    code, _, errors = verified(LOSSY, HONEST, *overrides, changed=True)
    assert (code, errors.count("\n")) == (2, 1), errors
    assert errors.startswith(f"error: {named}")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("output", "changed", "code"),
    [("different", True, 3), (None, True, 3), ("near_tie", True, 4), ("near_tie", False, 3)],
)
def test_a_lossy_export_is_weaker_at_best(
    output: str | None, changed: bool, code: int, verified: Verify, tmp_path: Path
) -> None:
    evidence = HONEST | {"prompts_digest": HERE} | ({"losslessness": {"verdict": output}} if output else {})
    found, printed, _ = verified(LOSSY, evidence, "allow_lossy=true", changed=changed)
    assert found == code, printed
    record = json.loads((tmp_path / "outputs" / "verify.json").read_text(encoding="utf-8"))
    assert record["config"]["lossless"] is False
    assert record["measured"]["losslessness"]["verdict"] == ("different" if changed else "exact")


def test_a_claim_is_refuted_by_its_own_prompts_and_by_a_changed_output_alone(verified: Verify) -> None:
    code, printed, _ = verified(LOOKUP, DOCTORED | {"prompts_digest": HERE, "prompts": 24}, "measure.held_out_prompts=6")
    assert (code, "out of reach" in printed) == (4, True), printed
    code, printed, _ = verified(LOOKUP, DOCTORED | {"prompts_digest": "0" * 64, "prompts": 24})
    assert (code, "prompts=" in printed) == (3, True), printed
    assert verified(LOOKUP, HONEST, "allow_lossy=true", changed=True)[0] == 4
    assert verified(LOOKUP, HONEST, "allow_lossy=true")[0] == 0


def test_a_datastore_with_answers_to_the_prompts_is_refused(verified: Verify, tiny_target: Target, tmp_path: Path) -> None:
    """It is refused alone and in a cascade; a datastore of other texts is measured."""
    answered = [digest(item.content()) for item in PromptSet.packaged().split()[1]]
    for name, prompts in (("own", answered), ("other", [])):
        Datastore.build([[3, 4, 5, 6]], tiny_target, "texts", prompts).save(tmp_path / name)
    own, other = (SpeculativeConfig("retrieval", datastore=str(tmp_path / name)) for name in ("own", "other"))
    assert verified(other, HONEST)[0] == 0
    for config, field in (
        (own, "config.datastore"),
        (SpeculativeConfig("cascade", members=(LOOKUP, own)), "config.members.1"),
    ):
        code, _, errors = verified(config, HONEST)
        assert code == 2
        assert errors.startswith(f"error: {field}") and errors.count("\n") == 1
