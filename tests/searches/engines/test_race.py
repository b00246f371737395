"""Engines beside the winner of a study: what is measured, what is left out, and what the report says."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerskip import PromptSet, SpeculativeConfig, Target, UnsupportedModel
from layerskip.measure.measure import Task
from layerskip.measure.measurement import Sample
from searches.app.checks import InputError
from searches.engines import peer as peers
from searches.engines import trials
from searches.engines.race import Race, RaceRow, chosen_engines, race
from searches.report.markdown import race_verdict
from searches.report.tables import race_rows
from tests.searches.backends.contract import children
from tests.searches.conftest import Launch
from tests.searches.known import Known
from tests.searches.programs import quick

pytestmark = pytest.mark.system

PROMPTS = PromptSet.of([f"the cat in the hat {number}" for number in range(6)])
TUNE = PromptSet.of(["the dog"])
LOOKUP = SpeculativeConfig("prompt_lookup")


@pytest.fixture
def installed(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """OpenVINO's stand-in where ``make engines`` installs engines."""
    place = tmp_path / ".engines" / "openvino_genai" / "bin" / "python"
    place.parent.mkdir(parents=True)
    shutil.copy(python, place)
    monkeypatch.setenv("LAYERSKIP_ENGINES", str(tmp_path / ".engines"))
    return place


def _race(target: Target, folder: Path, winner: SpeculativeConfig = LOOKUP) -> Race:
    return race(target, winner, ["openvino_genai"], (TUNE, PROMPTS), Task(max_new_tokens=6), folder / "engines")


