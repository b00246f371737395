"""Calibration of winners and intervals: how often each is wrong where the truth is known.

Usage: ``python -m searches.evaluate.calibration [planted.seeds=100] [bench=model] [field=value]``

Counts three things and compares each with a criterion:

- A configuration against itself: how often the final rule names one of the two a winner.
- A configuration of known long-run speedup: how often the interval of a measurement contains that speedup. As in finals,
  prompts on which the machine drifted are measured again first.
- ``planted.seeds=100``: whole searches on simulated decoders, how often they find the best configuration.

The same command resumes whole searches and comparisons on a real model; several processes share the searches. Prints a
table and writes JSON. The exit code is 4 if a criterion is missed.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import optuna
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from layerskip import Measurement, PromptSet, SpeculativeConfig
from layerskip.files import digest, write_json
from layerskip.measure.measurement import LEAST_RESAMPLED
from layerskip.models.environment import machine
from searches.app.application import NOT_CONFIRMED, run
from searches.app.checks import InputError, check_fraction, check_number, check_seed, check_whole
from searches.app.file_lock import share_work
from searches.app.record_header import program_sources
from searches.app.resume_log import ResultLog
from searches.backends.layerskip import LayerskipBackend
from searches.evaluate.criteria import Count, table
from searches.evaluate.landscape import PROSPECTS, Landscape, Prospect
from searches.evaluate.planted import Outcome, PlantedSettings, StudyParts, search_planted, summarise
from searches.evaluate.simulated_decoder import Machine, SimulatedBench
from searches.evaluate.workload import draw_prompts
from searches.study.bench import BASELINE, Bench, ModelBench, Row
from searches.study.finals import Finalist
from searches.study.objective import MeasureSettings
from searches.study.remeasure import remeasure_drifted

_ONE, _OTHER = "one", "other"
_PACKAGES = ("numpy", "optuna", "scipy")


def calibrate(config: DictConfig) -> list[Count]:
    """Run a calibration and return its counts. See ``conf/calibration.yaml``.

    Raises:
        SystemExit: a criterion is missed; exit code 4.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    _check(config)
    planting = PlantedSettings(**{str(name): value for name, value in config.planted.items() if name != "search"})
    counts = [compare_with_itself(config)]
    if config.bench == "simulated" and config.coverage.resamplings:
        counts += measure_coverage(config)
    outcomes: list[Outcome] = []
    if planting.seeds or planting.hopeless or planting.close:
        outcomes = _plant(config, planting)
        counts += summarise(outcomes, planting)
    print(table(counts))
    path = Path(config.record or Path(config.outputs) / "calibration.json")
    record = {
        "schema": "layerskip.calibration/1",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {package: version(package) for package in _PACKAGES},
        "sources": digest(program_sources()),
        "config": OmegaConf.to_container(config, resolve=True),
        "counts": [asdict(count) | {"share": count.share, "passed": count.passed} for count in counts],
        "searches": [asdict(outcome) | {"hit": outcome.hit, "slower": outcome.slower} for outcome in outcomes],
    }
    write_json(path, record)
    print(f"wrote {path}")
    if not all(count.passed for count in counts):
        sys.exit(NOT_CONFIRMED)
    return counts


def _check(config: DictConfig) -> None:
    check_seed(config.seed)
    if config.bench not in ("simulated", "model"):
        raise InputError(f"bench: {config.bench!r} is neither simulated nor model")
    check_whole("itself.comparisons", config.itself.comparisons)
    check_whole("itself.prompts", config.itself.prompts, LEAST_RESAMPLED)  # fewer never name a winner
    check_whole("coverage.resamplings", config.coverage.resamplings, 0)
    for index, count in enumerate(config.coverage.prompts):
        check_whole(f"coverage.prompts.{index}", count)
    check_number("stalls", config.stalls, most=1, or_zero=True)
    check_fraction("itself.most_winners", config.itself.most_winners)
    check_fraction("coverage.least", config.coverage.least)


def compare_with_itself(config: DictConfig) -> Count:
    """Compare a configuration with itself many times, by the rule of finals, and count the winners."""
    same = SpeculativeConfig.from_dict(OmegaConf.to_container(config.itself.config, resolve=True))  # type: ignore[arg-type]
    # Plain decoding is always measured, as the baseline.
    one, other = (BASELINE, _OTHER) if same.kind == "none" else (_ONE, _OTHER)
    entries = {name: same for name in (one, other) if name != BASELINE}
    comparisons, log = _real(config) if config.bench == "model" else (_simulated(config), ResultLog(None))
    winners = 0
    with tqdm(total=config.itself.comparisons, unit="comparison", desc="with itself", disable=None) as bar:
        for seed, (bench, prompts) in enumerate(comparisons, config.seed):
            if str(seed) not in log:
                rows = _rows(bench, entries, prompts, seed)
                # Each of the two may be named the winner.
                both = [Measurement.of(rows, *pair) for pair in ((one, other), (other, one))]
                log.add(str(seed), sum(Finalist(same, m.speedup, m.to_dict(), m.interval()[0]).eligible for m in both))
            winners += log[str(seed)]
            bar.update()
    return Count("winners over itself", winners, config.itself.comparisons, most=config.itself.most_winners)


