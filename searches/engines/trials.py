"""Trials of an engine's drafting on tune prompts: prompt lookup, and draft models where some are named."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerskip import Measurement, PromptSet, SpeculativeConfig, Target, UnsupportedModel
from layerskip.measure.measure import Decoder, Task, interleave
from searches.engines.peer import EnginePeer
from searches.progress import say

BEST_GAIN = 2.8
"""The best published speedup of prompt lookup in an engine: vLLM's, on summaries (its project's report of October 2024)."""
SECONDS = 120.0  # after which no further trial of an engine starts
_OURS = "ours"
_LOOKUPS, _NGRAMS = (8, 4, 16), (3, 2, 4)  # the first ones are those of the benchmark
_DRAFTS = (4, 2, 8)


@dataclass(frozen=True)
class EngineTrial:
    """How an engine drafts, and its speedup over our plain decoding on tune prompts.

    All fields between the first and the last are those of :class:`~searches.engines.peer.EnginePeer`.
    """

    engine: str
    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = _NGRAMS[0]
    draft_model: str = ""
    speedup: float = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that make the engine draft so."""
        return {name: value for name, value in asdict(self).items() if name not in ("engine", "speedup")}

    @property
    def is_default(self) -> bool:
        """Whether this is the lookup that every engine is measured with."""
        usual = "prompt_lookup", _LOOKUPS[0], _NGRAMS[0]
        return (self.method, self.num_speculative_tokens, self.prompt_lookup_max) == usual

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.is_default:
            return f"{self.engine}, prompt lookup"
        if self.draft_model:
            return f"{self.engine}, draft model {Path(self.draft_model).name}, {self.num_speculative_tokens} tokens"
        return (
            f"{self.engine}, prompt lookup, {self.num_speculative_tokens} tokens, n-grams of up to {self.prompt_lookup_max}"
        )


def reason_against(engine: str, plain: float, leader: float, drafts: Sequence[str] = ()) -> str | None:
    """Return why an engine gets no trials, given speedups over our plain decoding, or None if it can win.

    The gain of draft models has no such bound.
    """
    if drafts or plain * BEST_GAIN >= leader:
        return None
    return (
        f"{engine} gets no trials: its plain decoding is {plain:.2f} x ours. Times {BEST_GAIN:g}, the best published "
        f"gain of a lookup, that is below the leader's {leader:.2f} x"
    )


def engine_trials(
    load: Callable[..., EnginePeer],
    engine: str,
    drafts: Sequence[str],
    target: Target,
    prompts: PromptSet,
    task: Task,
) -> list[EngineTrial]:
    """Measure an engine's drafting one way after the other, and return the trials, the fastest first.

    Draft lengths come first, then n-grams with the best length; then draft models, and the best one with other lengths.
    What the engine refuses, or under which it ends, is left out.

    Args:
        load: starts the engine with the settings of a trial.
        drafts: folders, hub ids or files of draft models.
    """
    end, found, plain = time.monotonic() + SECONDS, list[EngineTrial](), Decoder.of(target, SpeculativeConfig())

    def best_of(trials: Sequence[EngineTrial]) -> list[EngineTrial]:
        """Measure trials and return the fastest, if any could be measured in time."""
        measured = list[EngineTrial]()
        for trial in trials:
            if time.monotonic() > end and (found or measured):
                break
            try:
                with contextlib.closing(load(**trial.settings)) as peer:
                    rows = list(interleave(target, prompts, {_OURS: plain, engine: peer}, task))
            except UnsupportedModel as error:
                say(f"engines: trial left out: {error}")
                continue
            speedup = Measurement.of(rows, _OURS, engine).speedup
            measured.append(EngineTrial(engine, **trial.settings, speedup=speedup))
            say(f"engines: trial: {trial.name}: {speedup:.2f} x our plain decoding")
        found.extend(measured)
        return sorted(measured, key=lambda trial: -trial.speedup)[:1]

    for best in best_of([EngineTrial(engine, "prompt_lookup", length) for length in _LOOKUPS]):
        best_of([EngineTrial(engine, "prompt_lookup", best.num_speculative_tokens, longest) for longest in _NGRAMS[1:]])
    for best in best_of([EngineTrial(engine, "draft_model", _DRAFTS[0], draft_model=draft) for draft in drafts]):
        best_of([EngineTrial(engine, "draft_model", length, draft_model=best.draft_model) for length in _DRAFTS[1:]])
    return sorted(found, key=lambda trial: -trial.speedup)
