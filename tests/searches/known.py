"""A bench with known speedups, for tests of decisions that depend on measurements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import optuna

from layerskip import PromptSet, SpeculativeConfig
from layerskip.decoding.stats import DecodeStats, Round
from layerskip.measure.losslessness import Losslessness
from layerskip.measure.measurement import Sample
from layerskip.prompts import PromptItem
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, Bench
from searches.study.objective import MeasureSettings, Objective
from searches.study.study import StudySettings, run_trials

PROMPTS = PromptSet.of([f"prompt {i}" for i in range(8)])
HELD_OUT = PromptSet.of([f"held-out {i}" for i in range(24)])
SETTINGS = MeasureSettings(prompts=3, survivor_prompts=5, survivor_repeats=0)


@dataclass
class Known(Bench):
    """Plain decoding takes one second for ten tokens, times the drift of the machine; others divide it by their speedup."""

    speedups: Mapping[SpeculativeConfig, float]
    drift: Callable[[int], float] = lambda call: 1.0
    calls: int = 0
    asked: list[tuple[SpeculativeConfig, str]] = field(default_factory=list)
    layers: int = 6
    exact: bool = True
    conditions: str | None = None

    def compare(
        self,
        configs: Mapping[str, SpeculativeConfig],
        prompts: PromptSet,
        repeats: int,
        seed: int,
        without: Collection[str] = (),
        before: PromptSet | None = None,
    ) -> Iterator[dict[str, Sample]]:
        for _ in range(repeats):
            for item in prompts:
                seconds = self.drift(self.calls)
                self.calls += 1
                row = {BASELINE: self._sample(item, seconds)}
                for name, config in configs.items():
                    if name in without:
                        continue
                    self.asked.append((config, item.id))
                    row[name] = self._sample(item, seconds / self.speedups.get(config, 1.0))
                yield row

    @staticmethod
    def _sample(item: PromptItem, seconds: float) -> Sample:
        return Sample(item.id, item.category, 11, 10, 0.1, seconds, 1, DecodeStats((Round(0, 0, 1),) * 10), Losslessness(1))


def lookup(length: int) -> SpeculativeConfig:
    return SpeculativeConfig("prompt_lookup", length)


def run_known(bench: Known, *configs: SpeculativeConfig, remeasure: int = 100, trials: int | None = None) -> optuna.Study:
    space = SearchSpace(bench.layers, kinds=list(dict.fromkeys(["none", "prompt_lookup", *(c.kind for c in configs)])))
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=optuna.pruners.NopPruner())
    for config in configs:
        study.enqueue_trial(space.params(config))
    objective = Objective(bench, space, PROMPTS, SETTINGS, seed=0)
    run_trials(study, objective, StudySettings(n_trials=trials or len(configs), remeasure=remeasure), lambda trial: None)
    return study
