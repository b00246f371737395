"""Trials that run out of memory, change an output or fail are recorded, and finals are decided."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import optuna
import pytest
import torch
from optuna.trial import TrialState

from layerskip import PromptError, PromptSet, Sampling, SpeculativeConfig, Target, generate, load_target
from layerskip.decoding.draft import Draft
from layerskip.drafters.prompt_lookup import PromptLookup
from layerskip.models.target import NotFinite
from searches.app.application import explain
from searches.backends.layerskip import LayerskipBackend
from searches.report.markdown import summary
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, ModelBench
from searches.study.finals import Finalist, Finals, RunControl, measure_held_out
from searches.study.machine import CostTimer
from searches.study.objective import MeasureSettings, Objective, OutputChanged
from searches.study.study import StudySettings, finished, run_trials
from tests.accelerator import DEVICE
from tests.tiny import VOCABULARY

SETTINGS = MeasureSettings(max_new_tokens=8, prompts=2, finalists=2, held_out_repeats=1, drift=1e9)  # too short for drift
PROMPTS = PromptSet.of(["one two one two", "three four three four", "five six"])
SKIP = SpeculativeConfig("layer_skip", 2, mask="layers:1")
LOOKUP = SpeculativeConfig("prompt_lookup", 4, prompt_lookup_min=1, prompt_lookup_max=2)


def _bench(target: Target) -> ModelBench:
    return ModelBench(LayerskipBackend(target), Sampling(), SETTINGS.max_new_tokens)


def _study(target: Target, *configs: SpeculativeConfig) -> tuple[optuna.Study, Objective]:
    space = SearchSpace(target.layers, protect_first=0, protect_last=0)
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    for config in configs:
        study.enqueue_trial(space.params(config))
    return study, Objective(_bench(target), space, PROMPTS, SETTINGS, seed=0)


def test_running_out_of_memory_is_a_result(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "draft", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
    study, objective = _study(tiny_target, LOOKUP, SpeculativeConfig())
    run_trials(study, objective, StudySettings(n_trials=2))
    failed, good = finished(study)
    assert failed.state == TrialState.PRUNED
    assert failed.user_attrs["reason"] == "out of memory"
    assert failed.constraints["out_of_memory"] > 0
    assert good.state == TrialState.COMPLETE
    assert good.constraints["out_of_memory"] <= 0


@pytest.mark.parametrize("memory", [49, 50])
def test_a_draft_whose_copies_do_not_fit_is_refused(memory: int, tiny_target: Target) -> None:
    study, objective = _study(tiny_target, SpeculativeConfig("quantized"), SpeculativeConfig())
    objective.space = replace(objective.space, memory=memory, copies_bytes=lambda _: {"int4": 50})
    objective.bench = Mock(objective.bench, wraps=objective.bench, exact=True)
    run_trials(study, objective, StudySettings(n_trials=1))
    (refused,) = finished(study)
    over = "out of memory: copies of weights take 50 bytes, and space.memory is 49"
    assert (refused.user_attrs["reason"] == over) == (memory == 49) == (not objective.bench.compare.called)
    assert refused.constraints["out_of_memory"] > 0
    assert memory != 49 or "1 not run (1 out of memory)" in summary(study, None)


def test_a_defect_is_raised_and_is_no_finished_trial(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "draft", Mock(side_effect=RuntimeError("shapes do not match")))
    study, objective = _study(tiny_target, LOOKUP)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run_trials(study, objective, StudySettings(n_trials=1))
    assert finished(study) == []
    assert study.trials[0].state == TrialState.FAIL


def _damaged(folder: Path, token: int) -> Target:
    """The tiny Llama, whose logits are NaN after one token."""
    target = load_target(str(folder), dtype="float32", device=DEVICE)
    with torch.no_grad():
        target.model.get_input_embeddings().weight[token] = float("nan")  # type: ignore[operator]
    return target


def test_logits_that_only_a_draft_makes_nan_are_a_result(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = torch.tensor([150], device=DEVICE)  # a token that the target never says
    monkeypatch.setattr(PromptLookup, "draft", lambda *_: Draft(foreign))
    target = _damaged(tiny_folder, 150)
    study, objective = _study(target, LOOKUP, SpeculativeConfig())
    run_trials(study, objective, StudySettings(n_trials=2))
    failed, good = finished(study)
    assert failed.state == TrialState.PRUNED and good.state == TrialState.COMPLETE
    assert re.match(
        r"the engine failed: .*: the largest logit of .* is nan after position \d+ of prompt ", failed.user_attrs["reason"]
    )
    assert failed.constraints["out_of_memory"] > 0
    finals = measure_held_out({LOOKUP: 2.0}, objective.bench, PROMPTS, SETTINGS, 0, RunControl(tmp_path))
    assert finals.winner.config == SpeculativeConfig() and not finals.finalists[0].stayed
    assert f"left out: {LOOKUP.label()}: " in capsys.readouterr().out


def test_logits_of_plain_decoding_that_are_nan_end_the_study(tiny_folder: Path, tiny_target: Target) -> None:
    outputs = {item.id: generate(tiny_target, item.messages(), max_new_tokens=8).tokens for item in PROMPTS}
    (first_id, first), (second_id, second), _ = outputs.items()
    study, objective = _study(_damaged(tiny_folder, first[0]), LOOKUP)
    with pytest.raises(NotFinite, match=f"^target: .* is nan after position .* of prompt {first_id}; ") as caught:
        run_trials(study, objective, StudySettings(n_trials=1))
    assert study.trials[0].state == TrialState.FAIL
    assert explain(caught.value) == str(caught.value)
    bench = _bench(_damaged(tiny_folder, next(token for token in second if token not in first)))
    for seed in range(4):  # either may decode the prompt first
        with pytest.raises(NotFinite, match=f" of prompt {second_id}; ") as caught:
            list(bench.compare({"candidate": LOOKUP}, PROMPTS, 1, seed))
        assert caught.value.contender == BASELINE


def test_a_changed_float32_output_stops_the_study(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerskip.decoding import decode

    genuine = decode.verify

    def accept_all(draft: Draft, target_probs: torch.Tensor, *rest: Any) -> Any:
        """Accept every drafted token."""
        size = draft.tokens.shape[0]
        return genuine(draft, torch.cat((draft.tokens, target_probs[size:])), *rest)

    monkeypatch.setattr(decode, "verify", accept_all)
    study, objective = _study(tiny_target, LOOKUP)
    with pytest.raises(OutputChanged):
        run_trials(study, objective, StudySettings(n_trials=1))


def _finalist(config: SpeculativeConfig, speedup: float, low: float, verdict: str = "exact", **more: Any) -> Finalist:
    held_out = {"speedup": speedup, "prompts": 5, "losslessness": {"verdict": verdict}} | more
    return Finalist(config, speedup, held_out, low)


@pytest.mark.parametrize(
    ("finalists", "winner"),
    [
        ([_finalist(LOOKUP, 1.2, 1.01)], LOOKUP),
        ([_finalist(LOOKUP, 1.2, 0.99)], None),
        ([_finalist(LOOKUP, 1.2, 1.01, "near_tie")], LOOKUP),
        ([_finalist(LOOKUP, 1.2, 1.01, "different")], None),
        ([_finalist(LOOKUP, 1.2, 1.01, prompts=4)], None),
        ([_finalist(LOOKUP, 1.2, 1.01, prompts=12, empty_prompts=7)], LOOKUP),
        ([_finalist(LOOKUP, 1.2, 1.01, prompts=12, empty_prompts=8)], None),  # they end at once, and have no speed
        ([_finalist(SKIP, 1.3, 1.1), _finalist(LOOKUP, 1.29, 1.1)], LOOKUP),
        ([_finalist(SKIP, 1.3, 1.1), replace(_finalist(LOOKUP, 1.29, 1.1), ties=False)], SKIP),
        ([_finalist(SKIP, 1.3, 1.1), _finalist(LOOKUP, 1.29, 0.9)], SKIP),
        ([_finalist(replace(LOOKUP, num_speculative_tokens=9), 1.3, 1.1), _finalist(LOOKUP, 1.29, 1.1)], LOOKUP),
        ([replace(_finalist(LOOKUP, 1.6, 1.2), stayed=False), _finalist(SKIP, 1.3, 1.1)], SKIP),
        ([], None),
    ],
)
def test_the_simplest_of_those_that_tie_with_the_fastest_wins(
    finalists: list[Finalist], winner: SpeculativeConfig | None
) -> None:
    baseline = {"speedup": 1.0, "prompts": 5, "losslessness": {"verdict": "exact"}}
    assert Finals(tuple(finalists), baseline, 1.0).winner.config == (winner or SpeculativeConfig())


def test_a_study_of_outputs_that_end_at_once_is_refused(tiny_folder: Path) -> None:
    target = load_target(str(tiny_folder), dtype="float32", device=DEVICE)
    target.model.generation_config.eos_token_id = list(range(VOCABULARY))
    study, objective = _study(target, LOOKUP)
    with pytest.raises(PromptError, match="^prompts: every output ends with its first token"):
        run_trials(study, objective, StudySettings(n_trials=2))
    assert [trial.state for trial in study.trials] == [TrialState.FAIL]
    with pytest.raises(PromptError, match="^prompts: every held-out output ends with its first token"):
        measure_held_out({LOOKUP: 2.0}, objective.bench, PROMPTS, SETTINGS, 0)


def test_equal_members_are_timed_once(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Mock(side_effect=lambda target, config, context, *_, **__: context / 10)
    monkeypatch.setattr("searches.study.machine.time_drafting", timed)
    timer, known = CostTimer(tiny_target, Sampling(), 9, 0), dict[str, float]()
    lookup, other = SpeculativeConfig("prompt_lookup"), SpeculativeConfig("layer_skip", 5, mask="attention:1")
    skip, longer = (SpeculativeConfig("layer_skip", length, mask="layers:1") for length in (3, 5))
    for _ in range(2):
        assert timer.draft_costs((lookup, skip, longer), known) == (0.0, 0.9, 0.9)
        assert timer.draft_costs((lookup, other), known) == (0.0, 0.9)
        assert timer.draft_costs((lookup, lookup), known) == ()
    assert [call.args[1].mask for call in timed.call_args_list] == ["layers:1", "attention:1"]
