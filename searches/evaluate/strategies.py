"""How do others search for sub-layers to skip? Published strategies beside ours, told apart by nothing but the search.

``random``: masks drawn bit by bit. ``tpe``: Optuna's default sampler over all 2L bits at draft length 5. ``draft_verify``: a
Gaussian process over 2L numbers cut at one half, as in Draft & Verify (arXiv 2309.08168), section 3.2. ``swift``: random
masks at a fixed skip ratio with a Bayesian step now and then, scored by how many tokens of a parallel pass match, as in
SWIFT (arXiv 2410.06916), section 4.2. ``ours``: proposals foretold by scans, then real decoding.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import optuna

from layerskip import Measurement, PromptSet, SkipMask, SpeculativeConfig, StopRule
from layerskip.measure.measurement import Sample
from searches.predict.oracle import Oracle
from searches.predict.proposals import ProposalSettings, propose
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, Bench
from searches.study.gaussian_process import GaussianProcess

_CANDIDATE = "candidate"


Screen = Callable[[Sequence[SkipMask]], Sequence[float]]
"""Says of each mask how often its first drafted token is the target's."""


class TimeUp(Exception):
    """A strategy's budget is spent."""


@dataclass
class Race:
    """One strategy at work: it measures, and claims what it would export by now.

    Args:
        bench: measures configurations.
        prompts: tune prompts of a measurement.
        layers: how many there are to skip.
        seconds: the budget; whatever the strategy does counts.
        seed: its own.
        space: which layers may be skipped, where a strategy protects some.
        prepare_oracle: makes an oracle; its time counts.
        screen: makes what an oracle screens masks with, for who needs no more; its time counts.
        clock: seconds since some moment.
        proposals: how many masks ours asks its oracle about.
        scanned: the prompts that the oracle sees, for who measures few configurations on more; None for the same.
        claims: when what was claimed.
        measured: how many measurements there were.
        speedups: of every configuration that was measured.
    """

    bench: Bench
    prompts: PromptSet
    layers: int
    seconds: float
    seed: int
    space: SearchSpace
    prepare_oracle: Callable[[], Oracle]
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

    def measure(self, config: SpeculativeConfig, prompts: PromptSet | None = None) -> float:
        """Decode with a configuration, and claim whichever is the fastest now; replicates of one are pooled.

        Args:
            config: to decode with.
            prompts: the race's by default; whoever names others does so for all configurations.

        Raises:
            TimeUp: the budget is spent; a measurement that ran over it does not count.
        """
        self.check()
        rows = list(self._rows.get(config, ()))
        for row in self.bench.compare({_CANDIDATE: config}, prompts or self.prompts, 1, self.seed + self.measured):
            rows.append(row)
            self.check()
        self.measured += 1
        self._rows[config] = rows
        self.speedups[config] = Measurement.of(rows, BASELINE, _CANDIDATE).speedup
        if not self.claims or self.claims[-1][1] != self.leader:
            self.claim(self.leader)
        return self.speedups[config]

    @property
    def leader(self) -> SpeculativeConfig:
        """The fastest of what was measured so far."""
        return max(self.speedups, key=lambda config: self.speedups[config])

    def claim(self, config: SpeculativeConfig) -> None:
        """Say what would be exported from now on.

        Raises:
            TimeUp: the budget is spent; what was found later does not count.
        """
        self.check()
        self.claims.append((self.spent, config))

    def check(self) -> None:
        """Raises TimeUp once the budget is spent."""
        if self.spent > self.seconds:
            raise TimeUp


class Strategy(Protocol):
    """Searches until it has found enough, or its race raises TimeUp."""

    def __call__(self, race: Race) -> None: ...


def random_search(race: Race) -> None:
    """Masks bit by bit, any draft length."""
    source = random.Random(race.seed)
    while True:
        flags = [tuple(source.random() < 0.5 for _ in range(race.layers)) for _ in range(2)]
        race.measure(_skip(SkipMask(*flags), source.randint(*race.space.skip_length)))


def default_tpe(race: Race) -> None:
    """Optuna's default sampler over 2L bits, draft length 5."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=race.seed))
    while True:
        trial = study.ask()
        flags = [
            tuple(bool(trial.suggest_int(f"{kind}_{i}", 0, 1)) for i in range(race.layers)) for kind in ("attention", "mlp")
        ]
        study.tell(trial, race.measure(_skip(SkipMask(*flags), 5)))


def draft_verify(race: Race) -> None:
    """A Gaussian process over 2L numbers, drafts stopped by the adaptive threshold."""
    study = optuna.create_study(direction="maximize", sampler=GaussianProcess(n_startup_trials=10, seed=race.seed))
    longest = race.space.skip_length[1]
    while True:
        trial = study.ask()
        mask = _cut(trial, race.layers)
        study.tell(trial, race.measure(_skip(mask, longest, StopRule("adaptive", 0.6))))


def swift(race: Race, ratio: float = 0.45, every: int = 25, most: int = 1000) -> None:
    """Masks at a fixed skip ratio, so many at most: random, and every so often the Gaussian process's; the best match is
    claimed."""
    agreements = race.screen()
    source = random.Random(race.seed)
    parts = [(kind, layer) for kind in ("attention", "mlp") for layer in race.space.skippable]
    count = min(len(parts), round(ratio * 2 * race.layers))
    study = optuna.create_study(direction="maximize", sampler=GaussianProcess(n_startup_trials=1, seed=race.seed))
    ranges: dict[str, optuna.distributions.BaseDistribution]
    ranges = {f"{kind}_{layer}": optuna.distributions.FloatDistribution(0.0, 1.0) for kind, layer in parts}
    best = -1.0
    for turn in range(1, most + 1):
        race.check()
        if turn % every == 0:
            trial = study.ask(ranges)
            order = sorted(parts, key=lambda part: -trial.params[f"{part[0]}_{part[1]}"])
        else:
            order = source.sample(parts, len(parts))
        chosen = order[:count]
        mask = SkipMask.of(
            race.layers,
            {layer for kind, layer in chosen if kind == "attention"},
            {layer for kind, layer in chosen if kind == "mlp"},
        )
        (score,) = agreements([mask])
        values = {f"{kind}_{layer}": float((kind, layer) in chosen) for kind, layer in parts}
        if turn % every == 0:
            study.tell(trial, score)
        else:
            study.add_trial(optuna.trial.create_trial(params=values, distributions=ranges, value=score))
        if score > best:
            best = score
            race.claim(_skip(mask, race.space.skip_length[1], StopRule("threshold", 0.8)))


def ours(race: Race) -> None:
    """What looks fastest is claimed as soon as it does, then what is foretold to be fastest, then what is measured to be:
    the leader again and again, as it may lead by luck. Few are measured, hence on all prompts that are scanned."""
    oracle = race.prepare_oracle()
    found = propose(oracle, race.space, race.proposals, race.check, on_best=race.claim)
    race.claim(found[0].config)
    for prediction in found:
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


def _skip(mask: SkipMask, length: int, stop: StopRule | None = None) -> SpeculativeConfig:
    return SpeculativeConfig("layer_skip", length, mask=mask.format(), stop=stop or StopRule())


def _cut(trial: optuna.Trial, layers: int) -> SkipMask:
    flags = [
        tuple(trial.suggest_float(f"{kind}_{i}", 0.0, 1.0) > 0.5 for i in range(layers)) for kind in ("attention", "mlp")
    ]
    return SkipMask(*flags)
