"""Are winners and intervals to be believed? Comparisons of a configuration with itself, and intervals of a known speedup.

``python -m searches.evaluate.calibration`` counts how often the rule that names winners calls one where nothing is to be won, and how
often the interval of a measurement holds the long-run speedup, after prompts on which the machine moved were measured again,
as in finals; ``planted.seeds=100`` adds whole searches for a planted truth. Those, and what a real model decodes, are kept
one by one: the same command goes on, and several share the searches. It prints a table, writes JSON, and ends with code 4
where a bar is missed.
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
from searches.app.application import NOT_SHOWN, run
from searches.app.checks import InputError, check_number, check_seed, check_share, check_whole
from searches.app.file_lock import share_work
from searches.app.record_header import program_sources
from searches.app.resume_log import ResultLog
from searches.evaluate.criteria import Count, table
from searches.evaluate.landscape import PROSPECTS, Landscape, Prospect
from searches.evaluate.planted import Outcome, PlantedSettings, Search, find_planted, summarise
from searches.evaluate.simulated_decoder import Machine, SimulatedBench
from searches.evaluate.workload import draw_prompts
from searches.study.bench import BASELINE, Bench, ModelBench, Row
from searches.study.finals import Finalist, measure_again
from searches.study.objective import MeasureSettings

_ONE, _OTHER = "one", "other"
_PACKAGES = ("numpy", "optuna", "scipy")


def calibrate(config: DictConfig) -> list[Count]:
    """Run a composed calibration; see ``conf/calibration.yaml``. Ends the process with 4 where a bar is missed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    _check(config)
    planting = PlantedSettings(**{str(name): value for name, value in config.planted.items() if name != "search"})
    found = [compare_with_itself(config)]
    if config.bench == "simulated" and config.coverage.resamplings:
        found += cover(config)
    outcomes: list[Outcome] = []
    if planting.seeds or planting.hopeless or planting.close:
        outcomes = _plant(config, planting)
        found += summarise(outcomes, planting)
    print(table(found))
    path = Path(config.record or Path(config.outputs) / "calibration.json")
    record = {
        "schema": "layerskip.calibration/1",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {package: version(package) for package in _PACKAGES},
        "program_sources": digest(program_sources()),
        "config": OmegaConf.to_container(config, resolve=True),
        "counts": [asdict(count) | {"share": count.share, "passed": count.passed} for count in found],
        "searches": [asdict(outcome) | {"hit": outcome.hit, "slower": outcome.slower} for outcome in outcomes],
    }
    write_json(path, record)
    print(f"wrote {path}")
    if not all(count.passed for count in found):
        sys.exit(NOT_SHOWN)
    return found


def _check(config: DictConfig) -> None:
    check_seed(config.seed)
    if config.bench not in ("simulated", "model"):
        raise InputError(f"bench: {config.bench!r} is neither simulated nor model")
    sizes = {"itself.comparisons": (config.itself.comparisons, 1)}
    sizes |= {"itself.prompts": (config.itself.prompts, LEAST_RESAMPLED)}  # nobody wins over fewer
    sizes |= {"coverage.resamplings": (config.coverage.resamplings, 0)}
    sizes |= {f"coverage.prompts.{i}": (count, 1) for i, count in enumerate(config.coverage.prompts)}
    for name, (value, least) in sizes.items():
        check_whole(name, value, least)
    check_number("stalls", config.stalls, most=1, or_zero=True)
    check_share("itself.most_winners", config.itself.most_winners)
    check_share("coverage.least", config.coverage.least)


def compare_with_itself(config: DictConfig) -> Count:
    """Compare a configuration with itself, again and again, as finals would, and count the winners."""
    same = SpeculativeConfig.from_dict(OmegaConf.to_container(config.itself.config, resolve=True))  # type: ignore[arg-type]
    # Plain decoding is measured anyway, as the baseline.
    one, other = (BASELINE, _OTHER) if same.kind == "none" else (_ONE, _OTHER)
    entries = {name: same for name in (one, other) if name != BASELINE}
    comparisons, kept = _real(config) if config.bench == "model" else (_simulated(config), ResultLog(None))
    winners = 0
    with tqdm(total=config.itself.comparisons, unit="comparison", desc="with itself", disable=None) as bar:
        for seed, (bench, prompts) in enumerate(comparisons, config.seed):
            if str(seed) not in kept:
                rows = _rows(bench, entries, prompts, seed)
                # Either of the two may come out as the winner.
                both = [Measurement.of(rows, *pair) for pair in ((one, other), (other, one))]
                kept.add(str(seed), sum(Finalist(same, m.speedup, m.to_dict(), m.interval()[0]).eligible for m in both))
            winners += kept[str(seed)]
            bar.update()
    return Count("winners over itself", winners, config.itself.comparisons, most=config.itself.most_winners)


