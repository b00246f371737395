"""Calibration of winners and intervals on simulated decoders: how often each is wrong where the truth is known.

Counts three things and compares each with a criterion:

- Plain decoding against itself: how often the final rule names one of the two a winner.
- A configuration of known long-run speedup: how often the interval of a measurement contains that speedup.
- ``planted.seeds=100``: whole searches. One succeeds if the true speedup of its export is within 1 % of the best. It must
  not export a configuration that is slower than plain decoding. Where many are only slightly slower, this may happen as
  often as intervals are wrong.

The same command resumes whole searches. The exit code is 4 if a criterion is missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

import optuna
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from optuna.storages import InMemoryStorage
from tqdm import tqdm

from layerskip import Measurement, SpeculativeConfig
from layerskip.measure.measurement import MIN_RESAMPLED
from searches.app.application import run
from searches.app.checks import check_number
from searches.evaluate.criteria import Count, check_fields, conclude, resume
from searches.evaluate.simulated import PROSPECTS, Landscape, Machine, SimulatedPredictor, draw_prompts, simulated_bench
from searches.predict.preparation import ScanSettings
from searches.predict.proposals import propose_all
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, Row
from searches.study.finals import Finalist, measure_finals
from searches.study.objective import MeasureSettings, Objective
from searches.study.pruning import BoundEstimator
from searches.study.starting_points import starting_points
from searches.study.study import open_study, run_trials

CLOSE = 0.99  # share of the best speedup that counts as found


def calibrate(config: DictConfig) -> None:
    """Run a calibration and write its record. See ``conf/calibration.yaml``."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    minimum = {"itself.comparisons": 1, "itself.prompts": MIN_RESAMPLED, "coverage.resamplings": 0, "coverage.prompts": 1}
    minimum |= {"planted.layers": 6, "planted.prompts": 10, "planted.seeds": 0, "planted.hopeless": 0, "planted.close": 0}
    check_number("stalls", config.stalls, maximum=1, or_zero=True)
    check_fields(config, minimum, ("itself.max_winners", "coverage.minimum", "planted.min_hits", "planted.max_lost"))
    planted: Any = OmegaConf.to_container(config.planted, resolve=True)
    numbers = dict(zip(PROSPECTS, (config.planted.seeds, config.planted.hopeless, config.planted.close), strict=True))
    jobs = {
        f"{prospect} {seed}": partial(search_planted, seed, prospect, config.planted)
        for prospect, number in numbers.items()
        for seed in range(config.seed, config.seed + number)
    }
    versions = {package: version(package) for package in ("numpy", "optuna", "scipy")}
    identity = [versions, *(planted[name] for name in ("layers", "prompts", "search"))]
    counts = [compare_with_itself(config), *measure_coverage(config)]
    outcomes = list(resume(config, "planted", identity, jobs, "search").values())
    counts += summarise(outcomes, config.planted.min_hits, config.planted.max_lost)
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    record = {"schema": "layerskip.calibration/1", "date": date, "versions": versions, "searches": outcomes}
    conclude(config, "calibration.json", record, counts)


def compare_with_itself(config: DictConfig) -> Count:
    """Compare plain decoding with itself many times, by the rule of finals, and count the winners."""
    plain, other, times, winners = SpeculativeConfig(), "other", config.itself.comparisons, 0
    for rows in _comparisons(config, {other: plain}, config.itself.prompts, times, config.seed):
        # Each of the two may be named the winner.
        both = [Measurement.of(rows, *pair) for pair in ((BASELINE, other), (other, BASELINE))]
        winners += sum(Finalist(plain, m.speedup, m.to_dict(), m.interval()[0]).eligible for m in both)
    return Count("winners over itself", winners, times, maximum=config.itself.max_winners)


def measure_coverage(config: DictConfig) -> list[Count]:
    """Measure configurations on many draws of prompts, and count the intervals that contain the long-run speedup."""
    given: Any = OmegaConf.to_container(config.coverage.configs, resolve=True)
    configs = {name: SpeculativeConfig.from_dict(fields) for name, fields in given.items()}
    landscape = Landscape.draw(config.seed, config.planted.layers)
    times, minimum, counts = config.coverage.resamplings, config.coverage.minimum, list[Count]()
    for size in config.coverage.prompts if times else ():
        truths = {name: landscape.speedup(drafting) for name, drafting in configs.items()}
        covered = Counter[str]()
        for rows in _comparisons(config, configs, size, times, config.seed + 1_000_000):
            for name, truth in truths.items():
                low, high = Measurement.of(rows, BASELINE, name).interval()
                covered[name] += low <= truth <= high
        counts += [Count(f"coverage, {name}, {size} prompts", covered[name], times, minimum=minimum) for name in configs]
    return counts


def _comparisons(
    config: DictConfig, configs: Mapping[str, SpeculativeConfig], size: int, times: int, seed: int
) -> Iterator[list[Row]]:
    """Yield the rows that finals would use, of one draw of prompts after the other."""
    landscape = Landscape.draw(config.seed, config.planted.layers)
    bench = simulated_bench(landscape, Machine(seed, stalls=config.stalls))
    for number in tqdm(range(seed, seed + times), unit="comparison", desc=", ".join(configs), disable=None):
        yield list(bench.compare(configs, draw_prompts(size, number), 1, number))


def search_planted(seed: int, prospect: str, planted: DictConfig) -> dict[str, Any]:
    """Search one landscape as a study does, up to the configuration that it would export."""
    parts, landscape = planted.search, Landscape.draw(seed, planted.layers, prospect)
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
    (best, speedup), reached = landscape.best(space), landscape.speedup(winner)
    return {
        "seed": seed,
        "prospect": prospect,
        "best": best.label(),
        "best_speedup": speedup,
        "winner": winner.label(),
        "winner_speedup": reached,
        "hit": reached >= CLOSE * speedup,
        "slower": reached < 1.0,
    }


def summarise(outcomes: list[dict[str, Any]], min_hits: float | None, max_lost: float | None) -> list[Count]:
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
