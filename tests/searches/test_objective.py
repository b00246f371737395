"""What a trial records when something is wrong: memory that runs out, an output that changed, a defect."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

from layerskip import PromptSet, Sampling, SpeculativeConfig, Target
from layerskip.draft import Draft
from layerskip.drafters.prompt_lookup import PromptLookup
from searches.bench import ModelBench
from searches.finals import measure_finals
from searches.objective import MeasureSettings, Objective, OutputChanged
from searches.space import SearchSpace
from searches.standings import ranking
from searches.study import StudySettings, finished, run_trials

SETTINGS = MeasureSettings(max_new_tokens=8, prompts=2, finalists=2)
PROMPTS = PromptSet.of(["one two one two", "three four three four", "five six"])
LOOKUP = SpeculativeConfig("prompt_lookup", 4, ngram_min=1, ngram_max=2)


def _bench(target: Target) -> ModelBench:
    return ModelBench(target, Sampling(), SETTINGS.max_new_tokens)


def _study(target: Target, *configs: SpeculativeConfig) -> tuple[optuna.Study, Objective]:
    space = SearchSpace(target.layers, protect_first=0, protect_last=0)
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    for config in configs:
        study.enqueue_trial(space.params(config))
    return study, Objective(_bench(target), space, PROMPTS, SETTINGS, seed=0)


def _run(study: optuna.Study, objective: Objective, trials: int) -> None:
    run_trials(study, objective, StudySettings(n_trials=trials), lambda trial: None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_is_knowledge(
    error: BaseException, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Draft:
        raise error

    monkeypatch.setattr(PromptLookup, "draft", fail)
    study, objective = _study(tiny_target, LOOKUP, SpeculativeConfig())
    _run(study, objective, 2)
    failed, good = finished(study)
    assert failed.state == TrialState.PRUNED
    assert failed.user_attrs["reason"] == "out of memory"
    assert failed.constraints["out_of_memory"] > 0
    assert good.state == TrialState.COMPLETE
    assert good.constraints["out_of_memory"] <= 0


def test_a_defect_is_raised_and_counts_as_no_trial(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Draft:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(PromptLookup, "draft", fail)
    study, objective = _study(tiny_target, LOOKUP)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        _run(study, objective, 1)
    assert finished(study) == []
    assert study.trials[0].state == TrialState.FAIL


def test_a_changed_float32_output_stops_everything(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerskip import decode

    genuine = decode.verify

    def gullible(draft: Draft, target_probs: torch.Tensor, generator: Any = None) -> Any:
        """Accepts every drafted token."""
        size = draft.tokens.shape[0]
        return genuine(draft, torch.cat((draft.tokens, target_probs[size:])), generator)

    monkeypatch.setattr(decode, "verify", gullible)
    study, objective = _study(tiny_target, LOOKUP)
    with pytest.raises(OutputChanged):
        _run(study, objective, 1)


def test_replicates_of_a_configuration_are_pooled(tiny_target: Target) -> None:
    other = SpeculativeConfig("prompt_lookup", 2, ngram_min=1, ngram_max=1)
    study, objective = _study(tiny_target, LOOKUP, other, LOOKUP, SpeculativeConfig())
    _run(study, objective, 4)
    ranked = {standing.config: standing for standing in ranking(study)}
    assert set(ranked) == {LOOKUP, other}
    found = [study.trials[number].user_attrs["measurement"] for number in (0, 2)]
    seconds, baseline = (sum(part[name] for part in found) for name in ("decode_seconds", "baseline_decode_seconds"))
    assert ranked[LOOKUP].speedup == pytest.approx(baseline / seconds)
    assert (ranked[LOOKUP].complete, ranked[LOOKUP].last) == (2, 2)


def test_finals_are_measured_once_and_without_a_clear_win_no_drafting_wins(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, objective = _study(tiny_target, LOOKUP, SpeculativeConfig())
    _run(study, objective, 2)
    finals = measure_finals(study, _bench(tiny_target), PROMPTS, SETTINGS, seed=0)
    heard: list[int] = []
    again = measure_finals(study, _bench(tiny_target), PROMPTS, SETTINGS, seed=0, on_prompt=lambda: heard.append(1))
    assert again.finalists == finals.finalists
    assert not heard
    stored = study.user_attrs["finals"]
    for low, high, kind in ((0.99, 1.5, "none"), (1.01, 1.5, "prompt_lookup")):
        stored["found"]["0"] |= {"prompts": 5, "speedup": 1.2, "speedup_low": low, "speedup_high": high}
        study.set_user_attr("finals", stored)
        decided = measure_finals(study, _bench(tiny_target), PROMPTS, SETTINGS, seed=0)
        assert decided.winner.config.kind == kind
    stored["found"]["0"]["losslessness"]["verdict"] = "different"
    study.set_user_attr("finals", stored)
    assert measure_finals(study, _bench(tiny_target), PROMPTS, SETTINGS, seed=0).winner.config.kind == "none"
