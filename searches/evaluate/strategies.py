"""Strategies that search for sub-layers to skip: published ones and ours. They share everything except the search itself.

- ``random``: random masks and draft lengths.
- ``tpe``: Optuna's default sampler over all 2L bits, draft length 5.
- ``draft_verify``: a Gaussian process over 2L numbers with a cut at one half, as in Draft & Verify (arXiv 2309.08168),
  section 3.2.
- ``swift``: random masks with a fixed skip ratio and an occasional Bayesian step, scored by the matching tokens of a
  parallel pass, as in SWIFT (arXiv 2410.06916), section 4.2.
- ``ours``: proposals from scans, then measurements.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import optuna

from layerskip import Measurement, PromptSet, SkipMask, SpeculativeConfig, StopRule
from layerskip.measure.measurement import Sample
from searches.predict.predictor import SpeedupPredictor
from searches.predict.proposals import ProposalSettings, propose
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, Bench
from searches.study.gaussian_process import GaussianProcess

_CANDIDATE = "candidate"
_SUBLAYERS = ("attention", "mlp")
# SWIFT: share of sub-layers that a mask skips, masks between two Bayesian steps, and masks in all.
_SKIP_RATIO, _BAYESIAN_EVERY, _MOST_MASKS = 0.45, 25, 1000

Screen = Callable[[Sequence[SkipMask]], Sequence[float]]
"""Returns the acceptance rate of the first drafted token of each mask."""


class TimeUp(Exception):
    """A strategy's budget that is spent."""


