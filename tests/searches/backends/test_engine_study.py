"""Whole studies of engines, which are stand-ins: killed at random moments, with a configuration that no engine starts."""

from __future__ import annotations

import random
import shlex
from collections import Counter
from pathlib import Path

import pytest
from optuna.trial import TrialState

from layerskip import Export
from searches.app.composition import literal
from searches.tracking.names import ENGINE_FAILED
from tests.searches.backends.processes import STANDIN, running, wait_for
from tests.searches.programs import execute, journal_study, kill_study, quick, runs, sqlite, tracked

pytestmark = pytest.mark.system

_TRIALS = 6


def test_a_killed_study_leaves_no_engine_and_is_finished_by_the_same_command(tiny_folder: Path, tmp_path: Path) -> None:
    """Engines that draft 5 tokens do not start, which fails trials and nothing else."""
    (folder := tmp_path / "processes").mkdir()
    outputs = tracked(tmp_path / "outputs")
    words = [*STANDIN, "--port", "{port}", "--folder", str(folder), "--broken-length", "5"]
    command = shlex.join([*words, "--speculative-config", "{speculative_config}"])
    overrides = quick(
        tiny_folder,
        outputs,
        "backend=server",
        f"backend.command={literal(command)}",
        "space.methods=[none,prompt_lookup]",
        "space.ranges.prompt_lookup.num_speculative_tokens=[4,6]",
        f"study.n_trials={_TRIALS}",
        "study.name=engines",
    )
    moment = random.Random(3)
    killed = []
    for _ in range(2):
        killed.append(kill_study(*overrides, cwd=tmp_path, seconds=moment.uniform(0.1, 1.5)))
        assert wait_for(folder, 0) == []
    assert any(killed)
    result = execute("layerskip", *overrides, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert running(folder) == []
    study = journal_study(outputs, "engines")
    states = Counter(trial.state for trial in study.trials)
    assert states[TrialState.COMPLETE] + states[TrialState.PRUNED] == _TRIALS
    assert states[TrialState.RUNNING] == 0
    broken = [trial for trial in study.trials if trial.user_attrs.get("config", {}).get("num_speculative_tokens") == 5]
    reasons = [trial.user_attrs.get("reason") for trial in broken]
    assert reasons.count(None) <= sum(killed), "only a killed trial has no reason"
    assert all(reason.startswith(ENGINE_FAILED) for reason in reasons if reason is not None), reasons
    finished = [trial.number for trial in study.trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert Counter(int(run.data.tags["trial_number"]) for run in runs(sqlite(outputs), "trial")) == Counter(finished)
    evidence = Export.load(outputs / "engines" / "best.json").evidence
    assert evidence["prompts"] == 2
    assert {"throughput", "baseline_throughput", "ttft_p95", "baseline_tpot_p95"} <= evidence["metrics"].keys()
