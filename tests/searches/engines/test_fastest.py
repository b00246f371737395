"""The fastest engine of a search is measured again, against the plain decoding that it was faster than."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerskip import Export, PromptSet, Sampling, SpeculativeConfig, load_target
from layerskip.files import write_json
from searches.app.checks import InputError
from searches.engines.fastest import FastestEngine
from searches.engines.race import PLAIN, SCHEMA, WINNER, Race, RaceRow
from searches.engines.trials import EngineTrial
from searches.results import record_header
from tests.searches.backends.contract import children
from tests.searches.conftest import Launch
from tests.tiny import save_tiny

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("reference_engine")]

LOOKUP = SpeculativeConfig("prompt_lookup", 16, prompt_lookup_min=1, prompt_lookup_max=2)
ENGINE, DRAFTING = "fifth, plain", "fifth, prompt lookup"
FIELDS = ("measure.held_out_prompts=6", "outputs=outputs", "target.device=cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that soon repeats itself, so that prompt lookup is several times as fast as plain decoding."""
    return save_tiny(tmp_path_factory.mktemp("fastest") / "model", idle=(0, 1, 2))


def _row(name: str, speedup: float) -> RaceRow:
    measured = {"speedup": speedup, "speedup_low": 0.9 * speedup, "speedup_high": 1.1 * speedup, "prompts": 6}
    measured |= {"mean_acceptance_length": 1.0, "tokens_per_second": 10.0 * speedup, "baseline_tokens_per_second": 10.0}
    return RaceRow(name, measured, None, (6, 6), {"compared": 6, "same": 6, "near_ties": 0, "changed": 0})


def _raced(folder: Path, model: Path, fastest_plain: str, *rows: RaceRow) -> Path:
    target = load_target(str(model), dtype="float32", device="cpu")
    prompts = PromptSet.packaged().split()[1].take(6)
    found = Race(rows, fastest_plain, 6, trials=(EngineTrial("fifth", "prompt_lookup", 8),)).to_dict()
    record = record_header(SCHEMA, target) | {
        "engine_versions": {"fifth": ""},
        "sampling": Sampling().to_dict(),
        "race": found,
    }
    record |= {"prompts": {"name": prompts.name, "count": 6, "digest": prompts.digest}, "max_new_tokens": 48}
    Export(target.describe(), LOOKUP).save(folder / "best.json")
    write_json(folder / "engines.json", record)
    return folder / "engines.json"


@pytest.mark.parametrize("fastest", [DRAFTING, WINNER])
def test_drafting_is_measured_against_the_fastest_plain_decoding(
    model: Path, tmp_path: Path, launch: Launch, fastest: str
) -> None:
    file = _raced(tmp_path, model, ENGINE, _row(fastest, 1.5), _row(ENGINE, 1.0), _row(PLAIN, 0.5))
    before = children()
    done = launch("verify", str(file), *FIELDS, cwd=tmp_path)
    assert children() == before
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads((tmp_path / "outputs" / "verify.json").read_text(encoding="utf-8"))
    assert (record["verdict"], record["name"]) == ("confirmed", fastest)
    assert record["claimed"] == pytest.approx({"value": 1.5, "low": 1.35, "high": 1.65})
    assert record["measured"]["losslessness"]["verdict"] == "exact"
    assert record["environment"]["backend"]["baseline"] == ENGINE
    assert record["config"]["method"] == ("prompt_lookup" if fastest == WINNER else "none")
    assert f"measuring {fastest} on 6 prompts" in done.stdout and "Different from the export" not in done.stdout


def test_plain_decoding_of_an_engine_is_measured_against_ours(model: Path, tmp_path: Path, launch: Launch) -> None:
    """It is twenty times as fast nowhere, so that the claim is refuted."""
    file = _raced(tmp_path, model, ENGINE, _row(ENGINE, 1.0), _row(PLAIN, 0.05))
    done = launch("verify", str(file), *FIELDS, cwd=tmp_path)
    record: dict[str, Any] = json.loads((tmp_path / "outputs" / "verify.json").read_text(encoding="utf-8"))
    assert record["claimed"] == pytest.approx({"value": 20.0, "low": 1 / 0.055, "high": 1 / 0.045})
    assert (done.returncode, record["verdict"]) == (4, "refuted"), done.stdout
    assert record["environment"]["backend"]["baseline"] == PLAIN


def test_our_plain_decoding_needs_no_measurement(model: Path, tmp_path: Path, launch: Launch) -> None:
    file = _raced(tmp_path, model, PLAIN, _row(PLAIN, 1.0), _row(ENGINE, 0.5))
    done = launch("verify", str(file), *FIELDS, cwd=tmp_path)
    assert done.returncode == 0 and "nothing is measured" in done.stdout, done.stderr


def test_the_file_of_an_earlier_version_is_refused(model: Path, tmp_path: Path, launch: Launch) -> None:
    file = _raced(tmp_path, model, PLAIN, _row(PLAIN, 1.0))
    file.write_text(file.read_text(encoding="utf-8").replace(SCHEMA, "layerskip.engines/1"), encoding="utf-8")
    done = launch("verify", str(file), *FIELDS, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: schema: ") and "search again with engines=" in done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [({"race": {}}, "is damaged: KeyError"), ({"engine_versions": {}}, "is damaged: KeyError: 'fifth'")],
)
def test_a_damaged_file_is_refused_in_one_line(
    model: Path, tmp_path: Path, launch: Launch, change: dict[str, Any], words: str
) -> None:
    file = _raced(tmp_path, model, ENGINE, _row(DRAFTING, 1.5), _row(ENGINE, 1.0), _row(PLAIN, 0.5))
    write_json(file, json.loads(file.read_text(encoding="utf-8")) | change)
    done = launch("verify", str(file), *FIELDS, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr


def test_an_engine_of_another_version_is_named(model: Path, tmp_path: Path, launch: Launch) -> None:
    file = _raced(tmp_path, model, ENGINE, _row(DRAFTING, 1.5), _row(ENGINE, 1.0), _row(PLAIN, 0.5))
    write_json(file, json.loads(file.read_text(encoding="utf-8")) | {"engine_versions": {"fifth": "5.4"}})
    done = launch("verify", str(file), *FIELDS, cwd=tmp_path)
    assert "- environment.backend.engine_versions.fifth: 5.4, now " in done.stdout
    with pytest.raises(InputError, match="'fifth, prompt lookup of others' is none of its trials"):
        FastestEngine(json.loads(file.read_text().replace(DRAFTING, f"{DRAFTING} of others")), file)
