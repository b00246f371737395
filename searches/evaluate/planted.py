"""Whole searches on simulated decoders whose best configuration is known.

A search succeeds if the true speedup of its export is within 1 % of the best one. It must not export a configuration that is
slower than plain decoding. Where many configurations are only slightly slower, this may happen as often as intervals are
wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import optuna
from optuna.storages import InMemoryStorage

from layerskip import SpeculativeConfig
from searches.app.checks import check_fraction, check_whole
from searches.evaluate.criteria import Count
from searches.evaluate.landscape import Landscape, Prospect
from searches.evaluate.simulated_decoder import Machine, SimulatedBench, SimulatedPredictor
from searches.evaluate.workload import draw_prompts
from searches.predict.preparation import ScanSettings
from searches.predict.proposals import propose_all
from searches.space.search_space import SearchSpace
from searches.study.finals import measure_finals
from searches.study.leaderboard import configuration
from searches.study.objective import MeasureSettings, Objective
from searches.study.pruning import BoundEstimator
from searches.study.starting_points import starting_points
from searches.study.study import StudySettings, finished, open_study, run_trials

CLOSE = 0.99  # share of the best speedup that counts as found


@dataclass(frozen=True)
class PlantedSettings:
    """Number and size of the searches. See :meth:`Landscape.draw` for the kinds of landscapes.

    Args:
        seeds: number of searches on hopeful landscapes.
        hopeless: number of searches on hopeless landscapes.
        close: number of searches on close landscapes.
        layers: number of layers of the simulated targets.
        prompts: number of prompts of each search, tune and held-out together.
        least_hits: smallest share of the hopeful searches that must find the best configuration.
        most_lost: largest share of the close searches that may export something slower than plain decoding.
    """

    seeds: int = 0
    hopeless: int = 0
    close: int = 0
    layers: int = 16
    prompts: int = 48
    least_hits: float | None = 0.95
    most_lost: float | None = 0.05

    def __post_init__(self) -> None:
        for name, least in (("seeds", 0), ("hopeless", 0), ("close", 0), ("layers", 6), ("prompts", 10)):
            check_whole(f"planted.{name}", getattr(self, name), least)
        for name in ("least_hits", "most_lost"):
            check_fraction(f"planted.{name}", getattr(self, name))


@dataclass(frozen=True)
class Outcome:
    """Result of one search. All speedups are true ones, not measured ones.

    Args:
        seed: seed of the landscape and of the search.
        prospect: kind of landscape.
        best: label of the best configuration.
        best_speedup: its speedup.
        winner: label of the exported configuration.
        winner_speedup: its speedup.
        measured_speedup: highest speedup of the configurations that the search measured.
        seconds: duration of the search.
    """

    seed: int
    prospect: Prospect
    best: str
    best_speedup: float
    winner: str
    winner_speedup: float
    measured_speedup: float
    seconds: float

    @property
    def hit(self) -> bool:
        """True if the export is about as fast as the best configuration."""
        return self.winner_speedup >= CLOSE * self.best_speedup

    @property
    def slower(self) -> bool:
        """True if the export is slower than plain decoding."""
        return self.winner_speedup < 1.0


@dataclass(frozen=True)
class StudyParts:
    """Parts of a study, without its target.

    Args:
        space: makes the search space for a number of layers.
        sampler: makes the sampler for a seed.
        pruner: pruner of all searches.
        study: budget of a search.
        measure: how much is decoded.
        scan: how much is scanned before, and from how many prompts.
    """

    space: Callable[[int], SearchSpace]
    sampler: Callable[[int], optuna.samplers.BaseSampler]
    pruner: optuna.pruners.BasePruner
    study: StudySettings
    measure: MeasureSettings
    scan: ScanSettings


def search_planted(seed: int, prospect: Prospect, settings: PlantedSettings, parts: StudyParts) -> Outcome:
    """Search one landscape as a study does, up to the configuration that it would export.

    Args:
        seed: of the landscape, the prompts and the search.
        prospect: the kind of landscape.
        settings: sizes of the search.
        parts: of the study.
    """
    start = time.monotonic()
    landscape = Landscape.draw(seed, settings.layers, prospect)
    space, measuring = parts.space(settings.layers), parts.measure
    tune, held_out = draw_prompts(settings.prompts, seed).split()
    bench = SimulatedBench(landscape, Machine(seed))
    predictor = SimulatedPredictor(landscape, space, tune.take(parts.scan.prompts), parts.scan)
    study = open_study(f"planted-{seed}", InMemoryStorage(), parts.pruner, {})
    study.sampler = parts.sampler(seed)
    starts = starting_points(space, propose_all(predictor, space, parts.scan.proposals))
    objective = Objective(bench, space, tune, measuring, seed, bounds=BoundEstimator(predictor))
    run_trials(study, objective, parts.study, lambda _: None, starts)
    winner = measure_finals(study, bench, held_out.take(measuring.held_out_prompts), measuring, seed).winner.config
    seconds = time.monotonic() - start
    best, speedup = landscape.best(space)
    measured = {configuration(trial) for trial in finished(study) if "table" in trial.user_attrs} | {SpeculativeConfig()}
    return Outcome(
        seed,
        prospect,
        best.label(),
        speedup,
        winner.label(),
        landscape.speedup(winner),
        max(map(landscape.speedup, measured)),
        seconds,
    )


def summarise(outcomes: list[Outcome], settings: PlantedSettings) -> list[Count]:
    """Count the searches that found the best configuration, and those that exported one slower than plain decoding."""
    hopeful, close = ([o for o in outcomes if o.prospect == prospect] for prospect in ("hopeful", "close"))
    counts = []
    if clear := [outcome for outcome in outcomes if outcome.prospect != "close"]:
        counts.append(Count("exports slower than plain decoding", sum(o.slower for o in clear), len(clear), most=0.0))
    if hopeful:
        hits = sum(outcome.hit for outcome in hopeful)
        counts.append(Count("best configuration found", hits, len(hopeful), least=settings.least_hits))
    if close:
        lost = sum(outcome.slower for outcome in close)
        counts.append(
            Count("exports slower than plain decoding, close landscapes", lost, len(close), most=settings.most_lost)
        )
    return counts