@dataclass
class Race:
    """State of one strategy in a race: its measurements, and its claims, the configurations that it would export.

    Args:
        bench: measures configurations.
        prompts: tune prompts of a measurement.
        layers: number of layers of the target.
        seconds: budget; all time counts.
        seed: seed of the strategy.
        space: which layers may be skipped, for strategies that protect some, and the draft lengths.
        prepare_predictor: prepares a predictor; its time counts.
        screen: prepares only what screens masks; its time counts.
        clock: returns the current time in seconds.
        proposals: how many masks our strategy scans.
        scanned: prompts that the predictor scans; None for ``prompts``.
        claims: time and configuration of each claim.
        measured: number of measurements.
        speedups: speedup of every measured configuration.
    """

    bench: Bench
    prompts: PromptSet
    layers: int
    seconds: float
    seed: int
    space: SearchSpace
    prepare_predictor: Callable[[], SpeedupPredictor]
    screen: Callable[[], Screen]
    clock: Callable[[], float] = time.monotonic
    proposals: ProposalSettings = field(default_factory=ProposalSettings)
    scanned: PromptSet | None = None
    claims: list[tuple[float, SpeculativeConfig]] = field(default_factory=list)
    measured: int = 0
    speedups: dict[SpeculativeConfig, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._start = self.clock()
        self._rows: dict[SpeculativeConfig, list[dict[str, Sample]]] = {}

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._start

    @property
    def leader(self) -> SpeculativeConfig:
        """The fastest measured configuration."""
        return max(self.speedups, key=lambda config: self.speedups[config])

    def measure(self, config: SpeculativeConfig, prompts: PromptSet | None = None) -> float:
        """Measure a configuration and claim the leader if it changed. Repeated measurements are pooled.

        Args:
            config: the configuration.
            prompts: the prompts; None for those of the race. A strategy must use the same for all configurations.

        Returns:
            The speedup over plain decoding.

        Raises:
            TimeUp: the budget is spent; a measurement that exceeds it does not count.
        """
        self.check_budget()
        rows = list(self._rows.get(config, ()))
        for row in self.bench.compare({_CANDIDATE: config}, prompts or self.prompts, 1, self.seed + self.measured):
            rows.append(row)
            self.check_budget()
        self.measured += 1
        self._rows[config] = rows
        self.speedups[config] = Measurement.of(rows, BASELINE, _CANDIDATE).speedup
        if not self.claims or self.claims[-1][1] != self.leader:
            self.claim(self.leader)
        return self.speedups[config]

    def claim(self, config: SpeculativeConfig) -> None:
        """Record the configuration that would be exported from now on.

        Raises:
            TimeUp: the budget is spent; later claims do not count.
        """
        self.check_budget()
        self.claims.append((self.spent, config))

    def check_budget(self) -> None:
        """Raise :class:`TimeUp` if the budget is spent."""
        if self.spent > self.seconds:
            raise TimeUp


Strategy = Callable[[Race], None]
"""Searches until it is finished or its race raises :class:`TimeUp`."""


def random_search(race: Race) -> None:
    """Measure random masks with random draft lengths."""
    source = random.Random(race.seed)
    while True:
        flags = [tuple(source.random() < 0.5 for _ in range(race.layers)) for _ in range(2)]
        race.measure(_layer_skip(SkipMask(*flags), source.randint(*race.space.skip_length)))


def default_tpe(race: Race) -> None:
    """Search 2L bits with Optuna's default sampler, draft length 5."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=race.seed))
    while True:
        trial = study.ask()
        flags = [tuple(bool(trial.suggest_int(f"{kind}_{i}", 0, 1)) for i in range(race.layers)) for kind in _SUBLAYERS]
        study.tell(trial, race.measure(_layer_skip(SkipMask(*flags), 5)))


def draft_verify(race: Race) -> None:
    """Search 2L numbers with a Gaussian process, with the adaptive stop threshold.

    Source: Draft & Verify, arXiv 2309.08168, section 3.2.
    """
    study = optuna.create_study(direction="maximize", sampler=GaussianProcess(n_startup_trials=10, seed=race.seed))
    longest = race.space.skip_length[1]
    while True:
        trial = study.ask()
        flags = [
            tuple(trial.suggest_float(f"{kind}_{i}", 0.0, 1.0) > 0.5 for i in range(race.layers)) for kind in _SUBLAYERS
        ]
        study.tell(trial, race.measure(_layer_skip(SkipMask(*flags), longest, StopRule("adaptive", 0.6))))


def swift(race: Race) -> None:
    """Score masks with a fixed skip ratio by their first drafted token, and claim the best one.

    Masks are random, except that a Gaussian process proposes every 25th. The strategy ends after 1000 masks.

    Source: SWIFT, arXiv 2410.06916, section 4.2.
    """
    agreements = race.screen()
    source = random.Random(race.seed)
    parts = [(kind, layer) for kind in _SUBLAYERS for layer in race.space.skippable]
    count = min(len(parts), round(_SKIP_RATIO * 2 * race.layers))
    study = optuna.create_study(direction="maximize", sampler=GaussianProcess(n_startup_trials=1, seed=race.seed))
    ranges: dict[str, optuna.distributions.BaseDistribution]
    ranges = {f"{kind}_{layer}": optuna.distributions.FloatDistribution(0.0, 1.0) for kind, layer in parts}
    best = -1.0
    for turn in range(1, _MOST_MASKS + 1):
        race.check_budget()
        bayesian = turn % _BAYESIAN_EVERY == 0
        if bayesian:
            trial = study.ask(ranges)
            order = sorted(parts, key=lambda part: -trial.params[f"{part[0]}_{part[1]}"])
        else:
            order = source.sample(parts, len(parts))
        skipped = order[:count]
        mask = SkipMask.of(race.layers, *({layer for kind, layer in skipped if kind == which} for which in _SUBLAYERS))
        (score,) = agreements([mask])
        if bayesian:
            study.tell(trial, score)
        else:
            values = {f"{kind}_{layer}": float((kind, layer) in skipped) for kind, layer in parts}
            study.add_trial(optuna.trial.create_trial(params=values, distributions=ranges, value=score))
        if score > best:
            best = score
            race.claim(_layer_skip(mask, race.space.skip_length[1], StopRule("threshold", 0.8)))


def ours(race: Race) -> None:
    """Scan masks, measure the proposals on the scanned prompts, then measure the leader again and again.

    Claims the best screened mask so far, then the one with the best prediction, then the fastest measured one. The leader is
    measured again, as it may lead by chance. Few configurations are measured, so all scanned prompts are affordable.
    """
    predictor = race.prepare_predictor()
    proposals = propose(predictor, race.space, race.proposals, race.check_budget, on_best=race.claim)
    race.claim(proposals[0].config)
    for prediction in proposals:
        race.measure(prediction.config, race.scanned)
    while True:
        race.measure(race.leader, race.scanned)


STRATEGIES: dict[str, Strategy] = {
    "random": random_search,
    "tpe": default_tpe,
    "draft_verify": draft_verify,
    "swift": swift,
    "ours": ours,
}


def _layer_skip(mask: SkipMask, length: int, stop: StopRule | None = None) -> SpeculativeConfig:
    return SpeculativeConfig("layer_skip", length, mask=mask.format(), stop=stop or StopRule())
