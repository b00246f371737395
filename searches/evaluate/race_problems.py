"""What do search strategies race on? The real decoder on a real model, or planted decoders by a clock of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from layerskip import Measurement, PromptSet, Sampling, SpeculativeConfig, Target
from layerskip.measure.measurement import Sample
from layerskip.models.environment import machine
from searches.app.checks import InputError, check_whole
from searches.app.record_header import record_header
from searches.app.resume_log import ResultLog
from searches.evaluate.landscape import Landscape
from searches.evaluate.simulated_decoder import Machine, SimulatedBench, SimulatedOracle
from searches.evaluate.strategies import Race, Screen
from searches.evaluate.workload import draw_prompts
from searches.predict.oracle import Oracle
from searches.predict.preparation import ScanSettings, open_scanner, prepare_oracle
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, ModelBench
from searches.study.objective import MeasureSettings
from searches.study.plan import supported

SCHEMA = "layerskip.compare/2"
T = TypeVar("T")
_AT_ONCE = 4  # claims that are measured side by side
_HELD_OUT_SEED = 1_000_003
_DRAWN = 100  # planted prompts, of which a race takes the first
_PROFILED_STEPS = 1000
"""What measuring a cost profile takes in steps of plain decoding."""

Claims = Mapping[str, Sequence[Mapping[str, Any]]]


class RaceProblem(Protocol):
    """Where races are run, one strategy and one seed at a time, and what they claim is judged.

    Attributes:
        most_claims: so many claims of a race are judged.
    """

    most_claims: int

    def asked(self) -> Any:
        """What decides how a race goes, as plain values."""
        ...

    def record_header(self) -> dict[str, Any]:
        """The first fields of a record."""
        ...

    def race(self, seed: int) -> Any:
        """A context of one race from nothing: what earlier ones found out is not lent to it."""
        ...

    def speedups(self, claims: Claims, seeds: Mapping[str, int], kept: ResultLog) -> dict[str, list[float]]:
        """What claims are worth on other prompts than those of the search.

        Args:
            claims: configurations of each race, by its name.
            seeds: of each race.
            kept: what was measured before; takes the rest.
        """
        ...


class ModelProblem:
    """The real decoder. See ``conf/compare.yaml``."""

    most_claims = 3  # each costs a measurement

    def __init__(self, config: DictConfig) -> None:
        self._config, self._measuring = config, instantiate(config.measure)
        self._scanning: ScanSettings = instantiate(config.scan)
        self._sampling: Sampling = instantiate(config.sampling)
        tune, held_out = instantiate(config.prompts).split()
        self._prompts, self._scanned = _taken(tune, self._measuring, self._scanning)
        self._held_out: PromptSet = held_out.take(self._measuring.held_out_prompts)
        self._target: Target = instantiate(config.target)
        self._space = supported(instantiate(config.space, layers=self._target.layers), self._target)
        if self._space.bridged:
            raise InputError("space.bridges, space.draft_heads: this program skips emptily; searches.bridges has bridges")
        self._bench = ModelBench(self._target, self._sampling, self._measuring.max_new_tokens)

    def asked(self) -> Any:
        """Target, prompts, settings and machine."""
        parts = ("measure", "scan", "sampling", "space")
        return {
            "target": self._target.digest,
            "prompts": [self._prompts.digest, self._scanned.digest, self._held_out.digest],
            "parts": {part: OmegaConf.to_container(self._config[part], resolve=True) for part in parts},
            "machine": machine(self._target),
        }

    def record_header(self) -> dict[str, Any]:
        """The target, the machine and the prompts."""
        return record_header(SCHEMA, self._target) | {
            "prompts": {"tune": len(self._prompts), "scanned": len(self._scanned), "held_out": len(self._held_out)},
            "max_new_tokens": self._measuring.max_new_tokens,
        }

    @contextmanager
    def race(self, seed: int) -> Iterator[Race]:
        """Continuations and profiles are made in a folder of the race's own."""
        nothing = Path(tempfile.mkdtemp(prefix="layerskip-compare-"))
        asked = self._target, self._scanned, self._sampling, self._measuring.max_new_tokens, self._space, self._scanning

        def oracle() -> Oracle:
            return _scannable(prepare_oracle(*asked, nothing, nothing / "scans", seed))

        def screen() -> Screen:
            few = _scannable(open_scanner(*asked, nothing, seed)).sample(self._scanning.screened_rows)
            return lambda masks: [found.agreement for found in few.scan(masks, depth=1)]

        budget, layers, proposals = float(self._config.seconds), self._target.layers, self._scanning.proposals
        try:
            parts = self._bench, self._prompts, layers, budget, seed, self._space, oracle, screen
            yield Race(*parts, proposals=proposals, scanned=self._scanned)
        finally:
            shutil.rmtree(nothing, ignore_errors=True)

    def speedups(self, claims: Claims, seeds: Mapping[str, int], kept: ResultLog) -> dict[str, list[float]]:
        """Measured on held-out prompts, a few configurations at a time beside plain decoding."""
        labels = {name: [SpeculativeConfig.from_dict(fields) for fields in found] for name, found in claims.items()}
        missing = {_key(config): config for found in labels.values() for config in found if _key(config) not in kept}
        names = list(missing)
        for first in tqdm(range(0, len(names), _AT_ONCE), unit="block", desc="held-out", disable=None):
            some = {name: missing[name] for name in names[first : first + _AT_ONCE]}
            seed = min(seeds.values()) + _HELD_OUT_SEED
            rows: list[Mapping[str, Sample]] = list(self._bench.compare(some, self._held_out, 1, seed))
            for name in some:
                kept.add(name, Measurement.of(rows, BASELINE, name).speedup)
        return {name: [float(kept[_key(config)]) for config in found] for name, found in labels.items()}


