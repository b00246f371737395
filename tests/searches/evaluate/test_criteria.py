"""Tests of what evaluation programs share: criteria and resumed work."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from searches.evaluate.criteria import Count, resume


def test_a_criterion_is_met_or_missed() -> None:
    assert Count("", 19, 20, minimum=0.95).passed
    assert not Count("", 18, 20, minimum=0.95).passed
    assert Count("", 1, 20, maximum=0.05).passed
    assert not Count("", 2, 20, maximum=0.05).passed
    assert not Count("", float("nan"), minimum=0.9).passed
    assert [*Count("x", 1, 20, maximum=0.01).cells().values()] == ["x", "1 of 20", "0.05", "at most 0.01", "MISSED"]


def test_finished_jobs_are_kept_until_the_program_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, done = OmegaConf.create({"outputs": str(tmp_path)}), list[str]()

    def job(name: str) -> int:
        done.append(name)
        if len(done) == 2:
            raise KeyboardInterrupt
        return len(done)

    jobs = {name: partial(job, name) for name in "abc"}
    with pytest.raises(KeyboardInterrupt):
        resume(config, "some", [1], jobs, "job")
    assert resume(config, "some", [1], jobs, "job") == {"a": 1, "b": 3, "c": 4}
    assert resume(config, "some", [1], jobs, "job") == {"a": 1, "b": 3, "c": 4}
    assert "".join(done) == "abbc"
    resume(config, "some", [2], jobs, "job")
    monkeypatch.setattr("searches.evaluate.criteria.RESULTS_VERSION", 0)
    resume(config, "some", [1], jobs, "job")
    assert "".join(done) == "abbc" + 2 * "abc"
