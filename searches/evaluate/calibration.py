"""Calibration of winners and intervals on simulated decoders: how often each is wrong where the truth is known.

Counts three things and compares each with a criterion:

- A configuration against itself: how often the final rule names one of the two a winner.
- A configuration of known long-run speedup: how often the interval of a measurement contains that speedup. As in finals,
  prompts on which the machine drifted are measured again first.
- ``planted.seeds=100``: whole searches. One succeeds if the true speedup of its export is within 1 % of the best. It must
  not export a configuration that is slower than plain decoding. Where many are only slightly slower, this may happen as
  often as intervals are wrong.

The same command resumes whole searches. Writes JSON and prints a table. The exit code is 4 if a criterion is missed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import optuna
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from optuna.storages import InMemoryStorage
from tqdm import tqdm

from layerskip import Measurement, PromptSet, SpeculativeConfig
from layerskip.files import digest
from layerskip.measure.measurement import MIN_RESAMPLED
from searches.app.application import run
from searches.app.checks import check_fraction, check_number
from searches.evaluate.criteria import Count, check_fields, conclude
from searches.evaluate.simulated import (
    PROSPECTS,
    Landscape,
    Machine,
    Prospect,
    SimulatedPredictor,
    draw_prompts,
    simulated_bench,
)
from searches.predict.preparation import ScanSettings
from searches.predict.proposals import propose_all
from searches.results import RESULTS_VERSION, ResultLog
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, Bench, ModelBench, Row
from searches.study.finals import Finalist, measure_finals, remeasure_drifted
from searches.study.leaderboard import configuration
from searches.study.objective import MeasureSettings, Objective
from searches.study.pruning import BoundEstimator
from searches.study.starting_points import starting_points
from searches.study.study import finished, open_study, run_trials

Outcome = dict[str, Any]
CLOSE = 0.99  # share of the best speedup that counts as found
_ONE, _OTHER = "one", "other"
_PACKAGES = ("numpy", "optuna", "scipy")


def calibrate(config: DictConfig) -> None:
    """Run a calibration and write its record. See ``conf/calibration.yaml``."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    _check(config)
    counts = [compare_with_itself(config), *measure_coverage(config)]
    outcomes = _plant(config)
    counts += summarise(outcomes, config.planted.min_hits, config.planted.max_lost)
    record = {
        "schema": "layerskip.calibration/1",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {package: version(package) for package in _PACKAGES},
        "results_version": RESULTS_VERSION,
        "config": OmegaConf.to_container(config, resolve=True),
        "searches": outcomes,
    }
    conclude(config, "calibration.json", record, counts)


def _check(config: DictConfig) -> None:
    minimum = {"itself.comparisons": 1, "itself.prompts": MIN_RESAMPLED}  # fewer prompts never name a winner
    minimum |= {"coverage.resamplings": 0, "coverage.prompts": 1, "planted.layers": 6, "planted.prompts": 10}
    check_fields(config, minimum | dict.fromkeys(("planted.seeds", "planted.hopeless", "planted.close"), 0))
    check_number("stalls", config.stalls, maximum=1, or_zero=True)
    for name in ("itself.max_winners", "coverage.minimum", "planted.min_hits", "planted.max_lost"):
        check_fraction(name, OmegaConf.select(config, name))


def compare_with_itself(config: DictConfig) -> Count:
    """Compare a configuration with itself many times, by the rule of finals, and count the winners."""
    same = _config(config.itself.config)
    # Plain decoding is always measured, as the baseline.
    one, other = (BASELINE, _OTHER) if same.method == "none" else (_ONE, _OTHER)
    entries = {name: same for name in (one, other) if name != BASELINE}
    bench, _ = _bench(config, config.seed)  # its drift continues from comparison to comparison
    winners, times = 0, config.itself.comparisons
    for seed in tqdm(range(config.seed, config.seed + times), unit="comparison", desc="with itself", disable=None):
        rows = _rows(bench, entries, draw_prompts(config.itself.prompts, seed), seed)
        # Each of the two may be named the winner.
        both = [Measurement.of(rows, *pair) for pair in ((one, other), (other, one))]
        winners += sum(Finalist(same, m.speedup, m.to_dict(), m.interval()[0]).eligible for m in both)
    return Count("winners over itself", winners, times, maximum=config.itself.max_winners)


def measure_coverage(config: DictConfig) -> list[Count]:
    """Measure configurations on many draws of prompts, and count the intervals that contain the long-run speedup."""
    times, minimum, counts = config.coverage.resamplings, config.coverage.minimum, list[Count]()
    if not times:
        return []
    bench, landscape = _bench(config, config.seed + 1)
    configs = {str(name): _config(values) for name, values in config.coverage.configs.items()}
    truths = {name: landscape.speedup(drafting) for name, drafting in configs.items()}
    for size in config.coverage.prompts:
        covered = dict.fromkeys(configs, 0)
        for index in tqdm(range(times), unit="resampling", desc=f"coverage, {size} prompts", disable=None):
            seed = config.seed + 1_000_000 + index
            rows = _rows(bench, configs, draw_prompts(size, seed), seed)
            for name, truth in truths.items():
                low, high = Measurement.of(rows, BASELINE, name).interval()
                covered[name] += low <= truth <= high
        names = {f"coverage, {name}, {size} prompts": hits for name, hits in covered.items()}
        counts += [Count(name, hits, times, minimum=minimum) for name, hits in names.items()]
    return counts


