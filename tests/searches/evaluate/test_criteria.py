"""What evaluation programs share: criteria, resumed work, and refusals of bad input by the field's name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.evaluate.calibration import calibrate
from searches.evaluate.criteria import Count, resume
from searches.evaluate.exactness import exactness
from searches.evaluate.gpu import measure_gpu
from searches.evaluate.predictions import compare_predictions
from searches.evaluate.race import race_strategies
from searches.evaluate.scale import measure_scale


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


REFUSED = {
    calibrate: ("itself.prompts=4", "coverage.prompts=[12,x]", "planted.layers=2", "itself.max_winners=few", "seed=-1"),
    exactness: ("lengths=[]", "lengths=[0]", "thresholds=[1.5]", "shares=3", "count=none", "max_new_tokens=1"),
    measure_gpu: ("seconds=0", "seed=x"),
    compare_predictions: ("lengths=[a]", "masks=1", "max_error=-1"),
    race_strategies: ("strategies=[x]", "strategies=[ours]", "strategies=[draft_verify,swift]", "seeds=1", "max_share=5%"),
    measure_scale: ("only=[five]", "layers=1", "scenarios.one.kills=-1", "trial_prompts=x"),
}
CASES = [(program, override) for program, overrides in REFUSED.items() for override in overrides]


@pytest.mark.parametrize(("program", "override"), CASES, ids=[override for _, override in CASES])
def test_refusals_name_the_field(program: Callable[[DictConfig], None], override: str, tmp_path: Path) -> None:
    config = compose_config(program.__module__.rpartition(".")[2], [override, f"outputs={tmp_path}"])
    with pytest.raises(InputError, match=f"^{re.escape(override.partition('=')[0])}: "):
        program(config)
    assert not list(tmp_path.iterdir())
