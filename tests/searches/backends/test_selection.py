"""The back end of a program: what it leaves out of a study, what an export says of it, and a study on another engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from layerskip import Export, SpeculativeConfig, Target
from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.backends.layerskip import LayerskipBackend
from searches.backends.selection import exported_backend, supported_space
from searches.backends.server import ServerBackend
from searches.space.search_space import SearchSpace
from searches.study.plan import Plan, describe
from tests.searches.backends.fake import BROKEN, SPEEDUP, FakeBackend
from tests.searches.conftest import Launch
from tests.searches.programs import journal_study, quick, runs, sqlite, tracked

pytestmark = pytest.mark.system

FAKE = f"backend._target_={FakeBackend.__module__}.{FakeBackend.__qualname__}"


def test_methods_are_left_out_in_one_line(tiny_target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    space = SearchSpace(tiny_target.layers, methods=["none", "prompt_lookup", "token_recycling", "cascade"])
    assert supported_space(space, LayerskipBackend(tiny_target)) is space
    assert capsys.readouterr().out == ""
    assert supported_space(space, FakeBackend(tiny_target)).available_methods == ("none", "prompt_lookup")
    reason = "token_recycling, cascade (the fake engine copies only)"
    assert capsys.readouterr().out == f"space.methods: left out for backend=fake: {reason}\n"
    with pytest.raises(InputError, match=r"^space\.methods: backend=fake"):
        supported_space(SearchSpace(tiny_target.layers, methods=["none", "lookahead"]), FakeBackend(tiny_target))


def test_the_own_decoder_does_not_change_what_identifies_a_study(tiny_folder: Path, tmp_path: Path) -> None:

    def settings(*overrides: str) -> dict[str, Any]:
        config = compose_config("layerskip", [*quick(tiny_folder, tmp_path), *overrides])
        plan = Plan.of(config)
        return describe(config, plan.target, plan.prompts, False, plan.backend)

    own, other = settings(), settings(FAKE)
    assert not [name for name in own if name.startswith(("backend", "workload", "space.ranges"))]
    assert own.items() < other.items()
    assert other["backend.name"] == "fake"
    assert settings(FAKE, "+backend.version=2") != other
    assert settings("space.ranges.prompt_lookup.match=[first]")["space.ranges.prompt_lookup.match"] == ["first"]


def test_nothing_is_measured_again_alone_under_load(tiny_folder: Path, tmp_path: Path) -> None:
    workload = ("+workload._target_=searches.backends.backend.Workload", "+workload.concurrency=4")
    plans = [Plan.of(compose_config("layerskip", [*quick(tiny_folder, tmp_path), FAKE, *more])) for more in ((), workload)]
    assert [plan.workload.concurrency for plan in plans] == [1, 4]
    assert plans[0].measuring.drift < math.inf
    assert plans[1].measuring.drift == math.inf


def _exported(target: Target, **backend: Any) -> Export:
    environment = {"backend": backend} if backend else {}
    return Export(Export.describe(target), SpeculativeConfig("prompt_lookup"), environment=environment)


def test_an_export_is_measured_on_its_own_engine_under_its_load(tiny_target: Target) -> None:
    backend, workload = exported_backend(compose_config("verify"), _exported(tiny_target), tiny_target)
    assert (type(backend), workload.concurrency) == (LayerskipBackend, 1)
    config = compose_config("verify", ["backend=layerskip", FAKE])
    for concurrency, levels in ((8, (8,)), ([1, 8], (1, 8))):
        loaded = {"concurrency": concurrency, "goal": "throughput"}
        backend, workload = exported_backend(config, _exported(tiny_target, name="fake", workload=loaded), tiny_target)
        assert type(backend) is FakeBackend
        assert (workload.levels, workload.goal) == (levels, "throughput")


def test_an_export_of_an_engine_is_measured_on_servers_that_run_it(tiny_target: Target) -> None:
    urls = [f"backend.{name}_url=http://127.0.0.1:{port}" for name, port in (("baseline", 1), ("candidate", 2))]
    config = compose_config("verify", ["backend=server", *urls])
    backend, _ = exported_backend(config, _exported(tiny_target, name="vllm"), tiny_target)
    assert isinstance(backend, ServerBackend)
    assert SpeculativeConfig.from_dict(dict(backend.candidate)) == SpeculativeConfig("prompt_lookup")
    with pytest.raises(InputError, match=r"^backend: the export was measured with layerskip, not with server"):
        exported_backend(config, _exported(tiny_target), tiny_target)


@pytest.mark.parametrize("name", ["fake", "../layerskip", ""])
def test_an_export_of_an_unknown_engine_is_refused(name: str, tiny_target: Target) -> None:
    with pytest.raises(InputError, match=r"^environment\.backend: "):
        exported_backend(compose_config("verify"), _exported(tiny_target, name=name), tiny_target)
    with pytest.raises(InputError, match=r"^backend: the export was measured with"):
        exported_backend(compose_config("verify", ["backend=layerskip"]), _exported(tiny_target, name=name), tiny_target)


def test_a_study_on_another_engine(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    outputs = tracked(tmp_path / "outputs")
    own = (
        FAKE,
        f"space.ranges.prompt_lookup.num_speculative_tokens=[{BROKEN - 1},{BROKEN}]",
        "measure.held_out_prompts=6",
        "measure.max_new_tokens=12",
    )
    done = launch("layerskip", *quick(tiny_folder, outputs, *own, "study.n_trials=6", "study.name=one"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("space.methods: left out for backend=fake")]
    assert "layer_skip" in line and "(the fake engine copies only)" in line
    assert "scan" not in {path.name.partition("-")[0] for path in (outputs / "one").iterdir()}

    reasons = {t.number: t.user_attrs.get("reason", "") for t in journal_study(outputs, "one").trials}
    failed = {number for number, reason in reasons.items() if reason == "the engine failed: the engine stopped at once"}
    assert failed and len(reasons) == 6
    client = MlflowClient(sqlite(outputs))
    for run in runs(sqlite(outputs), "trial"):
        number = int(run.data.tags["trial_number"])
        assert run.info.status == ("FAILED" if reasons[number].startswith("the engine failed") else "FINISHED")
        assert run.data.params["backend.engine.name"] == "fake"
        if number in failed:
            path = client.download_artifacts(run.info.run_id, "engine.log", str(tmp_path))
            assert Path(path).read_text(encoding="utf-8").splitlines()[-1] == "line 49"
        elif "measured" not in reasons[number]:
            assert {"acceptance_rate", "tokens_per_second", "throughput", "startup_seconds"} <= run.data.metrics.keys()
    report = (outputs / "one" / "report.md").read_text(encoding="utf-8")
    assert "## Failed trials" in report and "Pareto front" in report

    best = outputs / "one" / "best.json"
    export = json.loads(best.read_text(encoding="utf-8"))
    assert export["config"]["method"] == "prompt_lookup"
    assert export["evidence"]["speedup"] == pytest.approx(SPEEDUP + 0.01, abs=0.01)
    assert export["environment"]["backend"] == {
        "name": "fake", "workload": {"concurrency": 1, "goal": "decoding"}, "engine": {"name": "fake", "version": 1},
        "target": Export.load(best).environment["backend"]["target"],
    }  # fmt: skip

    measure = (str(best), "measure.held_out_prompts=6", "target.device=cpu", f"outputs={outputs}")
    verify = (f"export={measure[0]}", *measure[1:])
    assert launch("verify", *verify, cwd=tmp_path).returncode == 2
    done = launch("verify", *verify, "backend=layerskip", FAKE, "+backend.version=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    record = json.loads((outputs / "verify.json").read_text(encoding="utf-8"))
    assert record["measured"]["speedup"] == pytest.approx(SPEEDUP + 0.01, abs=0.01)
    changed = {"field": "environment.backend.engine.version", "exported": "1", "now": "2"}
    assert changed in record["differences"]