def _config(fields: DictConfig) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict(OmegaConf.to_container(fields, resolve=True))  # type: ignore[arg-type]


def _bench(config: DictConfig, seed: int) -> tuple[ModelBench, Landscape]:
    landscape = Landscape.draw(config.seed, config.planted.layers)
    return simulated_bench(landscape, Machine(seed, stalls=config.stalls)), landscape


def _rows(bench: Bench, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, seed: int) -> list[Row]:
    """Return the rows that finals would use: those during which the machine drifted are measured again."""
    rows = list(bench.compare(configs, prompts, 1, seed))
    again = remeasure_drifted(bench, configs, rows, prompts, MeasureSettings(), seed, ResultLog(None))
    return [again.get(place, row) for place, row in enumerate(rows)]


def _plant(config: DictConfig) -> list[Outcome]:
    """Search simulated decoders. A search is kept until its settings, this program or its libraries change."""
    planted = config.planted
    fields: dict[str, Any] = OmegaConf.to_container(planted, resolve=True)  # type: ignore[assignment]
    identity = [fields[name] for name in ("layers", "prompts", "search")]
    identity += [*(version(package) for package in _PACKAGES), RESULTS_VERSION]
    log = ResultLog(Path(config.outputs) / f"planted-{digest(identity)[:12]}.jsonl")
    counts = zip(PROSPECTS, (planted.seeds, planted.hopeless, planted.close), strict=True)
    jobs = {f"{prospect} {seed}": (prospect, config.seed + seed) for prospect, count in counts for seed in range(count)}
    for name, (prospect, seed) in tqdm(jobs.items(), unit="search", desc="planted", disable=None):
        if name not in log:
            log.add(name, search_planted(seed, prospect, planted))
    return [log[name] for name in jobs]


def search_planted(seed: int, prospect: Prospect, planted: DictConfig) -> Outcome:
    """Search one landscape as a study does, up to the configuration that it would export.

    Returns:
        Labels and true speedups of the best configuration and of the winner, and the highest true speedup that was measured.
    """
    start, parts = time.monotonic(), planted.search
    landscape = Landscape.draw(seed, planted.layers, prospect)
    space: SearchSpace = instantiate(parts.space, layers=planted.layers)
    measuring: MeasureSettings = instantiate(parts.measure)
    scanning: ScanSettings = instantiate(parts.scan)
    tune, held_out = draw_prompts(planted.prompts, seed).split()
    bench = simulated_bench(landscape, Machine(seed))
    lengths = space.values("layer_skip", "num_speculative_tokens")
    predictor = SimulatedPredictor(landscape, lengths, tune.take(scanning.prompts))
    study = open_study(f"planted-{seed}", InMemoryStorage(), instantiate(parts.pruner), {})
    study.sampler = instantiate(parts.sampler, seed=seed)
    starts = starting_points(space, propose_all(predictor, space, scanning.proposals))
    objective = Objective(bench, space, tune, measuring, seed, bounds=BoundEstimator(predictor))
    run_trials(study, objective, instantiate(parts.study), lambda _: None, starts)
    winner = measure_finals(study, bench, held_out.take(measuring.held_out_prompts), measuring, seed).winner.config
    seconds = time.monotonic() - start
    best, speedup = landscape.best(space)
    measured = {configuration(trial) for trial in finished(study) if "table" in trial.user_attrs} | {SpeculativeConfig()}
    reached = landscape.speedup(winner)
    return {
        "seed": seed,
        "prospect": prospect,
        "best": best.label(),
        "best_speedup": speedup,
        "winner": winner.label(),
        "winner_speedup": reached,
        "measured_speedup": max(map(landscape.speedup, measured)),
        "seconds": seconds,
        "hit": reached >= CLOSE * speedup,
        "slower": reached < 1.0,
    }


def summarise(outcomes: list[Outcome], min_hits: float | None, max_lost: float | None) -> list[Count]:
    """Count the searches that found the best configuration, and those that exported one slower than plain decoding."""
    slower = "exports slower than plain decoding"
    hopeful, close = ([o for o in outcomes if o["prospect"] == prospect] for prospect in ("hopeful", "close"))
    clear = [outcome for outcome in outcomes if outcome["prospect"] != "close"]
    counts = [
        Count(slower, sum(o["slower"] for o in clear), len(clear), maximum=0.0),
        Count("best configuration found", sum(o["hit"] for o in hopeful), len(hopeful), minimum=min_hits),
        Count(f"{slower}, close landscapes", sum(o["slower"] for o in close), len(close), maximum=max_lost),
    ]
    return [count for count in counts if count.of]


if __name__ == "__main__":
    run("calibration", calibrate)
