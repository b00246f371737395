"""Honest exports are confirmed, doctored ones are not, and bad input ends in one line.

No result depends on the speed of the machine: an honest export is several times faster, and other measurements are
given.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerskip import Export, PromptSet, SpeculativeConfig, Target, load_target
from layerskip.decoding.stats import DecodeStats
from layerskip.drafters.retrieval import Datastore
from layerskip.files import digest
from layerskip.measure.losslessness import Divergence, Losslessness
from layerskip.measure.measurement import Sample
from layerskip.models.environment import machine
from searches.study.bench import BASELINE, ModelBench
from searches.verify import EXIT_CODES, _is_alike
from tests.searches.conftest import Launch
from tests.tiny import save_tiny

pytestmark = pytest.mark.system

LOOKUP = SpeculativeConfig("prompt_lookup", 16, prompt_lookup_min=1, prompt_lookup_max=2)
HERE = PromptSet.packaged().split()[1].digest
Verified = Callable[..., tuple[int, str, str]]
FEW = "measure.held_out_prompts=6"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model that soon repeats itself, so that prompt lookup is fast."""
    return save_tiny(tmp_path_factory.mktemp("verify") / "model", idle=(0, 1, 2))


def _claimed(speedup: float, **more: Any) -> dict[str, Any]:
    return {"speedup": speedup, "speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1} | more


def _export(file: Path, model: Path, config: SpeculativeConfig, evidence: Any = None, **target: Any) -> Path:
    found = {"name": str(model), "revision": None, "architecture": "LlamaForCausalLM", "layers": 3, "dtype": "float32"}
    Export(found | target, config, evidence=evidence or {}).save(file)
    return file


@pytest.fixture
def verified(launch: Launch, tmp_path: Path) -> Verified:
    """Runs the program in a temporary folder; returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        done = launch("verify", *arguments, "outputs=outputs", "target.device=cpu", cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    return run


def _record(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "outputs" / "verify.json").read_text(encoding="utf-8"))
    assert record["schema"] == "layerskip.verification/1"
    return record


def test_an_honest_export_is_confirmed(model: Path, tmp_path: Path, verified: Verified) -> None:
    _export(tmp_path / "best.json", model, LOOKUP, _claimed(1.5))
    code, printed, errors = verified("best.json", FEW)
    assert (code, "confirmed: " in printed) == (0, True), errors
    record = _record(tmp_path)
    assert record["measured"]["losslessness"]["verdict"] == "exact"
    assert record["measured"]["prompts"] == record["prompts"]["count"] == 6
    assert record["claimed"] == {"value": 1.5, "low": 1.4, "high": 1.6}
    assert record["prompts"]["digest"] == PromptSet.packaged().split()[1].take(6).digest


def test_rounds_must_repeat_only_on_the_same_model(model: Path, tmp_path: Path) -> None:
    export = Export.load(_export(tmp_path / "best.json", model, LOOKUP))
    target = load_target(str(model), dtype="float32", device="cpu")
    assert _is_alike(export, target)
    assert not _is_alike(export, load_target(str(model), dtype="bfloat16", device="cpu"))
    assert not _is_alike(export, load_target(str(shutil.copytree(model, tmp_path / "tuned")), dtype="float32", device="cpu"))
    half = replace(export, target=export.target | {"dtype": "bfloat16"})
    assert not _is_alike(half, load_target(str(model), dtype="bfloat16", device="cpu"))  # unknown device
    half = replace(half, environment=machine(target))
    assert _is_alike(half, load_target(str(model), dtype="bfloat16", device="cpu"))


def test_plain_decoding_is_not_measured_and_its_model_has_the_exports_dtype(
    model: Path, tmp_path: Path, verified: Verified, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelBench, "compare", None)  # a measurement would fail
    file = _export(tmp_path / "best.json", model, SpeculativeConfig(), dtype="float16")
    code, printed, _ = verified(str(file), "target=local", f"target.path={model}")
    record = _record(tmp_path)
    assert (code, record["measured"], "no drafting" in printed) == (0, None, True)
    assert (record["target"]["dtype"], record["differences"]) == ("float16", [])
    _, printed, _ = verified(f"export={file}", "target.dtype=float32")
    assert _record(tmp_path)["differences"] == [{"field": "target.dtype", "exported": "float16", "now": "float32"}]
    assert "target.dtype: float16, now float32" in printed


def _check_refused(ended: tuple[int, str, str], named: str) -> None:
    code, _, errors = ended
    assert (code, errors.count("\n")) == (2, 1), errors
    assert errors.startswith("error: ") and named in errors


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["missing.json"], "export: cannot read missing.json: No such file or directory"),
        ([], "export"),
        (["foreign.json"], "target.layers"),
        (["broken.json"], "JSON"),
        (["claim.json"], "evidence.speedup"),
        (["length.json"], "evidence.max_new_tokens"),
        (["gone.json"], "target"),
        (["good.json", "target=local"], "target.path"),
        (["good.json", "measure.held_out_prompts=4"], "prompts"),
        (["good.json", "measure.max_repeats=null"], "measure.max_repeats"),
        (["good.json", "measure.tolerance=1"], "measure.tolerance"),
        (["good.json", "record=good.json/verify.json"], "record: "),
    ],
)
def test_bad_input_ends_in_one_line(
    arguments: list[str], named: str, model: Path, tmp_path: Path, verified: Verified, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = _export(Path("good.json"), model, SpeculativeConfig())
    _export(Path("foreign.json"), model, LOOKUP, layers=30)
    _export(Path("gone.json"), tmp_path / "gone", LOOKUP)
    Path("broken.json").write_text("{", encoding="utf-8")
    fields = json.loads(good.read_text(encoding="utf-8"))
    for name, evidence in (("claim", {"speedup": "3"}), ("length", {"max_new_tokens": 0})):
        Path(f"{name}.json").write_text(json.dumps(fields | {"evidence": evidence}), encoding="utf-8")
    _check_refused(verified(*arguments), named)
    assert not (tmp_path / "outputs").exists()


def test_an_interrupt_prints_figures_and_the_same_command_resumes(
    model: Path, tmp_path: Path, verified: Verified, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, decoded = ModelBench.compare, []

    def counted(*args: Any, **named: Any) -> Iterator[dict[str, Sample]]:
        for row in whole(*args, **named):
            decoded.append(row[BASELINE].prompt_id)
            # Exactly as fast as claimed, so that one look suffices.
            yield {name: replace(sample, decode_seconds=1.5 if name == BASELINE else 1.0) for name, sample in row.items()}

    def interrupted(*args: Any, **named: Any) -> Iterator[dict[str, Sample]]:
        rows = counted(*args, **named)
        yield next(rows)
        yield next(rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelBench, "compare", interrupted)
    file = _export(tmp_path / "best.json", model, LOOKUP, _claimed(1.5))
    code, printed, errors = verified(str(file), FEW)
    assert code == 130
    assert "| speedup | 1.50 (1.40 to 1.60) |" in printed
    assert errors == "interrupted after 2 prompts: no verdict; the same command resumes\n"
    assert not (tmp_path / "outputs" / "verify.json").exists()
    (begun,) = tmp_path.glob("**/verify-*.jsonl")
    monkeypatch.setattr(ModelBench, "compare", counted)
    code, printed, _ = verified(str(file), FEW)
    assert (code, _record(tmp_path)["measured"]["prompts"]) == (0, 6)
    assert "2 of them were before an interruption" in printed
    assert len(decoded) == len(set(decoded)) == 6  # none of them twice
    assert "interruption" not in verified(str(file), FEW)[1]
    assert len(decoded) == 12  # a second run measures again
    monkeypatch.setattr(ModelBench, "compare", interrupted)
    assert verified(str(file), FEW)[0] == 130
    day_ago = begun.stat().st_mtime - 86400
    os.utime(begun, (day_ago, day_ago))
    monkeypatch.setattr(ModelBench, "compare", counted)
    assert verified(str(file), FEW)[0] == 0
    assert len(decoded) == 12 + 2 + 6  # rows of a day ago are discarded


def _rows(name: str, prompts: PromptSet, speedups: Sequence[float], output: Losslessness) -> Iterator[dict[str, Sample]]:
    """Return the rows of a comparison with some speedups, which prompts take in turns."""
    for index, item in enumerate(prompts):
        seconds = {BASELINE: 1.0, name: 1.0 / speedups[index % len(speedups)]}
        yield {
            name: Sample(item.id, item.category, 10, 10, 0.1, spent, 0, DecodeStats(), output)
            for name, spent in seconds.items()
        }


@pytest.fixture
def given(tiny_folder: Path, tmp_path: Path, verified: Verified, monkeypatch: pytest.MonkeyPatch) -> Verified:
    """Runs the program on a configuration with some evidence, whose looks find speedups, 1.5 and 1.6 by default."""

    def run(
        config: SpeculativeConfig, evidence: Any, *overrides: str, looks: Any = ((1.5, 1.6),), changed: bool = False
    ) -> Any:
        output, speedups = Losslessness(1, (Divergence("0", 0, 1.0, 0.0),) if changed else ()), iter(looks)
        monkeypatch.setattr(
            ModelBench, "compare", lambda _, configs, prompts, **__: _rows(*configs, prompts, next(speedups), output)
        )
        return verified(str(_export(tmp_path / "best.json", tiny_folder, config, evidence)), *overrides)

    return run


def test_a_datastore_with_answers_to_the_prompts_is_refused(given: Verified, tiny_target: Target, tmp_path: Path) -> None:
    """It is refused alone and in a cascade; a datastore of other texts is measured."""
    answered = [digest(item.content()) for item in PromptSet.packaged().split()[1]]
    for name, prompts in (("own", answered), ("other", [])):
        Datastore.build([[3, 4, 5, 6]], tiny_target, "texts", prompts).save(tmp_path / name)
    own, other = (SpeculativeConfig("retrieval", datastore=str(tmp_path / name)) for name in ("own", "other"))
    assert given(other, _claimed(1.5))[0] == 0
    _check_refused(given(own, _claimed(1.5)), "config.datastore")
    _check_refused(given(SpeculativeConfig("cascade", members=(LOOKUP, own)), _claimed(1.5)), "config.members.1")


@pytest.mark.parametrize(
    ("looks", "evidence", "changed", "name"),
    [
        ([(1.5, 1.6)], _claimed(1.5), False, "confirmed"),
        ([(1.5, 1.6)], _claimed(1.5), True, "refuted"),
        ([(0.5, 0.6)], {}, False, "refuted"),
        ([(1.5, 1.6)], _claimed(4.0, prompts_digest=HERE, prompts=24), False, "refuted"),  # out of reach
        ([(1.5, 1.6)], _claimed(4.0, prompts_digest="0" * 64, prompts=24), False, "weaker"),  # of other prompts
        ([(0.8, 1.3), (3.0, 3.5)], {}, False, "confirmed"),  # a tie that a repeat resolves
        ([(0.8, 1.3)] * 3, {}, False, "weaker"),
    ],
)
def test_it_measures_until_the_verdict_is_clear(
    looks: Any, evidence: Any, changed: bool, name: str, given: Verified, tmp_path: Path
) -> None:
    code, *_ = given(LOOKUP, evidence, "measure.held_out_prompts=8", looks=looks, changed=changed)
    record = _record(tmp_path)
    assert (code, record["verdict"], record["repeats"]) == (EXIT_CODES[name], name, len(looks))
