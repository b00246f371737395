"""The back end of a program: what it leaves out of a study, what an export says of it, and a study on another engine."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from optuna.trial import TrialState

from layerskip import Export, SpeculativeConfig, Target
from searches.app.checks import InputError
from searches.app.composition import compose_config, literal
from searches.backends.backend import Workload
from searches.backends.layerskip import LayerskipBackend
from searches.backends.selection import exported_backend, supported_space
from searches.backends.server import ServerBackend
from searches.space.search_space import SearchSpace
from searches.study.plan import Plan, describe
from searches.tracking.names import ENGINE_FAILED
from tests.searches.backends.processes import STANDIN, running, wait_for
from tests.searches.conftest import Launch
from tests.searches.programs import execute, kill_study, quick, runs, sqlite, stored_study, tracked

pytestmark = pytest.mark.system


def _server(*words: str) -> tuple[str, str]:
    """Return the overrides for servers that a command starts."""
    command = shlex.join([*words, "--port", "{port}", "--speculative-config", "{speculative_config}"])
    return "backend=server", f"backend.command={literal(command)}"


def test_methods_are_left_out_in_one_line(tiny_target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    space = SearchSpace(tiny_target.layers, methods=["none", "prompt_lookup", "token_recycling", "lookahead"])
    assert supported_space(space, LayerskipBackend(tiny_target)) is space
    assert capsys.readouterr().out == ""
    backend = ServerBackend(tiny_target, command="serve {port} {num_speculative_tokens}")
    assert supported_space(space, backend).available_methods == ("none", "prompt_lookup")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("space.methods: left out for backend=server: token_recycling ")
    with pytest.raises(InputError, match=r"^space\.memory: has no effect on backend=server"):
        supported_space(replace(space, memory="2GiB"), backend)
    with pytest.raises(InputError, match=r"^space\.methods: backend=server"):
        supported_space(SearchSpace(tiny_target.layers, methods=["none", "lookahead"]), backend)


def test_the_own_decoder_does_not_change_what_identifies_a_study(tiny_folder: Path, tmp_path: Path) -> None:
    """Under load, nothing is measured again, as it would be alone."""

    def planned(*overrides: str) -> tuple[Plan, dict[str, Any]]:
        config = compose_config("layerskip", [*quick(tiny_folder, tmp_path), *overrides])
        plan = Plan.of(config)
        return plan, describe(config, plan.target, plan.prompts, plan.backend)

    (alone, own), (_, other) = planned(), planned(*_server("serve"))
    loaded, settings = planned(*_server("other"), "workload.concurrency=4")
    assert not [name for name in own if name.startswith(("backend", "workload", "space.ranges"))]
    assert own.items() < other.items()
    assert other["backend.name"] == "server" and settings["backend.command"] != other["backend.command"]
    assert (alone.measuring.drift < math.inf, loaded.measuring.drift) == (True, math.inf)


def _exported(target: Target, **backend: Any) -> Export:
    environment = {"backend": backend} if backend else {}
    return Export(target.describe(), SpeculativeConfig("prompt_lookup"), environment=environment)


def test_an_export_is_measured_on_its_own_engine_under_its_load(tiny_target: Target) -> None:
    backend, workload = exported_backend(compose_config("verify"), _exported(tiny_target), tiny_target)
    assert (type(backend), workload.concurrency) == (LayerskipBackend, 1)
    config = compose_config("verify", _server("serve"))
    export = _exported(tiny_target, name="server", workload={"concurrency": 8, "goal": "throughput"})
    backend, workload = exported_backend(config, export, tiny_target)
    assert type(backend) is ServerBackend
    assert workload == Workload(8, "throughput")
    with pytest.raises(InputError, match="^workload: the export was measured with 8 requests in flight, for throughput"):
        exported_backend(compose_config("verify", [*_server("serve"), "workload.concurrency=4"]), export, tiny_target)
    backend, _ = exported_backend(config, _exported(tiny_target, name="vllm"), tiny_target)
    assert type(backend) is ServerBackend  # servers may run what was measured on another engine
    with pytest.raises(InputError, match=r"^backend: the export was measured with layerskip, not with server"):
        exported_backend(config, _exported(tiny_target), tiny_target)


@pytest.mark.parametrize("name", ["nonesuch", "../layerskip", ""])
def test_an_export_of_an_unknown_engine_is_refused(name: str, tiny_target: Target) -> None:
    with pytest.raises(InputError, match=r"^environment\.backend: "):
        exported_backend(compose_config("verify"), _exported(tiny_target, name=name), tiny_target)
    with pytest.raises(InputError, match=r"^backend: the export was measured with"):
        exported_backend(compose_config("verify", ["backend=layerskip"]), _exported(tiny_target, name=name), tiny_target)


def test_a_study_of_engines_that_is_killed_leaves_none_and_its_export_is_verified(
    tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    """Engines that draft 5 tokens do not start, which fails trials and nothing else."""
    (folder := tmp_path / "processes").mkdir()
    outputs, trials = tracked(tmp_path / "outputs"), 6
    standin = (*STANDIN, "--folder", str(folder), "--pause", "0.02")
    more = ("study.name=engines", f"study.n_trials={trials}", "measure.held_out_prompts=6")
    space = ("space.methods=[none,prompt_lookup,layer_skip]", "space.ranges.prompt_lookup.num_speculative_tokens=[4,5]")
    overrides = quick(tiny_folder, outputs, *_server(*standin, "--broken-length", "5"), *space, *more)
    assert kill_study(*overrides, cwd=tmp_path, seconds=0.5)
    assert wait_for(folder, 0) == []
    result = execute("layerskip", *overrides, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert running(folder) == []
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("space.methods: left out for backend=server")]
    assert "layer_skip" in line

    study = stored_study(outputs, "engines")
    states = Counter(trial.state for trial in study.trials)
    assert states[TrialState.COMPLETE] + states[TrialState.PRUNED] == trials
    assert states[TrialState.RUNNING] == 0
    broken = [trial for trial in study.trials if trial.user_attrs.get("config", {}).get("num_speculative_tokens") == 5]
    reasons = [trial.user_attrs.get("reason") for trial in broken]
    assert reasons.count(None) <= 1, "only a killed trial has no reason"
    assert all(reason.startswith(ENGINE_FAILED) for reason in reasons if reason is not None), reasons
    finished = {trial.number: trial for trial in study.trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)}
    recorded = {int(run.data.tags["trial_number"]): run for run in runs(sqlite(outputs), "trial")}
    assert recorded.keys() == finished.keys()
    assert len(runs(sqlite(outputs), "trial")) == len(recorded)
    for number, run in recorded.items():
        failed = str(finished[number].user_attrs.get("reason")).startswith(ENGINE_FAILED)
        assert run.info.status == ("FAILED" if failed else "FINISHED")
        if "engine_log" in finished[number].user_attrs:
            path = MlflowClient(sqlite(outputs)).download_artifacts(run.info.run_id, "engine.log", str(tmp_path))
            assert "a planned crash at the start" in Path(path).read_text(encoding="utf-8")
        elif "measurement" in finished[number].user_attrs:
            assert {"acceptance_rate", "tokens_per_second", "throughput", "startup_seconds"} <= run.data.metrics.keys()
    report = (outputs / "engines" / "report.md").read_text(encoding="utf-8")
    assert ("## Failed trials" in report) == any(reasons)

    best = outputs / "engines" / "best.json"
    export = Export.load(best)
    assert (export.config.method, export.evidence["prompts"]) == ("prompt_lookup", 6)
    assert {"throughput", "baseline_throughput", "ttft_p95", "baseline_tpot_p95"} <= export.evidence["metrics"].keys()
    measure = (f"export={best}", "measure.held_out_prompts=6", "target.device=cpu", f"outputs={outputs}")
    assert launch("verify", *measure, cwd=tmp_path).returncode == 2  # no file of others names programs to start
    done = launch("verify", *measure, *_server(*standin), cwd=tmp_path)
    assert done.returncode in (0, 3, 4), done.stderr  # a verdict; which one depends on the machine
    record = json.loads((outputs / "verify.json").read_text(encoding="utf-8"))
    assert record["measured"]["losslessness"]["verdict"] == "exact"
    assert "environment.backend.command" in {each["field"] for each in record["differences"]}
