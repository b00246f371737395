"""Outputs of an earlier version still count: a study resumes, an export loads and verifies, a trained head decodes.

``data/earlier`` holds what commit 37e57da wrote for a tiny model, with that folder as the working directory, one thread and
the overrides below. Its modules, and the names in its code, were others. Databases and pictures are left out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import Export, SpeculativeConfig, Target, generate, load_target
from layerskip.files import digest
from layerskip.models.environment import machine
from tests.searches.conftest import Launch
from tests.searches.programs import journal_study, tracked

EARLIER = Path(__file__).parent / "data" / "earlier"
WRITTEN_IN = "/tmp/layerskip-earlier"  # the working directory, in absolute paths of the journal
STUDY = "model-tpe-seed0-19d590"
SHARED = ("continuations", "profiles", "shelf", "texts")
PROMPTS = ("prompts=jsonl", "prompts.path=prompts.jsonl", "outputs=results", "target.device=cpu")
OVERRIDES = (
    *("target=local", "target.path=model", "target.dtype=float32", *PROMPTS),
    *("space.kinds=[none,layer_skip,prompt_lookup]", "space.bridges=[none,linear]", "space.stops=[length]"),
    *("space.protect_first=0", "space.protect_last=0", "space.skip_length=[1,8]", "space.siblings=0"),
    *("measure.max_new_tokens=32", "measure.prompts=2", "measure.held_out_prompts=null", "measure.finalists=1"),
    *("scan.prompts=2", "scan.profile_repeats=2", "scan.profile_error=1", "scan.proposals.screened=8"),
    *("scan.proposals.scanned=3", "scan.proposals.enqueued=3", "scan.proposals.lookups=1"),
    "experiment=thorough",
    *("bridging.tokens=400", "bridging.max_new_tokens=16", "bridging.batch=8"),
)


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the earlier outputs, with the machine that wrote them in place of this one."""
    folder = Path(shutil.copytree(EARLIER, tmp_path / "earlier"))
    journal = folder / "results" / STUDY / "journal.log"
    lines = journal.read_text(encoding="utf-8")
    assert WRITTEN_IN in lines
    journal.write_text(lines.replace(WRITTEN_IN, str(folder.resolve())), encoding="utf-8")
    request = _request(folder)
    for module in ("layerskip.texts.continuations", "searches.predict.preparation"):
        monkeypatch.setattr(f"{module}.machine", lambda target: request["machine"])
    if metadata.version("transformers") != request["machine"]["versions"]["transformers"]:
        # Configurations of another version may have other fields, and then the digest of the model is another.
        monkeypatch.setattr(Target, "digest", request["target"])
    threads = torch.get_num_threads()
    torch.set_num_threads(request["machine"]["threads"])
    yield folder
    torch.set_num_threads(threads)


def _request(folder: Path) -> dict[str, Any]:
    """What a continuation depends on, as the earlier version stored it."""
    file = min((folder / "results" / "continuations").glob("*.json"))
    request: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["asked"]
    assert file.stem == digest(request)[:32]
    return request


def _target(folder: Path) -> Target:
    return load_target(str(folder / "model"), dtype="float32", device="cpu")


def _contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """The files of a folder except locks, with their times of modification and bytes."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def _assert_same_tokens(target: Target, config: SpeculativeConfig) -> None:
    for prompt in ("Boats: say more.", "Another prompt"):
        plain = generate(target, prompt, SpeculativeConfig(), max_new_tokens=24)
        drafted = generate(target, prompt, config, max_new_tokens=24)
        assert drafted.tokens == plain.tokens
        assert drafted.stats.drafted > 0


def test_an_earlier_study_resumes_with_all_that_it_stored(earlier: Path, launch: Launch) -> None:
    assert machine(_target(earlier)).keys() == _request(earlier)["machine"].keys()
    results = tracked(earlier / "results")
    study = results / STUDY
    before, journal = journal_study(results, STUDY), (study / "journal.log").read_bytes()
    trials, attributes = before.trials, before.user_attrs  # studies read their journal again
    stored = {path: state for name in SHARED for path, state in _contents(results / name).items()}
    (scans,) = study.glob("scans-*")
    scanned = _contents(scans)
    assert len(trials) == 6
    assert any(trial.user_attrs["config"].get("bridge") for trial in trials)

    done = launch("layerskip", *OVERRIDES, "study.n_trials=8", cwd=earlier)

    assert done.returncode == 0, done.stderr
    assert f"study {STUDY}: 6 of 8 trials are finished" in done.stdout
    assert (study / "journal.log").read_bytes().startswith(journal)
    after = journal_study(results, STUDY)
    assert after.trials[:6] == trials
    assert "8 of 8 trials finished" in (study / "report.html").read_text(encoding="utf-8")
    assert len(after.trials) == 8
    assert after.user_attrs["foresight_seconds"] > attributes["foresight_seconds"]
    new_attributes = {"threads", "spent_seconds", "finalists_of_8_trials"}
    assert {name for name in after.user_attrs if ":" not in name} - new_attributes == {n for n in attributes if ":" not in n}
    # Nothing is decoded, written or fitted again; only fits of new masks join, and a cost profile of today's form.
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in stored} == stored
    new = {path for name in SHARED for path in _contents(results / name)} - stored.keys()
    new = {path for path in new if path.parent.name != "profiles"}
    assert all(path.parent.parent in {old.parent.parent for old in stored if old.name == "head.json"} for path in new)
    assert {path.name for path in results.iterdir() if path.is_dir()} - {"mlartifacts"} == {STUDY, *SHARED}
    shapes = [
        json.dumps(json.loads(path.read_text(encoding="utf-8"))["shape"]) for path in results.glob("shelf/*/*/head.json")
    ]
    assert len(shapes) == len(set(shapes)) >= 8
    assert list(study.glob("scans-*")) == [scans]
    assert {path.relative_to(scans).parent for path in _contents(scans)} == {
        path.relative_to(scans).parent for path in scanned
    }
    for path, (_, content) in scanned.items():
        assert path.read_bytes().startswith(content)
    names = [json.loads(line)[0] for line in (scans / "counts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(names) == len(set(names))


def test_an_earlier_export_loads_decodes_and_verifies(earlier: Path, launch: Launch) -> None:
    target, best = _target(earlier), earlier / "results" / STUDY / "best.json"
    export = Export.load(best, target)
    assert export.search["study"] == STUDY
    assert export.config.mask == "layers:1-6"
    assert Path(export.config.bridge).parent == best.parent.resolve()
    _assert_same_tokens(target, export.config)
    done = launch("verify", f"export=results/{STUDY}/best.json", *PROMPTS, "measure.most_repeats=1", cwd=earlier)
    record = json.loads((earlier / "results" / "verify.json").read_text(encoding="utf-8"))
    assert (done.returncode, record["verdict"]) in ((0, "confirmed"), (3, "weaker"), (4, "refuted")), done.stderr
    assert f"{record['verdict']}: " in done.stdout
    assert record["measured"]["losslessness"]["verdict"] == "exact"


def test_an_earlier_head_decodes_like_the_target(earlier: Path) -> None:
    config = SpeculativeConfig.from_dict({"kind": "eagle", "head": str(earlier / "eagle"), "draft_length": 3})
    _assert_same_tokens(_target(earlier), config)
