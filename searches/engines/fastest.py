"""The fastest engine of a search, as ``engines.json`` names it, measured again on held-out prompts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from layerskip import Export, Sampling, SpeculativeConfig, Target, UnsupportedModel
from layerskip.config import check_text
from layerskip.measure.measure import Contender, Decoder, interleave
from layerskip.measure.measurement import Sample
from layerskip.models.environment import machine
from searches.app.checks import InputError
from searches.backends.backend import BASELINE, Backend, BackendError, Comparison
from searches.engines.peer import EnginePeer, asked_dtype, check_on_cpu, engine_version, installed
from searches.engines.race import PLAIN, SCHEMA, WINNER, Race
from searches.results import RESULTS_VERSION

_EARLIER = "layerskip.engines/1"  # without the winner's configuration


@dataclass(frozen=True)
class FastestEngine:
    """The claim that one contender of a race is faster than a plain decoding by so much.

    Raises:
        InputError: the record is damaged.
    """

    record: Mapping[str, Any]  # the contents of ``engines.json``
    file: Path  # its path. Beside it, ``best.json`` has the configuration of this library's winner

    def __post_init__(self) -> None:
        try:
            for name in (self.name, self.base):
                check_text("race.rows.name", name)
                _ = name in (PLAIN, WINNER) or self.race.settings(name)
            _ = self.export
        except (KeyError, TypeError, AttributeError, StopIteration) as error:
            raise InputError(f"export: {self.file} is damaged: {type(error).__name__}: {error}") from None

    @classmethod
    def load(cls, file: str | Path) -> FastestEngine | None:
        """Return the claim of a file that a search with ``engines=`` wrote; None for all other files.

        Raises:
            InputError: an earlier version of this program wrote it.
        """
        schema, record = None, None
        with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):  # reading an export reports these
            record = json.loads(Path(file).read_text(encoding="utf-8"))
            schema = record.get("schema")
        if schema == _EARLIER:
            raise InputError(f"schema: {file} has {schema!r}; search again with engines=, which writes {SCHEMA!r}")
        return cls(record, Path(file)) if record is not None and schema == SCHEMA else None

    @cached_property
    def race(self) -> Race:
        """The race that measured it."""
        return Race.from_dict(self.record["race"])

    @property
    def name(self) -> str:
        """The engine and its method."""
        return self.race.fastest.name

    @property
    def base(self) -> str:
        """The fastest plain decoding; this library's where the fastest contender is a plain decoding itself."""
        return PLAIN if self.name == self.race.fastest_plain else self.race.fastest_plain

    @cached_property
    def export(self) -> Export:
        """The target, the conditions and the evidence, with the configuration if this library drafts."""
        race, record = self.race, self.record
        evidence = dict(race.fastest.measured)
        if self.name == race.fastest_plain:  # its speedup over ours is the inverse of ours over it
            ours = next(row.measured for row in race.rows if row.name == PLAIN)
            inverse = {"speedup": "speedup", "speedup_low": "speedup_high", "speedup_high": "speedup_low"}
            evidence |= {name: 1 / ours[other] for name, other in inverse.items()}
            evidence["baseline_tokens_per_second"] = ours["tokens_per_second"]
        del evidence["mean_acceptance_length"]  # it does not limit how much faster one engine is than another
        evidence |= {"prompts_digest": record["prompts"]["digest"], "max_new_tokens": record["max_new_tokens"]}
        where = record["environment"] | {"backend": {"engine_versions": self.versions}}
        best = Export.load(self.file.with_name("best.json")).config if self.name == WINNER else SpeculativeConfig()
        return Export(record["target"], best, Sampling.from_dict(record["sampling"]), evidence, where)

    @property
    def engines(self) -> list[str]:
        """The engines that are measured again."""
        return sorted(self.race.settings(name)[0] for name in {self.name, self.base} - {PLAIN, WINNER})

    @property
    def versions(self) -> dict[str, str]:
        """The versions of these engines' packages when they were measured."""
        return {engine: self.record["engine_versions"][engine] for engine in self.engines}


@dataclass(eq=False)
class FastestBackend(Backend):
    """The fastest contender beside what it was faster than. Outputs are compared with our plain decoding."""

    name: ClassVar[str] = "engines"
    exact: ClassVar[bool] = False
    target: Target
    claim: FastestEngine
    folder: Path  # keeps what engines load

    def __post_init__(self) -> None:
        check_on_cpu(self.target)
        self._versions = {name: engine_version(installed("engines", name)) for name in self.claim.engines}
        self._opened, self._peers = contextlib.ExitStack(), dict[str, EnginePeer]()

    def describe(self) -> dict[str, Any]:
        own: dict[str, Any] = {"contender": self.claim.name, "baseline": self.claim.base, "engine_versions": self._versions}
        return own | {"target": self.target.digest, "machine": machine(self.target), "version": RESULTS_VERSION}

    def supports(self, method: str) -> str | None:
        return None if method == self.claim.export.config.method else "it measures one contender of a race"

    def compare(self, asked: Comparison) -> Iterator[dict[str, Sample]]:
        """See :meth:`Backend.compare`; the only configuration stands for the fastest contender."""
        (candidate,) = asked.configs
        contenders: dict[str, Contender] = {PLAIN: Decoder.of(self.target, SpeculativeConfig())}
        try:
            contenders |= {BASELINE: self._contender(self.claim.base), candidate: self._contender(self.claim.name)}
            conditions = asked.task, asked.repeats, asked.without, asked.before
            for row in interleave(self.target, asked.prompts, contenders, *conditions):
                yield {BASELINE: row[BASELINE], candidate: self._judged(row[candidate])}
        except UnsupportedModel as error:
            raise BackendError(str(error)) from None

    def close(self) -> None:
        self._opened.close()
        self._peers.clear()

    def _contender(self, name: str) -> Contender:
        if name in (PLAIN, WINNER):
            return Decoder.of(self.target, self.claim.export.config if name == WINNER else SpeculativeConfig())
        if name not in self._peers:
            engine, settings = self.claim.race.settings(name)
            peer = EnginePeer(self.target, self.folder, engine, dtype=asked_dtype(self.target), **settings)
            self._peers[name] = self._opened.enter_context(contextlib.closing(peer))
        return self._peers[name]

    def _judged(self, sample: Sample) -> Sample:
        """Return the sample of the fastest with a comparison that allows for its rounding."""
        peer = self._peers.get(self.claim.name)
        return sample if peer is None else replace(sample, lossless=sample.lossless.judged_in(peer.rounds_to))