def _rows(bench: Bench, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, seed: int) -> list[Row]:
    """Return the rows that finals would use: those during which the machine drifted are measured again."""
    rows = list(bench.compare(configs, prompts, 1, seed))
    again = remeasure_drifted(bench, configs, rows, prompts, MeasureSettings(), seed, ResultLog(None))
    return [again.get(place, row) for place, row in enumerate(rows)]


def _real(config: DictConfig) -> tuple[Iterable[tuple[Bench, PromptSet]], ResultLog]:
    """Return the same bench and prompts for every comparison, and the log of finished ones, as each takes minutes."""
    target = instantiate(config.target)
    bench = ModelBench(LayerskipBackend(target), instantiate(config.sampling), config.max_new_tokens)
    prompts = instantiate(config.prompts).take(config.itself.prompts)
    identity = [target.digest, prompts.digest, bench.sampling.to_dict(), bench.max_new_tokens, machine(target)]
    identity += [OmegaConf.to_container(config.itself.config, resolve=True), *program_sources()]
    log = ResultLog(Path(config.outputs) / f"itself-{digest(identity)[:12]}.jsonl")
    return itertools.repeat((bench, prompts), config.itself.comparisons), log


def _simulated(config: DictConfig) -> Iterator[tuple[Bench, PromptSet]]:
    """Yield one simulated bench, whose drift continues, and new prompts for every comparison."""
    landscape = Landscape.draw(config.seed, config.planted.layers)
    bench = SimulatedBench(landscape, Machine(config.seed, stalls=config.stalls))
    for index in range(config.itself.comparisons):
        yield bench, draw_prompts(config.itself.prompts, config.seed + index)


def measure_coverage(config: DictConfig) -> list[Count]:
    """Measure configurations on many draws of prompts, and count the intervals that contain the long-run speedup."""
    landscape = Landscape.draw(config.seed, config.planted.layers)
    bench = SimulatedBench(landscape, Machine(config.seed + 1, stalls=config.stalls))
    fields: dict[str, Any] = OmegaConf.to_container(config.coverage.configs, resolve=True)  # type: ignore[assignment]
    configs = {name: SpeculativeConfig.from_dict(values) for name, values in fields.items()}
    truths = {name: landscape.speedup(drafting) for name, drafting in configs.items()}
    sizes, times = list(config.coverage.prompts), config.coverage.resamplings
    counts = []
    with tqdm(total=len(sizes) * times, unit="resampling", desc="coverage", disable=None) as bar:
        for size in sizes:
            covered = dict.fromkeys(configs, 0)
            for index in range(times):
                seed = config.seed + 1_000_000 + index
                rows = _rows(bench, configs, draw_prompts(size, seed), seed)
                for name in configs:
                    low, high = Measurement.of(rows, BASELINE, name).interval()
                    covered[name] += low <= truths[name] <= high
                bar.update()
            counts += [
                Count(f"coverage, {name}, {size} prompts", hits, times, least=config.coverage.least)
                for name, hits in covered.items()
            ]
    return counts


def _plant(config: DictConfig, settings: PlantedSettings) -> list[Outcome]:
    """Search simulated decoders. A search is kept until its settings, this program or its libraries change."""
    parts = config.planted.search
    study_parts = StudyParts(
        space=lambda layers: instantiate(parts.space, layers=layers),
        sampler=lambda seed: instantiate(parts.sampler, seed=seed),
        pruner=instantiate(parts.pruner),
        **{name: instantiate(parts[name]) for name in ("study", "measure", "scan")},
    )
    fields: dict[str, Any] = OmegaConf.to_container(config.planted, resolve=True)  # type: ignore[assignment]
    identity = [fields[name] for name in ("layers", "prompts", "search")]
    identity += [*(version(package) for package in _PACKAGES), *program_sources()]
    folder = Path(config.outputs) / "planted" / digest(identity)[:12]
    counts = zip(PROSPECTS, (settings.seeds, settings.hopeless, settings.close), strict=True)
    jobs = [(prospect, config.seed + seed) for prospect, count in counts for seed in range(count)]
    files = {(prospect, seed): folder / f"{prospect}-{seed}.json" for prospect, seed in jobs}
    with tqdm(total=len(jobs), unit="search", desc="planted", disable=None) as bar:

        def run_search(job: tuple[Prospect, int]) -> Outcome:
            if not files[job].exists():
                write_json(files[job], asdict(search_planted(job[1], job[0], settings, study_parts)))
            bar.update()
            return Outcome(**json.loads(files[job].read_text(encoding="utf-8")))

        outcomes = share_work(files, run_search)
    return [outcomes[job] for job in jobs]


if __name__ == "__main__":
    run("calibration", calibrate)
