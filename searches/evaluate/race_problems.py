"""Problems on which search strategies race: a real model, or simulated decoders with a simulated clock.

A problem runs races, one strategy and one seed at a time, and returns the held-out speedups of the configurations that were
claimed. Its ``most_claims`` limits how many claims of a race are measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from layerskip import Measurement, PromptSet, Sampling, SpeculativeConfig, Target
from layerskip.measure.measurement import Sample
from layerskip.models.environment import machine
from searches.app.checks import InputError, check_whole
from searches.app.record_header import record_header
from searches.app.resume_log import ResultLog
from searches.backends.layerskip import LayerskipBackend
from searches.evaluate.landscape import Landscape
from searches.evaluate.simulated_decoder import PREFILL_STEPS, Machine, SimulatedBench, SimulatedPredictor
from searches.evaluate.strategies import Race, Screen
from searches.evaluate.workload import draw_prompts
from searches.predict.predictor import SpeedupPredictor
from searches.predict.preparation import ScanSettings, open_scanner, prepare_predictor
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, ModelBench
from searches.study.objective import MeasureSettings
from searches.study.plan import drop_unsupported

SCHEMA = "layerskip.compare/2"
T = TypeVar("T")
_AT_ONCE = 4  # claims that are measured side by side
_HELD_OUT_SEED = 1_000_003
_DRAWN = 100  # simulated prompts, of which a race takes the first
_PROFILED_STEPS = 1000  # time of measuring a cost profile in steps of plain decoding

Claims = Mapping[str, Sequence[Mapping[str, Any]]]
"""Claimed configurations of each race, by name of the race."""


class ModelProblem:
    """Problem of a race on a real model. See ``conf/race.yaml``."""

    most_claims = 3  # each costs a measurement

    def __init__(self, config: DictConfig) -> None:
        self._config, self._measuring = config, instantiate(config.measure)
        self._scanning: ScanSettings = instantiate(config.scan)
        self._sampling: Sampling = instantiate(config.sampling)
        tune, held_out = instantiate(config.prompts).split()
        self._prompts, self._scanned = _tune_prompts(tune, self._measuring, self._scanning)
        self._held_out: PromptSet = held_out.take(self._measuring.held_out_prompts)
        self._target: Target = instantiate(config.target)
        self._space = drop_unsupported(instantiate(config.space, layers=self._target.layers), self._target)
        if self._space.bridged:
            raise InputError("space.bridges, space.draft_heads: only empty skips race; searches.bridges compares bridges")
        self._bench = ModelBench(LayerskipBackend(self._target), self._sampling, self._measuring.max_new_tokens)

    def identity(self) -> Any:
        """Return everything that determines a race, as plain values: target, prompts, settings and machine."""
        parts = ("measure", "scan", "sampling", "space")
        return {
            "target": self._target.digest,
            "prompts": [self._prompts.digest, self._scanned.digest, self._held_out.digest],
            "parts": {part: OmegaConf.to_container(self._config[part], resolve=True) for part in parts},
            "machine": machine(self._target),
        }

    def record_header(self) -> dict[str, Any]:
        """Return the first fields of a record."""
        return record_header(SCHEMA, self._target) | {
            "prompts": {"tune": len(self._prompts), "scanned": len(self._scanned), "held_out": len(self._held_out)},
            "max_new_tokens": self._measuring.max_new_tokens,
        }

    @contextmanager
    def race(self, seed: int) -> Iterator[Race]:
        """Race with a temporary folder for continuations and profiles, so that every race prepares its own."""
        with tempfile.TemporaryDirectory(prefix="layerskip-race-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            parts = self._target, self._scanned, self._sampling, self._measuring.max_new_tokens, self._space, self._scanning

            def prepare() -> SpeedupPredictor:
                return _scannable(prepare_predictor(*parts, folder, folder / "scans", seed))

            def screen() -> Screen:
                sample = _scannable(open_scanner(*parts, folder, seed)).sample(self._scanning.screened_rows)
                return lambda masks: [scan.agreement for scan in sample.scan(masks, depth=1)]

            yield Race(
                self._bench,
                self._prompts,
                self._target.layers,
                float(self._config.seconds),
                seed,
                self._space,
                prepare,
                screen,
                proposals=self._scanning.proposals,
                scanned=self._scanned,
            )

    def speedups(self, claims: Claims, seeds: Mapping[str, int], log: ResultLog) -> dict[str, list[float]]:
        """Measure claims on held-out prompts, a few configurations at a time with plain decoding.

        Args:
            claims: configurations of each race.
            seeds: seed of each race.
            log: earlier measurements; receives the new ones.
        """
        configs = {name: [SpeculativeConfig.from_dict(fields) for fields in claimed] for name, claimed in claims.items()}
        missing = {_key(config): config for claimed in configs.values() for config in claimed if _key(config) not in log}
        keys = list(missing)
        for first in tqdm(range(0, len(keys), _AT_ONCE), unit="block", desc="held-out", disable=None):
            block = {key: missing[key] for key in keys[first : first + _AT_ONCE]}
            seed = min(seeds.values()) + _HELD_OUT_SEED
            rows: list[Mapping[str, Sample]] = list(self._bench.compare(block, self._held_out, 1, seed))
            for key in block:
                log.add(key, Measurement.of(rows, BASELINE, key).speedup)
        return {name: [float(log[_key(config)]) for config in claimed] for name, claimed in configs.items()}


def _key(config: SpeculativeConfig) -> str:
    return str(sorted(config.to_dict().items()))


def _scannable(scanner: T | None) -> T:
    if scanner is None:
        raise InputError("target: it cannot be scanned; leave swift and ours out of strategies")
    return scanner


class SimulatedProblem:
    """Problem of a race on simulated decoders where skipping pays, a new one for each seed. Any layer may be skipped.

    Seconds are those that decoding, scanning and profiling would take; the computations of samplers are free.
    """

    most_claims = 1000

    def __init__(self, config: DictConfig) -> None:
        check_whole("layers", config.layers, 6)
        self._measuring: MeasureSettings = instantiate(config.measure)
        self._scanning: ScanSettings = instantiate(config.scan)
        self._seconds, self._layers = float(config.seconds), int(config.layers)
        simulated = {"siblings": 0, "stops": ["length", "threshold"], "protect_first": 0, "protect_last": 0}
        self._space: SearchSpace = instantiate(config.space, layers=self._layers, **simulated)

    def identity(self) -> Any:
        """Return everything that determines a race: depth and settings."""
        return [self._layers, asdict(self._measuring), asdict(self._scanning), asdict(self._space)]

    def record_header(self) -> dict[str, Any]:
        """Return the first fields of a record, without a real target or machine."""
        return {
            "schema": SCHEMA,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "target": {"name": "simulated decoders", "layers": self._layers, "dtype": "no dtype"},
            "environment": {"device": "none", "device_name": "no device"},
            "prompts": {"tune": self._measuring.prompts, "scanned": self._scanning.prompts, "held_out": None},
        }

    @contextmanager
    def race(self, seed: int) -> Iterator[Race]:
        """Race on a new landscape and a new clock."""
        landscape, clock = Landscape.draw(seed, self._layers), _Clock()
        prompts, scanned = _tune_prompts(draw_prompts(_DRAWN, seed), self._measuring, self._scanning)
        step = landscape.profile.verify_seconds[0]

        def open_texts() -> SimulatedPredictor:
            clock.spend(step * sum(landscape.work(item).tokens + PREFILL_STEPS for item in scanned))
            return SimulatedPredictor(landscape, self._space, scanned, self._scanning, spend=clock.spend)

        def prepare() -> SpeedupPredictor:
            clock.spend(step * _PROFILED_STEPS)
            return open_texts()

        yield Race(
            SimulatedBench(landscape, Machine(seed), clock.spend),
            prompts,
            self._layers,
            self._seconds,
            seed,
            self._space,
            prepare,
            lambda: open_texts().agreements,
            clock,
            self._scanning.proposals,
            scanned,
        )

    def speedups(self, claims: Claims, seeds: Mapping[str, int], log: ResultLog) -> dict[str, list[float]]:
        """Return the true speedups, over all possible prompts."""
        return {
            name: [
                Landscape.draw(seeds[name], self._layers).speedup(SpeculativeConfig.from_dict(fields)) for fields in claimed
            ]
            for name, claimed in claims.items()
        }


def _tune_prompts(prompts: PromptSet, measuring: MeasureSettings, scanning: ScanSettings) -> tuple[PromptSet, PromptSet]:
    """Return the prompts that strategies measure on, and the prompts that are scanned, which include the former."""
    measured, scanned = prompts.take(measuring.prompts), prompts.take(scanning.prompts)
    return measured, scanned if len(scanned) > len(measured) else measured


class _Clock:
    """Simulated clock, advanced by :meth:`spend`."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def spend(self, seconds: float) -> None:
        self._now += seconds


RaceProblem = ModelProblem | SimulatedProblem
