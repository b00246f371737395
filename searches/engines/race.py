"""Inference engines against the winner of a study, on the same machine, prompts and clock.

Plain decoding of every engine comes first, on tune prompts, beside our plain decoding and the study's winner. An engine that
could not reach the leader with the best published gain of a lookup gets no trials; the others get a few. Then all plain
decodings, and the usual lookup and the best drafting of each engine with trials, are measured on held-out prompts, in turns
prompt by prompt. An engine that crashes or hangs is left out from then on. Ours is compared token for token with our plain
decoding; an engine rounds in its own way, so that its drafting is compared with its own plain decoding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from layerskip import Measurement, PromptSet, SpeculativeConfig, Target, UnsupportedModel
from layerskip.measure.measure import Decoder, Task
from layerskip.measure.measurement import Sample
from searches.app.checks import InputError, check_list
from searches.backends.engine_process import interpreter
from searches.engines.peer import ENGINES, EnginePeer, asked_dtype, installed, interleave_alive
from searches.engines.trials import EngineTrial, EngineTrials, reason_against
from searches.progress import say

RACE_FILE, SCHEMA = "engines.json", "layerskip.engines/2"
_PLAIN = ", plain"
PLAIN, WINNER = "layerskip, plain", "layerskip, the winner"


@dataclass(frozen=True)
class RaceRow:
    """A contender of a race: its engine and method, and its metrics against the fastest plain decoding.

    ``reference`` counts comparisons with our plain decoding: ``compared``, ``same``, ``near_ties`` that rounding to the
    engine's data type explains, and ``changed`` outputs.
    """

    name: str
    measured: dict[str, Any]
    own_speedup: Sequence[float] | None  # over the same engine's plain decoding, with its interval; None for plain decoding
    same_outputs: Sequence[int]  # prompts whose tokens are those of the same engine's plain decoding, and of how many
    reference: dict[str, int]
    precision: dict[str, str] = field(default_factory=dict)  # of the engine's arithmetic and cache, as it states them
    version: str = ""
    command: str = ""  # what decodes so without this program
    ended: str = ""  # the error that ended it, if it was not measured to the end


@dataclass(frozen=True)
class Race:
    """The results of a race, fastest first."""

    rows: tuple[RaceRow, ...]
    fastest_plain: str
    prompts: int
    left_out: tuple[str, ...] = ()  # sentences on engines that could not be measured at all
    notes: tuple[str, ...] = ()  # sentences on those without trials, and on those that decode another model
    trials: tuple[EngineTrial, ...] = ()
    level: tuple[str, ...] = ()  # cannot be distinguished from the fastest: the interval of their paired speeds contains 1

    @property
    def fastest(self) -> RaceRow:
        """The fastest contender that was measured to the end and decodes the same model as we do."""
        return next(row for row in self.rows if _is_same_model(row.reference) and not row.ended)

    def settings(self, name: str) -> tuple[str, dict[str, Any]]:
        """Return the engine of a contender that is not ours, and the arguments that make it decode so."""
        known = {trial.name: (trial.engine, trial.settings) for trial in self.trials}
        if name not in known and not name.endswith(_PLAIN):
            raise InputError(f"race.rows: {name!r} is none of its trials")
        return known.get(name, (name.removesuffix(_PLAIN), {"method": "plain"}))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Race:
        """Return the race that :meth:`to_dict` described."""
        rows, trials = (RaceRow(**row) for row in fields["rows"]), (EngineTrial(**trial) for trial in fields["trials"])
        texts = {name: tuple(fields[name]) for name in ("left_out", "notes", "level")}
        return cls(**fields | texts | {"rows": tuple(rows), "trials": tuple(trials)})


def chosen_engines(names: Any) -> tuple[str, ...]:
    """Return the engines that a configuration asks for, which must be installed; ``all`` stands for those that are.

    This library's own decoder, ``layerskip``, is always measured.
    """
    if names == "all":
        missing = [engine for engine in ENGINES if interpreter(engine) is None]
        if missing:
            say(f"engines: {', '.join(missing)} left out: not installed; make engines installs them")
        return tuple(engine for engine in ENGINES if engine not in missing)
    check_list("engines", names)
    return tuple(installed("engines", name) for name in names if name != "layerskip")


def race(
    target: Target,
    winner: SpeculativeConfig,
    engines: Sequence[str],
    prompts: tuple[PromptSet, PromptSet],
    task: Task,
    folder: Path,
    drafts: Sequence[str] = (),
    on_prompt: Callable[[], object] = lambda: None,
) -> Race:
    """Measure engines, our plain decoding and the winner of a study greedily.

    Args:
        prompts: those of trials, and held-out ones.
        folder: keeps what engines load.
        drafts: draft models that engines may try.
        on_prompt: is called after each held-out prompt.
    """
    own = {PLAIN: Decoder.of(target, SpeculativeConfig())}
    own |= {} if winner.method == "none" else {WINNER: Decoder.of(target, winner)}
    load: Callable[..., EnginePeer] = partial(EnginePeer, target, folder, dtype=asked_dtype(target))
    tune, held_out = prompts
    with contextlib.ExitStack() as opened:
        peers: dict[str, EnginePeer] = {}
        left_out: list[str] = []

        for engine in engines:
            name = f"{engine}, plain"
            say(f"engines: loading {name}")
            try:
                peers[name] = opened.enter_context(contextlib.closing(load(engine, "plain")))
            except UnsupportedModel as error:
                say(f"engines: left out: {error}")
                left_out.append(str(error))
        tuned, dropped = interleave_alive(target, tune, {**own, **peers}, task)
        speeds = {name: Measurement.of(tuned, PLAIN, name).speedup for name in (*own, *peers) if name not in dropped}
        notes, trials = list[str](), list[EngineTrial]()
        for engine in (engine for engine in engines if f"{engine}, plain" in speeds):
            if (reason := reason_against(engine, speeds[f"{engine}, plain"], max(speeds.values()), drafts)) is not None:
                say(f"engines: {reason}")
                notes.append(reason)
                continue
            tried = EngineTrials(engine, partial(load, engine), target, tune, task)
            opened.callback(tried.close)
            trials += tried.run(drafts)
            peers |= tried.peers
        for peer in peers.values():
            peer.outputs.clear()  # those of held-out prompts are compared
        alive = {name: peer for name, peer in peers.items() if name not in dropped}
        rows, ended = interleave_alive(target, held_out, {**own, **alive}, task, on_prompt=on_prompt)
        left_out += [reason for name, reason in (dropped | ended).items() if not any(name in row for row in rows)]
        names = dict.fromkeys(name for row in rows for name in row)
        references = {name: _reference(rows, name, peers.get(name)) for name in names}
        plains = [name for name in rows[-1] if name.endswith("plain") and _is_same_model(references[name])]
        plain = max(plains, key=lambda name: Measurement.of(rows, PLAIN, name).speedup)
        judged = [_judged(name, plain, rows, peers, references, ended.get(name, "")) for name in names]
        judged.sort(key=lambda row: (bool(row.ended), -row.measured["speedup"]))
        notes += [
            f"{row.name} cannot be the fastest: {row.reference['changed']} of {row.reference['compared']} outputs differ "
            "from those of our plain decoding by more than rounding"
            for row in judged
            if not _is_same_model(row.reference)
        ]
        result = Race(tuple(judged), plain, len(rows), tuple(dict.fromkeys(left_out)), tuple(notes), tuple(trials))
        alike = [row.name for row in judged if row is not result.fastest and _is_same_model(row.reference) and not row.ended]
        level = [name for name in alike if Measurement.of(rows, result.fastest.name, name).interval()[1] >= 1]
        return replace(result, level=tuple(level))


def _judged(
    name: str,
    plain: str,
    rows: Sequence[Mapping[str, Sample]],
    peers: Mapping[str, EnginePeer],
    references: Mapping[str, dict[str, int]],
    ended: str,
) -> RaceRow:
    """Return the results of a contender, over the fastest plain decoding and over that of the same engine."""
    base, reference = f"{name.partition(',')[0]}, plain", references[name]
    own = Measurement.of(rows, base, name)
    own_speedup = (own.speedup, *own.interval()) if name != base and own.candidate else None
    measured = Measurement.of(rows, plain, name).to_dict()
    if name not in peers:
        return RaceRow(name, measured, own_speedup, (reference["same"], reference["compared"]), reference, ended=ended)
    peer, expected = peers[name], peers[base].outputs
    common = peer.outputs.keys() & expected.keys()
    same = sum(peer.outputs[prompt] == expected[prompt] for prompt in common), len(common)
    return RaceRow(name, measured, own_speedup, same, reference, peer.precision, peer.version, peer.command(), ended)


def _reference(rows: Sequence[Mapping[str, Sample]], name: str, peer: EnginePeer | None) -> dict[str, int]:
    """Return the comparison of a contender's outputs with those of our plain decoding."""
    lossless = Measurement.of(rows, PLAIN, name).lossless
    lossless = lossless if peer is None else lossless.judged_in(peer.rounds_to)
    found = lossless.to_dict()
    same = found["compared"] - found["near_ties"] - found["different"]
    return {"compared": found["compared"], "same": same, "near_ties": found["near_ties"], "changed": found["different"]}


def _is_same_model(reference: Mapping[str, int]) -> bool:
    """Whether all outputs are the reference's, up to rounding to the engine's data type."""
    return not reference["changed"]
