"""Does a search find what was planted? Whole searches on simulated decoders whose truly best configuration is known.

A search hits where the configuration that it would export is truly within a hundredth of the best one. It must never export
one that is truly slower than plain decoding; where many are a hair slower, chance may, as often as intervals are wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import optuna
from optuna.storages import InMemoryStorage

from layerskip import SpeculativeConfig
from searches.app.checks import check_share, check_whole
from searches.evaluate.criteria import Count
from searches.evaluate.landscape import Landscape, Prospect
from searches.evaluate.simulated_decoder import Machine, SimulatedBench, SimulatedOracle
from searches.evaluate.workload import draw_prompts
from searches.predict.preparation import ScanSettings
from searches.predict.proposals import propose_all
from searches.space.search_space import SearchSpace
from searches.study.finals import measure_finals
from searches.study.leaderboard import configuration
from searches.study.objective import MeasureSettings, Objective
from searches.study.pruning import Prior
from searches.study.starting_points import starting_points
from searches.study.study import StudySettings, finished, open_study, run_trials

CLOSE = 0.99  # of the best speedup that there is


@dataclass(frozen=True)
class PlantedSettings:
    """How searches for a planted truth are run.

    Args:
        seeds: searches where something beats plain decoding.
        hopeless: further searches where nothing does.
        close: further searches where much comes near and little or nothing gets past it.
        layers: of the simulated targets.
        prompts: of each search, tune and held-out together.
        least_hits: share of the searches that have to hit.
        most_lost: share of the close ones that may export something slower than plain decoding.
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
            check_share(f"planted.{name}", getattr(self, name))


@dataclass(frozen=True)
class Outcome:
    """What a search exported, and what it might have.

    Args:
        seed: of the landscape and of everything else.
        prospect: of the landscape.
        best: the truly best configuration's label.
        best_speedup: its true speedup.
        winner: the exported configuration's label.
        winner_speedup: its true speedup.
        measured_speedup: the truly best among the measured configurations' true speedups.
        seconds: what the search took.
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
        """Whether the export is as good as the best."""
        return self.winner_speedup >= CLOSE * self.best_speedup

    @property
    def slower(self) -> bool:
        """Whether the export is slower than plain decoding."""
        return self.winner_speedup < 1.0


@dataclass(frozen=True)
class Search:
    """How a landscape is searched: the parts of a study, but for its target.

    Args:
        space: of a target of so many layers.
        sampler: of a seed.
        pruner: of all searches.
        study: how long.
        measure: how much is decoded.
        scan: how much is foretold before, and from how many prompts.
    """

    space: Callable[[int], SearchSpace]
    sampler: Callable[[int], optuna.samplers.BaseSampler]
    pruner: optuna.pruners.BasePruner
    study: StudySettings
    measure: MeasureSettings
    scan: ScanSettings


def find_planted(seed: int, prospect: Prospect, settings: PlantedSettings, search: Search) -> Outcome:
    """Search one landscape as a study would, up to the configuration that it would export."""
    start = time.monotonic()
    landscape = Landscape.draw(seed, settings.layers, prospect)
    space, measuring = search.space(settings.layers), search.measure
    tune, held_out = draw_prompts(settings.prompts, seed).split()
    bench = SimulatedBench(landscape, Machine(seed))
    oracle = SimulatedOracle(landscape, space, tune.take(search.scan.prompts), search.scan)
    study = open_study(f"planted-{seed}", InMemoryStorage(), search.pruner, {})
    study.sampler = search.sampler(seed)
    starts = starting_points(space, propose_all(oracle, space, search.scan.proposals))
    objective = Objective(bench, space, tune, measuring, seed, prior=Prior(oracle))
    run_trials(study, objective, search.study, lambda _: None, starts)
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
    """How many searches hit, and whether any would have exported what is slower than plain decoding."""
    hopeful, close = ([o for o in outcomes if o.prospect == prospect] for prospect in ("hopeful", "close"))
    found = []
    if clear := [outcome for outcome in outcomes if outcome.prospect != "close"]:
        found.append(Count("exports slower than plain decoding", sum(o.slower for o in clear), len(clear), most=0.0))
    if hopeful:
        hits = sum(outcome.hit for outcome in hopeful)
        found.append(Count("planted truths found", hits, len(hopeful), least=settings.least_hits))
    if close:
        lost = sum(outcome.slower for outcome in close)
        found.append(Count("slower exports where much comes close", lost, len(close), most=settings.most_lost))
    return found