def test_every_engine_is_measured_plain_and_with_lookup_beside_ours(target: Target, installed: Path, tmp_path: Path) -> None:
    before = children()
    found = _race(target, tmp_path)
    assert children() == before
    rows = {row.name: row for row in found.rows}
    ours, theirs = ["layerskip, plain", "layerskip, the winner"], ["openvino_genai, plain", "openvino_genai, prompt lookup"]
    best = max(found.trials, key=lambda trial: trial.speedup).name  # which may be the usual one
    assert rows.keys() == {*ours, *theirs, best}
    assert all(row.same_outputs == (6, 6) for row in rows.values())  # each as plain decoding of the same engine
    assert {name: row.reference["same"] for name, row in rows.items() if name in ours} == dict.fromkeys(ours, 6)
    assert all(row.reference["changed"] == 6 for name, row in rows.items() if name not in ours)  # which counts upwards
    assert len(found.trials) == 5 and found.fastest.name in ours
    assert {name: row.own_speedup is None for name, row in rows.items()} == {name: "plain" in name for name in rows}
    assert found.fastest_plain == "layerskip, plain" and rows[found.fastest_plain].measured["speedup"] == 1.0
    assert sum("cannot be the fastest: 6 of 6 outputs differ" in note for note in found.notes) == len(rows) - len(ours)
    assert rows[theirs[0]].version == "1.2" and rows[theirs[0]].precision["INFERENCE_PRECISION_HINT"] == "f32"
    assert "prompt_lookup=True, " in rows[theirs[1]].command and "prompt_lookup" not in rows[theirs[0]].command
    (words,) = [shlex.split(rows[theirs[1]].command)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "a text after Why is the sky blue?" in printed and "'num_assistant_tokens': 8" in printed
    assert found.fastest.name in race_verdict(found)
    assert [row["engine"].removesuffix(" 1.2") for row in race_rows(found)] == [row.name for row in found.rows]
    stored = json.loads(json.dumps(found.to_dict()))
    assert json.loads(json.dumps(Race.from_dict(stored).to_dict())) == stored


@pytest.mark.parametrize(
    ("fastest", "expected"),
    [((16, 2), {(8, 3), (4, 3), (16, 3), (16, 2), (16, 4)}), ((8, 3), {(8, 3), (4, 3), (16, 3), (8, 2), (8, 4)})],
)
def test_trials_find_the_fastest_lookup_of_an_engine(
    fastest: tuple[int, int], expected: set[tuple[int, int]], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting takes a second more for every step from the fastest; one is refused."""

    def interleave(
        target: Target, prompts: PromptSet, contenders: dict[str, Any], task: Task
    ) -> Iterator[dict[str, Sample]]:
        for item in prompts:
            distance = sum(abs(own - best) for own, best in zip(contenders["engine"].lengths, fastest, strict=True))
            yield {"ours": Known._sample(item, 10.0), "engine": Known._sample(item, 1.0 + distance)}

    def load(method: str, num_speculative_tokens: int, prompt_lookup_max: int, draft_model: str) -> Any:
        if method == "draft_model":
            drafted.append((draft_model, num_speculative_tokens))
            return SimpleNamespace(lengths=(100, len(draft_model)), close=lambda: None)
        asked.append((num_speculative_tokens, prompt_lookup_max))
        if asked[-1] == (4, 3):
            raise UnsupportedModel("engine: refuses four tokens")
        lengths = asked[-1]
        return SimpleNamespace(lengths=lengths, close=lambda: closed.append(lengths))

    asked, closed, drafted = list[tuple[int, int]](), list[tuple[int, int]](), list[tuple[str, int]]()
    monkeypatch.setattr(trials, "interleave", interleave)
    tried = trials.EngineTrials("engine", load, target, PROMPTS, Task())
    found = tried.run(["long name", "name"])
    assert drafted == [("long name", 4), ("name", 4), ("name", 2), ("name", 8)]
    assert set(asked) == expected and set(closed) == expected - {(4, 3), (8, 3), fastest}  # two stay loaded
    tried.close()
    assert set(closed) == expected - {(4, 3)}
    assert (found[0].num_speculative_tokens, found[0].prompt_lookup_max) == fastest
    assert [trial.speedup for trial in found] == sorted((trial.speedup for trial in found), reverse=True)
    assert found[0].speedup == pytest.approx(10.0)


def test_the_verdict_names_what_cannot_be_distinguished_from_the_fastest() -> None:
    measured = {"tokens_per_second": 50.0, "speedup": 1.5, "speedup_low": 1.2, "speedup_high": 1.8}
    counts = {"compared": 6, "same": 6, "near_ties": 0, "changed": 0}
    rows = tuple(RaceRow(name, measured, None, (6, 6), counts) for name in ("one, plain", "two, plain"))
    verdict = race_verdict(Race(rows, "two, plain", 6, level=("two, plain",)))
    assert verdict.startswith("Fastest of all engines: one, plain, 50.0 tokens/s, 1.50 x (1.20 to 1.80)")
    assert "Not distinguishable from it: two, plain." in verdict


def test_no_trial_of_an_engine_starts_when_its_time_is_over(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 10.0, 90.0, 130.0, 140.0, 150.0))
    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(
        trials,
        "interleave",
        lambda *_: [{"ours": Known._sample(item, 1.0), "engine": Known._sample(item, 1.0)} for item in TUNE],
    )
    tried = trials.EngineTrials("engine", lambda **_: SimpleNamespace(close=lambda: None), target, TUNE, Task())  # type: ignore[arg-type, return-value]
    found = tried.run([])
    assert [trial.num_speculative_tokens for trial in found] == [8, 4]  # at 10 and at 90 seconds


def test_an_engine_that_cannot_reach_the_leader_gets_no_trials() -> None:
    assert trials.reason_against("slow", 0.5, 1.35) is None
    assert trials.reason_against("slow", 0.1, 1.35, ["a draft model, whose gain has no such bound"]) is None
    reason = trials.reason_against("slow", 0.4, 1.35)
    assert reason and reason.startswith("slow gets no trials: its plain decoding is 0.40 x ours.")


@pytest.mark.usefixtures("installed")
def test_the_report_says_which_engine_got_no_trials(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "BEST_GAIN", 0.0)
    found = _race(target, tmp_path)
    assert not found.trials and "openvino_genai, plain" in {row.name for row in found.rows}
    assert found.notes[0].startswith("openvino_genai gets no trials")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("where", ["convert", "load", "decode", "hang"])
def test_an_engine_that_breaks_is_left_out_and_the_others_are_measured(
    target: Target, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BROKEN", where)
    monkeypatch.setattr(peers, "_ANSWER_SECONDS", 60.0 if where != "hang" else 1.0)
    before = children()
    found = _race(target, tmp_path, SpeculativeConfig())
    assert children() == before
    assert [row.name for row in found.rows if not row.ended] == ["layerskip, plain"]
    assert found.prompts == len(PROMPTS)
    said = capsys.readouterr().out
    assert "left out: openvino_genai: " in said and said.count("left out") <= 2
    assert "layerskip, plain" in race_verdict(found)
    (reason,) = found.left_out
    assert reason.startswith("openvino_genai: ")


def test_engines_are_found_or_refused_by_name(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen_engines("all") == ("openvino_genai",)
    assert "engines: vllm, xllamacpp left out: not installed; make engines installs them" in capsys.readouterr().out
    assert chosen_engines(["openvino_genai"]) == chosen_engines(["layerskip", "openvino"]) == ("openvino_genai",)
    with pytest.raises(InputError, match="^engines: vllm is not installed; make engines installs it$"):
        chosen_engines(["vllm"])
    with pytest.raises(InputError, match="^engines: 'sglang' is not one of openvino_genai, vllm, xllamacpp$"):
        chosen_engines(["sglang"])
    with pytest.raises(InputError, match="^engines: 'some' is not a list"):
        chosen_engines("some")


def test_a_study_names_the_fastest_engine_and_measures_it_once(
    installed: Path, tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    """Its export stands before engines are measured. One whose installation was repaired is measured when it is repeated."""
    fields = [*quick(tiny_folder, tmp_path / "outputs", "study.name=raced", "study.n_trials=2")]
    fields += ["measure.held_out_prompts=6", "space.methods=[none,prompt_lookup]"]
    fields += ["target.device=cpu", "engines=[openvino_genai]"]
    converter = tmp_path / "packages" / "optimum" / "commands" / "optimum_cli.py"
    working = converter.read_text()
    converter.write_text("raise SystemExit('no converter')")
    broken = launch("layerskip", *fields, cwd=tmp_path)
    folder = tmp_path / "outputs" / "raced"
    assert broken.returncode == 0, broken.stderr
    assert "openvino_genai: cannot convert" in (folder / "report.md").read_text(encoding="utf-8")
    assert (folder / "best.json").exists()
    converter.write_text(working)
    for times in (1, 2):
        done = launch("layerskip", *fields, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        report = (folder / "report.md").read_text(encoding="utf-8")
        assert "Fastest of all engines: layerskip, " in report and "## Engines (held-out prompts)" in report
        assert "openvino_genai, plain cannot be the fastest: 6 of 6 outputs differ" in report
        lines = [line for line in report.splitlines() if line]
        assert lines[1].startswith("Fastest of all engines: ")
        stored = json.loads((folder / "engines.json").read_text(encoding="utf-8"))
        assert stored["environment"]["device"] == "cpu" and stored["read_gigabytes_per_second"] > 0
        assert ("engines: loading" in done.stdout) == (times == 1)
    verified = launch("verify", str(folder / "engines.json"), "measure.max_new_tokens=8", "target.device=cpu", cwd=tmp_path)
    assert verified.returncode in (0, 3, 4) and "target.layers" not in verified.stdout, verified.stderr
    assert "nothing is measured" in verified.stdout or "measuring layerskip, the winner" in verified.stdout
    refused = launch("layerskip", *fields, "sampling=nucleus", cwd=tmp_path)
    assert refused.returncode == 2 and "engines: are measured greedily" in refused.stderr
