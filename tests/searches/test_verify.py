"""An export measured again: honest ones hold, doctored ones do not, and what is no export ends in one line.

Nothing here hangs on how fast this machine is: what is confirmed is faster several times over, what is refuted claims more
than its draft length allows or drafts for nothing, and what is tied decodes nothing that could be timed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerskip import Export, PromptSet, SpeculativeConfig, load_target
from layerskip.decoding.stats import DecodeStats
from layerskip.measure.losslessness import Divergence, Losslessness
from layerskip.measure.measurement import Sample
from layerskip.models.environment import machine
from searches.app.application import run
from searches.app.resume_log import ResultLog
from searches.study.bench import BASELINE, ModelBench
from searches.verification.claim import Claim, Speedup, Verdict
from searches.verification.verification import VerifySettings, _is_alike, command_line, measure_claim, verify
from tests.searches.programs import execute
from tests.tiny import save_tiny

LOOKUP = SpeculativeConfig("prompt_lookup", 16, ngram_min=1, ngram_max=2)
ONE_TOKEN = SpeculativeConfig("layer_skip", 1, mask="layers:1")  # two tokens a round, so never twice as fast
USELESS = SpeculativeConfig("layer_skip", 16, mask="layers:0-1")
FEW = "measure.held_out_prompts=6"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats itself soon, which a lookup in the prompt foresees."""
    return save_tiny(tmp_path_factory.mktemp("verify") / "model", idle=(0, 1, 2))


def _export(file: Path, model: Path, config: SpeculativeConfig, speedup: float | None = None, **target: Any) -> Path:
    found = {"name": str(model), "revision": None, "architecture": "LlamaForCausalLM", "layers": 3, "dtype": "float32"}
    interval = () if speedup is None else (speedup, speedup - 0.1, speedup + 0.1)
    evidence = dict(zip(("speedup", "speedup_low", "speedup_high"), interval, strict=False))
    Export(found | target, config, evidence=evidence).save(file)
    return file


