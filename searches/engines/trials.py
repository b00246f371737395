"""Trials of an engine's prompt lookup: draft and n-gram lengths on tune prompts, where the engine can still win."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerskip import Measurement, PromptSet, SpeculativeConfig, Target, UnsupportedModel
from layerskip.measure.measure import Decoder, Task, interleave
from searches.engines.peer import EnginePeer
from searches.progress import say

BEST_GAIN = 2.8
"""The best published speedup of prompt lookup in an engine: vLLM's, on summaries (its project's report of October 2024)."""
SECONDS = 120.0  # after which no further trial of an engine starts
_OURS = "ours"
_DRAFTS, _NGRAMS = (8, 4, 16), (3, 2, 4)  # the first ones are those of the benchmark


@dataclass(frozen=True)
class LookupTrial:
    """Settings of an engine's prompt lookup, and their speedup over our plain decoding on tune prompts."""

    engine: str
    num_speculative_tokens: int
    prompt_lookup_max: int
    speedup: float

    @property
    def lengths(self) -> dict[str, int]:
        """The settings as arguments of :class:`~searches.engines.peer.EnginePeer`."""
        return {"num_speculative_tokens": self.num_speculative_tokens, "prompt_lookup_max": self.prompt_lookup_max}

    @property
    def is_default(self) -> bool:
        """Whether these are the settings that every engine is measured with."""
        return (self.num_speculative_tokens, self.prompt_lookup_max) == (_DRAFTS[0], _NGRAMS[0])

    @property
    def name(self) -> str:
        """Its name in tables."""
        tuned = f" of {self.num_speculative_tokens}, n-grams of up to {self.prompt_lookup_max}"
        return f"{self.engine}, prompt lookup" + ("" if self.is_default else tuned)


def reason_against(engine: str, plain: float, leader: float) -> str | None:
    """Return why an engine gets no trials, given speedups over our plain decoding, or None if it can win."""
    if plain * BEST_GAIN >= leader:
        return None
    return (
        f"{engine} gets no trials: its plain decoding is {plain:.2f} x ours. Times {BEST_GAIN:g}, the best published "
        f"gain of a lookup, that is below the leader's {leader:.2f} x"
    )


def lookup_trials(
    load: Callable[..., EnginePeer], engine: str, target: Target, prompts: PromptSet, task: Task
) -> list[LookupTrial]:
    """Measure settings one after the other: draft lengths first, then n-grams with the best length.

    A setting that the engine refuses, or under which it ends, is left out.

    Args:
        load: starts the engine with a draft and an n-gram length.

    Returns:
        The trials, fastest first.
    """
    end, found, plain = time.monotonic() + SECONDS, list[LookupTrial](), Decoder.of(target, SpeculativeConfig())

    def measure(settings: Sequence[tuple[int, int]]) -> None:
        for length, longest in settings:
            if time.monotonic() > end and found:
                return
            try:
                with contextlib.closing(load(num_speculative_tokens=length, prompt_lookup_max=longest)) as peer:
                    rows = list(interleave(target, prompts, {_OURS: plain, engine: peer}, task))
            except UnsupportedModel as error:
                say(f"engines: trial left out: {error}")
                continue
            found.append(LookupTrial(engine, length, longest, Measurement.of(rows, _OURS, engine).speedup))
            say(f"engines: trial: {found[-1].name}: {found[-1].speedup:.2f} x our plain decoding")

    measure([(length, _NGRAMS[0]) for length in _DRAFTS])
    if found:
        best = max(found, key=lambda trial: trial.speedup)
        measure([(best.num_speculative_tokens, longest) for longest in _NGRAMS[1:]])
    return sorted(found, key=lambda trial: -trial.speedup)
