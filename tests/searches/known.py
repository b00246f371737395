"""A bench with known speedups, for tests of decisions that depend on measurements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial, create_trial

from layerskip import PromptSet, SpeculativeConfig
from layerskip.decoding.stats import DecodeStats, Round
from layerskip.measure.losslessness import Losslessness
from layerskip.measure.measurement import Sample
from layerskip.prompts import PromptItem
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, ModelBench
from searches.study.objective import MeasureSettings, Objective
from searches.study.study import StudySettings, run_trials
from searches.tracking.names import PREDICTED

PROMPTS = PromptSet.of([f"prompt {i}" for i in range(8)])
HELD_OUT = PromptSet.of([f"held-out {i}" for i in range(24)])
SETTINGS = MeasureSettings(prompts=3, survivor_prompts=5)


@dataclass
class Known(ModelBench):
    """Plain decoding takes one second for ten tokens, times the drift of the machine; others divide it by their speedup.

    Speedups may depend on the name of a prompt.
    """

    speedups: Mapping[SpeculativeConfig, float] | Callable[[str], Mapping[SpeculativeConfig, float]]
    drift: Callable[[int], float] = lambda call: 1.0
    calls: int = 0
    asked: list[tuple[SpeculativeConfig, str]] = field(default_factory=list)
    comparisons: list[tuple[list[str], int, list[str]]] = field(default_factory=list)  # prompts, seed, prompts before
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
        self.comparisons.append(([item.id for item in prompts], seed, [item.id for item in before or ()]))
        for item in [*prompts] * repeats:
            speedups = self.speedups(item.id) if callable(self.speedups) else self.speedups
            seconds = self.drift(self.calls)
            self.calls += 1
            row = {BASELINE: self._sample(item, seconds)}
            for name, config in configs.items():
                if name not in without:
                    self.asked.append((config, item.id))
                    row[name] = self._sample(item, seconds / speedups.get(config, 1.0))
            yield row

    def count(self, config: SpeculativeConfig) -> int:
        """Return how many prompts a configuration has decoded."""
        return sum(asked == config for asked, _ in self.asked)

    def metrics(self) -> Mapping[str, float]:
        return {}

    @staticmethod
    def _sample(item: PromptItem, seconds: float) -> Sample:
        return Sample(item.id, item.category, 11, 10, 0.1, seconds, 1, DecodeStats((Round(0, 0, 1),) * 10), Losslessness(1))


def lookup(length: int) -> SpeculativeConfig:
    return SpeculativeConfig("prompt_lookup", length)


def measured_trial(
    config: SpeculativeConfig, speedups: Mapping[str, float], predicted: float | None = None, low: float = 1.0
) -> FrozenTrial:
    """Return a trial with speedups by prompt over ten tokens per second, the first as its value."""
    rates = [10 * speedup for speedup in speedups.values()]
    table = {
        "prompt_id": list(speedups),
        "tokens_per_second": rates,
        "decode_seconds": [10 / rate for rate in rates],
        "baseline_tokens_per_second": [10.0] * len(rates),
    }
    measurement = {"losslessness": {"verdict": "exact"}, "speedup_low": low}
    attributes = {"config": config.to_dict(), "table": table, "measurement": measurement, PREDICTED: predicted}
    return create_trial(value=rates[0] / 10, user_attrs=attributes)


def new_study(*configs: SpeculativeConfig, pruner: BasePruner | None = None) -> optuna.Study:
    """Return a study in which lookups are queued; without a pruner no trial is stopped early."""
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner or optuna.pruners.NopPruner())
    for config in configs:
        study.enqueue_trial(_space(Known.layers, configs).params(config))
    return study


def objective_of(bench: Known, *configs: SpeculativeConfig, settings: MeasureSettings = SETTINGS, **more: Any) -> Objective:
    """Return the objective of a space with prompt lookup and the drafters of some configurations."""
    given = {"prompts": PROMPTS, "seed": 0} | more
    return Objective(bench, _space(bench.layers, configs), settings=settings, **given)


def _space(layers: int, configs: Sequence[SpeculativeConfig]) -> SearchSpace:
    return SearchSpace(layers, methods=list(dict.fromkeys(["none", "prompt_lookup", *(c.method for c in configs)])))


def run_known(
    bench: Known, *configs: SpeculativeConfig, trials: int | None = None, pruner: BasePruner | None = None, **more: Any
) -> optuna.Study:
    """Return a study that tried some configurations; ``more`` goes to :func:`objective_of`."""
    study, settings = new_study(*configs, pruner=pruner), StudySettings(n_trials=trials or len(configs))
    run_trials(study, objective_of(bench, *configs, **more), settings)
    return study