def _run(
    arguments: Sequence[str], outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """The program in this process: its exit code, and what it says on stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["verify", *command_line([*arguments, f"outputs={outputs}", "target.device=cpu"])])
    with pytest.raises(SystemExit) as end:
        run("verify", verify)
    said = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, said.out, said.err


def _record(outputs: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((outputs / "verify.json").read_text(encoding="utf-8"))
    assert record["schema"] == "layerskip.verification/1"
    return record


def test_an_honest_export_is_confirmed(model: Path, tmp_path: Path) -> None:
    _export(tmp_path / "best.json", model, LOOKUP, speedup=1.5)
    done = execute("verify", "best.json", FEW, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "confirmed: " in done.stdout
    record = _record(tmp_path / "outputs")
    assert record["verdict"] == "confirmed"
    assert record["measured"]["losslessness"]["verdict"] == "exact"
    assert record["measured"]["prompts"] == record["prompts"]["count"] == 6
    assert record["claimed"] == {"value": 1.5, "low": 1.4, "high": 1.6}
    held_out = PromptSet.packaged().split()[1]
    assert record["prompts"]["digest"] == held_out.take(6).digest


def test_a_doctored_claim_is_refuted(model: Path, tmp_path: Path) -> None:
    _export(tmp_path / "best.json", model, ONE_TOKEN, speedup=3.0)
    done = execute("verify", "export=best.json", FEW, "target=local", f"target.path={model}", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "refuted: " in done.stdout
    assert "Traceback" not in done.stderr
    assert _record(tmp_path / "outputs")["verdict"] == "refuted"


def test_what_another_model_accepts_refutes_no_rounds(model: Path, tmp_path: Path) -> None:
    export = Export.load(_export(tmp_path / "best.json", model, LOOKUP))
    target = load_target(str(model), dtype="float32", device="cpu")
    assert _is_alike(export, target)
    assert not _is_alike(export, load_target(str(model), dtype="bfloat16", device="cpu"))
    assert not _is_alike(export, load_target(str(shutil.copytree(model, tmp_path / "tuned")), dtype="float32", device="cpu"))
    half = replace(export, target=export.target | {"dtype": "bfloat16"})
    assert not _is_alike(half, load_target(str(model), dtype="bfloat16", device="cpu"))  # who knows what rounded it
    half = replace(half, environment=machine(target))
    assert _is_alike(half, load_target(str(model), dtype="bfloat16", device="cpu"))


def test_a_slower_configuration_in_its_place_is_refuted(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _export(tmp_path / "best.json", tiny_folder, USELESS, speedup=1.5)
    code, said, _ = _run([str(file), FEW, "measure.max_new_tokens=16"], tmp_path, monkeypatch, capsys)
    assert (code, _record(tmp_path)["verdict"]) == (4, "refuted"), said


def test_a_tie_is_weaker_when_the_budget_is_spent(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _export(tmp_path / "best.json", model, LOOKUP)
    arguments = [str(file), FEW, "measure.max_new_tokens=1"]  # prefill gives that one
    code, said, _ = _run(arguments, tmp_path, monkeypatch, capsys)
    assert code == 3, said
    assert "cannot be told from plain decoding" in said
    assert _record(tmp_path)["repeats"] == 3


def test_no_drafting_needs_no_measuring(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(ModelBench, "compare", fail)
    file = _export(tmp_path / "best.json", model, SpeculativeConfig())
    code, said, _ = _run([str(file)], tmp_path, monkeypatch, capsys)
    assert (code, _record(tmp_path)["measured"]) == (0, None)
    assert "no drafting" in said


def test_the_model_is_loaded_in_the_exports_dtype_unless_told_otherwise(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _export(tmp_path / "best.json", model, SpeculativeConfig(), dtype="float16")
    _run([str(file)], tmp_path, monkeypatch, capsys)
    assert (_record(tmp_path)["target"]["dtype"], _record(tmp_path)["differences"]) == ("float16", [])
    _run([str(file), "target=local", f"target.path={model}"], tmp_path, monkeypatch, capsys)
    assert _record(tmp_path)["target"]["dtype"] == "float16"
    _, said, _ = _run([str(file), "target.dtype=float32"], tmp_path, monkeypatch, capsys)
    assert _record(tmp_path)["differences"] == [{"field": "target.dtype", "exported": "float16", "now": "float32"}]
    assert "target.dtype: float16, now float32" in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["missing.json"], "missing.json"),
        (["export=missing.json"], "missing.json"),
        ([], "export"),
        (["foreign.json"], "target.layers"),
        (["broken.json"], "JSON"),
        (["claim.json"], "evidence.speedup"),
        (["length.json"], "evidence.max_new_tokens"),
        (["gone.json"], "target"),
        (["good.json", "target=local"], "target.path"),
        (["good.json", "target.dtype=float8"], "dtype"),
        (["good.json", "seed=x"], "seed"),
        (["good.json", "measure.held_out_prompts=4"], "prompts"),
        (["good.json", "measure.held_out_prompts=0"], "measure.held_out_prompts"),
        (["good.json", "measure.most_repeats=null"], "measure.most_repeats"),
        (["good.json", "measure.tolerance=1"], "measure.tolerance"),
        (["good.json", "measure.colour=red"], "measure.colour"),
        (["good.json", "record=good.json/verify.json"], "record: "),
    ],
)
def test_bad_input_ends_in_one_line(
    arguments: list[str],
    named: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    good = _export(Path("good.json"), model, SpeculativeConfig())
    _export(Path("foreign.json"), model, LOOKUP, layers=30)
    _export(Path("gone.json"), tmp_path / "gone", LOOKUP)
    Path("broken.json").write_text("{", encoding="utf-8")
    for name, evidence in (("claim", {"speedup": "3"}), ("length", {"max_new_tokens": 0})):
        Path(f"{name}.json").write_text(
            json.dumps(json.loads(good.read_text(encoding="utf-8")) | {"evidence": evidence}), encoding="utf-8"
        )
    code, _, said = _run(arguments, tmp_path / "outputs", monkeypatch, capsys)
    assert code == 2, said
    assert said.startswith("error: ")
    assert named in said
    assert said.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


def test_a_missing_file_ends_the_process_with_two(tmp_path: Path) -> None:
    done = execute("verify", "missing.json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: export: cannot read missing.json: No such file or directory\n"


def test_an_interrupt_prints_what_is_known_and_the_same_command_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, decoded = ModelBench.compare, []

    def counted(*args: Any) -> Iterator[dict[str, Sample]]:
        for row in whole(*args):
            decoded.append(row[BASELINE].prompt_id)
            # As fast as is claimed, whatever the machine is at, so that one look settles it.
            yield {who: replace(sample, decode_seconds=1.5 if who == BASELINE else 1.0) for who, sample in row.items()}

    def interrupted(*args: Any) -> Iterator[dict[str, Sample]]:
        rows = counted(*args)
        yield next(rows)
        yield next(rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelBench, "compare", interrupted)
    file = _export(tmp_path / "best.json", model, LOOKUP, speedup=1.5)
    code, said, errors = _run([str(file), FEW], tmp_path, monkeypatch, capsys)
    assert code == 130
    assert "| x plain | 1.50 (1.40 to 1.60) |" in said
    assert errors == "interrupted after 2 prompts: no verdict; the same command goes on\n"
    assert not (tmp_path / "verify.json").exists()
    (begun,) = tmp_path.glob("**/verify-*.jsonl")
    now = time.time()
    os.utime(begun, (now, now - 3600))  # an hour ago, if on the day before
    monkeypatch.setattr(ModelBench, "compare", counted)
    code, said, _ = _run([str(file), FEW], tmp_path, monkeypatch, capsys)
    assert (code, _record(tmp_path)["measured"]["prompts"]) == (0, 6)
    assert "2 of them were before an interruption" in said
    assert len(decoded) == len(set(decoded)) == 6  # none of them twice
    code, said, _ = _run([str(file), FEW], tmp_path, monkeypatch, capsys)
    assert code == 0
    assert "interruption" not in said
    assert len(decoded) == 12  # what is asked again is measured again
    monkeypatch.setattr(ModelBench, "compare", interrupted)
    assert _run([str(file), FEW], tmp_path, monkeypatch, capsys)[0] == 130
    (begun,) = tmp_path.glob("**/verify-*.jsonl")
    os.utime(begun, (now, now - 86400))
    monkeypatch.setattr(ModelBench, "compare", counted)
    code, said, _ = _run([str(file), FEW], tmp_path, monkeypatch, capsys)
    assert (code, len(decoded)) == (0, 12 + 2 + 6)  # a day ago the machine was another
    assert "interruption" not in said


class _Bench:
    """Decodes in its head: each comparison's pairs have speedups as told, in turn."""

    layers, exact, conditions = 3, True, None

    def __init__(self, speedups: Sequence[Sequence[float]], changed: bool = False) -> None:
        self.speedups, self.comparisons = speedups, 0
        self.lossless = Losslessness(1, (Divergence("0", 0, 1.0, 0.0),) if changed else ())

    def compare(
        self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, repeats: int, seed: int, *_: object
    ) -> Iterator[dict[str, Sample]]:
        (name,), told = configs, self.speedups[self.comparisons]
        self.comparisons += 1
        for index, item in enumerate(prompts):
            seconds = {BASELINE: 1.0, name: 1.0 / told[index % len(told)]}
            yield {
                who: Sample(item.id, item.category, 10, 10, 0.1, spent, 0, DecodeStats(), self.lossless)
                for who, spent in seconds.items()
            }


@pytest.mark.parametrize(
    ("speedups", "claim", "name", "repeats"),
    [
        pytest.param([[1.5, 1.6]], Speedup(1.5, 1.4, 1.6), "confirmed", 1, id="clear at once"),
        pytest.param([[0.5, 0.6]], None, "refuted", 1, id="slower at once"),
        pytest.param([[0.8, 1.3], [3.0, 3.5]], None, "confirmed", 2, id="a tie that a repeat undoes"),
        pytest.param([[0.8, 1.3]] * 3, None, "weaker", 3, id="a tie to the end"),
    ],
)
def test_it_measures_until_the_verdict_is_clear(
    speedups: list[list[float]], claim: Speedup | None, name: str, repeats: int
) -> None:
    verdict, rows = _measured(_Bench(speedups), claim)
    assert (verdict.name, len(rows)) == (name, 8 * repeats)


def test_a_changed_output_is_refuted_at_once() -> None:
    verdict, rows = _measured(_Bench([[1.5]], changed=True), None)
    assert (verdict.name, len(rows)) == ("refuted", 8)


def _measured(bench: _Bench, claim: Speedup | None) -> tuple[Verdict, list[Mapping[str, Sample]]]:
    prompts = PromptSet.of([f"prompt {i}" for i in range(8)])
    rows: list[Mapping[str, Sample]] = []
    return measure_claim(bench, LOOKUP, Claim(claim), prompts, VerifySettings(), 0, ResultLog(None), rows), rows
