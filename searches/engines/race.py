"""Inference engines against the winner of a study, on the same machine, prompts and clock.

Plain decoding and prompt lookup of every engine are measured interleaved with our plain decoding and the study's winner,
prompt by prompt. An engine that crashes or hangs is left out from then on. Ours is compared token for token with our plain
decoding; an engine rounds in its own way, so that its lookup is compared with its own plain decoding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from layerskip import Measurement, PromptSet, SpeculativeConfig, Target, UnsupportedModel
from layerskip.measure.measure import Contender, Decoder, Task, interleave
from layerskip.measure.measurement import Sample
from searches.app.checks import InputError, check_list
from searches.backends.engine_process import interpreter
from searches.engines.peer import ENGINES, METHODS, EnginePeer
from searches.progress import say

RACE_FILE = "engines.json"
PLAIN, WINNER = "layerskip, plain", "layerskip, the winner"


@dataclass(frozen=True)
class RaceRow:
    """A contender of a race: its engine and method, and its metrics against the fastest plain decoding.

    Args:
        own_speedup: over the plain decoding of the same engine, with its interval; None for plain decoding itself.
        same_outputs: of how many prompts the tokens are those of the same engine's plain decoding, and of how many.
        precision: of the engine's arithmetic and cache, as it states them.
        command: what decodes so without this program.
        ended: the error that ended it, if it was not measured to the end.
    """

    name: str
    measured: dict[str, Any]
    own_speedup: Sequence[float] | None
    same_outputs: Sequence[int]
    precision: dict[str, str] = field(default_factory=dict)
    version: str = ""
    command: str = ""
    ended: str = ""


@dataclass(frozen=True)
class Race:
    """The results of a race, fastest first; ``left_out`` are sentences on engines that could not be measured at all."""

    rows: tuple[RaceRow, ...]
    fastest_plain: str
    prompts: int
    left_out: tuple[str, ...] = ()

    @property
    def fastest(self) -> RaceRow:
        """The fastest contender that was measured to the end."""
        return self.rows[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Race:
        """Return the race that :meth:`to_dict` described."""
        return cls(**fields | {"rows": tuple(RaceRow(**row) for row in fields["rows"])})


def chosen_engines(names: Any) -> tuple[str, ...]:
    """Return the engines that a configuration asks for, which must be installed; ``all`` stands for those that are."""
    if names == "all":
        missing = [engine for engine in ENGINES if interpreter(engine) is None]
        if missing:
            say(f"engines: {', '.join(missing)} left out: not installed; make engines installs them")
        return tuple(engine for engine in ENGINES if engine not in missing)
    check_list("engines", names, ENGINES)
    for engine in names:
        if interpreter(engine) is None:
            raise InputError(f"engines: {engine} is not installed; make engines installs it")
    return tuple(names)


def race(
    target: Target,
    winner: SpeculativeConfig,
    engines: Sequence[str],
    prompts: PromptSet,
    task: Task,
    folder: Path,
    on_prompt: Callable[[], object] = lambda: None,
) -> Race:
    """Measure engines, our plain decoding and the winner of a study greedily; ``folder`` keeps what engines load."""
    own = {PLAIN: Decoder.of(target, SpeculativeConfig())}
    own |= {} if winner.method == "none" else {WINNER: Decoder.of(target, winner)}
    dtype = "bfloat16" if target.precision == "mixed" else None
    with contextlib.ExitStack() as opened:
        peers: dict[str, EnginePeer] = {}
        left_out: list[str] = []
        for engine in engines:
            for method in METHODS:
                name = f"{engine}, {method.replace('_', ' ')}"
                say(f"engines: loading {name}")
                try:
                    peer = EnginePeer(target, folder, engine, method, dtype=dtype)
                except UnsupportedModel as error:
                    say(f"engines: left out: {error}")
                    left_out.append(str(error))
                    break  # its other methods load the same model
                peers[name] = opened.enter_context(contextlib.closing(peer))
        rows, dropped = _measure(target, prompts, own, peers, task, on_prompt)
        left_out += [reason for name, reason in dropped.items() if not any(name in row for row in rows)]
        plain = max(
            (name for name in rows[-1] if name.endswith("plain")), key=lambda n: Measurement.of(rows, PLAIN, n).speedup
        )
        names = dict.fromkeys(name for row in rows for name in row)
        found = [_judged(name, plain, rows, peers, dropped.get(name, "")) for name in names]
        found.sort(key=lambda row: (bool(row.ended), -row.measured["speedup"]))
        return Race(tuple(found), plain, len(rows), tuple(dict.fromkeys(left_out)))


def _measure(
    target: Target,
    prompts: PromptSet,
    own: Mapping[str, Contender],
    peers: Mapping[str, EnginePeer],
    task: Task,
    on_prompt: Callable[[], object],
) -> tuple[list[Mapping[str, Sample]], dict[str, str]]:
    """Return one row per prompt, and the reason of each engine that ended and was left out from then on."""
    rows: list[Mapping[str, Sample]] = []
    dropped: dict[str, str] = {}
    while len(rows) < len(prompts):
        alive: dict[str, Contender] = {**own, **{name: peer for name, peer in peers.items() if name not in dropped}}
        try:
            for row in interleave(target, PromptSet(prompts.items[len(rows) :]), alive, task):
                rows.append(row)
                on_prompt()
        except UnsupportedModel as error:
            ended = [name for name, peer in peers.items() if name not in dropped and not peer.is_running]
            if not ended:
                raise
            say(f"engines: {', '.join(ended)} left out: {error}")
            dropped |= dict.fromkeys(ended, str(error))
    return rows, dropped


def _judged(
    name: str, plain: str, rows: Sequence[Mapping[str, Sample]], peers: Mapping[str, EnginePeer], ended: str
) -> RaceRow:
    """Return the results of a contender, over the fastest plain decoding and over that of the same engine."""
    base = f"{name.partition(',')[0]}, plain"
    own = Measurement.of(rows, base, name)
    own_speedup = (own.speedup, *own.interval()) if name != base and own.candidate else None
    measured = Measurement.of(rows, plain, name).to_dict()
    if name not in peers:
        compared = own.lossless.compared
        same = compared - len(own.lossless.divergences), compared
        return RaceRow(name, measured, own_speedup, same, ended=ended)
    peer, expected = peers[name], peers[base].outputs
    common = peer.outputs.keys() & expected.keys()
    same = sum(peer.outputs[prompt] == expected[prompt] for prompt in common), len(common)
    return RaceRow(name, measured, own_speedup, same, peer.precision, peer.version, peer.command(), ended)