def _rows(bench: Bench, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, seed: int) -> list[Row]:
    """What finals would judge by: rows in which the machine's pace moved are measured again."""
    rows = list(bench.compare(configs, prompts, 1, seed))
    again = measure_again(bench, configs, rows, prompts, MeasureSettings(), seed, ResultLog(None))
    return [again.get(place, row) for place, row in enumerate(rows)]


def _real(config: DictConfig) -> tuple[Iterable[tuple[Bench, PromptSet]], ResultLog]:
    """The same bench and prompts for every comparison; and those that are done, as they take minutes each."""
    bench = ModelBench(instantiate(config.target), instantiate(config.sampling), config.max_new_tokens)
    prompts = instantiate(config.prompts).take(config.itself.prompts)
    asked = [
        bench.target.digest,
        prompts.digest,
        bench.sampling.to_dict(),
        bench.max_new_tokens,
        machine(bench.target),
    ]
    asked += [OmegaConf.to_container(config.itself.config, resolve=True), *program_sources()]
    kept = ResultLog(Path(config.outputs) / f"itself-{digest(asked)[:12]}.jsonl")
    return itertools.repeat((bench, prompts), config.itself.comparisons), kept


def _simulated(config: DictConfig) -> Iterator[tuple[Bench, PromptSet]]:
    """One machine, whose pace drifts on, and other prompts for every comparison."""
    landscape = Landscape.draw(config.seed, config.planted.layers)
    bench = SimulatedBench(landscape, Machine(config.seed, stalls=config.stalls))
    for index in range(config.itself.comparisons):
        yield bench, draw_prompts(config.itself.prompts, config.seed + index)


def cover(config: DictConfig) -> list[Count]:
    """Draw prompts again and again, and count the intervals that hold the long-run speedup."""
    landscape = Landscape.draw(config.seed, config.planted.layers)
    bench = SimulatedBench(landscape, Machine(config.seed + 1, stalls=config.stalls))
    fields: dict[str, Any] = OmegaConf.to_container(config.coverage.configs, resolve=True)  # type: ignore[assignment]
    configs = {name: SpeculativeConfig.from_dict(values) for name, values in fields.items()}
    truths = {name: landscape.speedup(found) for name, found in configs.items()}
    sizes, times = list(config.coverage.prompts), config.coverage.resamplings
    counts = []
    with tqdm(total=len(sizes) * times, unit="resampling", desc="coverage", disable=None) as bar:
        for size in sizes:
            held = dict.fromkeys(configs, 0)
            for index in range(times):
                seed = config.seed + 1_000_000 + index
                rows = _rows(bench, configs, draw_prompts(size, seed), seed)
                for name in configs:
                    low, high = Measurement.of(rows, BASELINE, name).interval()
                    held[name] += low <= truths[name] <= high
                bar.update()
            counts += [
                Count(f"coverage, {name}, {size} prompts", found, times, least=config.coverage.least)
                for name, found in held.items()
            ]
    return counts


def _plant(config: DictConfig, settings: PlantedSettings) -> list[Outcome]:
    """Search planted truths; each search is kept for as long as its settings, this program and what it is made with stay."""
    parts = config.planted.search
    search = Search(
        space=lambda layers: instantiate(parts.space, layers=layers),
        sampler=lambda seed: instantiate(parts.sampler, seed=seed),
        pruner=instantiate(parts.pruner),
        **{name: instantiate(parts[name]) for name in ("study", "measure", "scan")},
    )
    fields: dict[str, Any] = OmegaConf.to_container(config.planted, resolve=True)  # type: ignore[assignment]
    asked = [fields[name] for name in ("layers", "prompts", "search")]
    asked += [*(version(package) for package in _PACKAGES), *program_sources()]
    folder = Path(config.outputs) / "planted" / digest(asked)[:12]
    counts = zip(PROSPECTS, (settings.seeds, settings.hopeless, settings.close), strict=True)
    jobs = [(prospect, config.seed + seed) for prospect, count in counts for seed in range(count)]
    files = {(prospect, seed): folder / f"{prospect}-{seed}.json" for prospect, seed in jobs}
    with tqdm(total=len(jobs), unit="search", desc="planted", disable=None) as bar:

        def find(job: tuple[Prospect, int]) -> Outcome:
            if not files[job].exists():
                write_json(files[job], asdict(find_planted(job[1], job[0], settings, search)))
            bar.update()
            return Outcome(**json.loads(files[job].read_text(encoding="utf-8")))

        found = share_work(files, find)
    return [found[job] for job in jobs]


if __name__ == "__main__":
    run("calibration", calibrate)