def _key(config: SpeculativeConfig) -> str:
    return str(sorted(config.to_dict().items()))


def _scannable(found: T | None) -> T:
    if found is None:
        raise InputError("target: it cannot be scanned; leave swift and ours out of strategies")
    return found


class PlantedProblem:
    """Planted decoders, another one for each seed, where skipping pays, of any layer. Seconds are those that decoding,
    scanning and profiling would have taken; samplers think for nothing."""

    most_claims = 1000

    def __init__(self, config: DictConfig) -> None:
        check_whole("layers", config.layers, 6)
        self._measuring: MeasureSettings = instantiate(config.measure)
        self._scanning: ScanSettings = instantiate(config.scan)
        self._seconds, self._layers = float(config.seconds), int(config.layers)
        whole = {"siblings": 0, "stops": ["length", "threshold"], "protect_first": 0, "protect_last": 0}
        self._space: SearchSpace = instantiate(config.space, layers=self._layers, **whole)

    def asked(self) -> Any:
        """Depth and settings."""
        return [self._layers, asdict(self._measuring), asdict(self._scanning), asdict(self._space)]

    def record_header(self) -> dict[str, Any]:
        """That nothing was really decoded."""
        return {
            "schema": SCHEMA,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "target": {"name": "planted decoders", "layers": self._layers, "dtype": "no dtype"},
            "environment": {"device": "none", "device_name": "no device"},
            "prompts": {"tune": self._measuring.prompts, "scanned": self._scanning.prompts, "held_out": None},
        }

    @contextmanager
    def race(self, seed: int) -> Iterator[Race]:
        """On a landscape of its own."""
        landscape, clock, space = Landscape.draw(seed, self._layers), _Clock(), self._space
        prompts, scanned = _taken(draw_prompts(_DRAWN, seed), self._measuring, self._scanning)
        bench = _Timed(SimulatedBench(landscape, Machine(seed)), clock)
        step = landscape.profile.verify_seconds[0]

        def texts() -> SimulatedOracle:
            clock.spend(step * sum(landscape.work(item).tokens + 4 for item in scanned))  # prefill takes four steps
            return SimulatedOracle(landscape, space, scanned, self._scanning, spend=clock.spend)

        def oracle() -> Oracle:
            clock.spend(step * _PROFILED_STEPS)
            return texts()

        def screen() -> Screen:
            return texts().agreements

        proposals = self._scanning.proposals
        yield Race(bench, prompts, self._layers, self._seconds, seed, space, oracle, screen, clock, proposals, scanned)

    def speedups(self, claims: Claims, seeds: Mapping[str, int], kept: ResultLog) -> dict[str, list[float]]:
        """The planted ones, over all prompts that there could be."""
        return {
            name: [Landscape.draw(seeds[name], self._layers).speedup(SpeculativeConfig.from_dict(one)) for one in found]
            for name, found in claims.items()
        }


def _taken(prompts: PromptSet, measuring: MeasureSettings, scanning: ScanSettings) -> tuple[PromptSet, PromptSet]:
    """The tune prompts that strategies measure on, and those that scans see, more of them and the same first."""
    measured, scanned = prompts.take(measuring.prompts), prompts.take(scanning.prompts)
    return measured, scanned if len(scanned) > len(measured) else measured


class _Clock:
    """Goes on as it is told."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def spend(self, seconds: float) -> None:
        self._now += seconds


@dataclass(frozen=True)
class _Timed:
    """A bench that tells a clock what its samples took."""

    bench: SimulatedBench
    clock: _Clock

    @property
    def layers(self) -> int:
        return self.bench.layers

    @property
    def conditions(self) -> Any:
        return self.bench.conditions

    @property
    def exact(self) -> bool:
        return self.bench.exact

    def compare(
        self,
        configs: Mapping[str, SpeculativeConfig],
        prompts: PromptSet,
        repeats: int,
        seed: int,
        without: Collection[str] = (),
        before: PromptSet | None = None,
    ) -> Iterator[dict[str, Sample]]:
        for row in self.bench.compare(configs, prompts, repeats, seed, without, before):
            self.clock.spend(sum(sample.prefill_seconds + sample.decode_seconds for sample in row.values()))
            yield row
