"""Trials of an engine's drafting on tune prompts: prompt lookup, and draft models where some are named."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
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
            return f"{self.engine}, draft model {self.draft_model}, {self.num_speculative_tokens} tokens"
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


@dataclass
class EngineTrials:
    """The trials of one engine, with the engines that stay loaded: the fastest so far, and the usual lookup."""

    engine: str
    load: Callable[..., EnginePeer]  # starts the engine with the settings of a trial
    target: Target
    prompts: PromptSet
    task: Task

    def __post_init__(self) -> None:
        self.found: list[EngineTrial] = []
        self.peers: dict[str, EnginePeer] = {}  # by the names of their trials
        self._plain, self._end = Decoder.of(self.target, SpeculativeConfig()), time.monotonic() + SECONDS

    def run(self, drafts: Sequence[str]) -> list[EngineTrial]:
        """Measure one way of drafting after the other, and return the trials, the fastest first.

        Draft lengths come first, then n-grams with the best length; then draft models, which are folders, hub ids or files,
        and the best one with other lengths. What the engine refuses, or under which it ends, is left out.
        """
        made = partial(EngineTrial, self.engine)
        for best in self._best_of([made("prompt_lookup", length) for length in _LOOKUPS]):
            self._best_of([made("prompt_lookup", best.num_speculative_tokens, longest) for longest in _NGRAMS[1:]])
        for best in self._best_of([made("draft_model", _DRAFTS[0], draft_model=draft) for draft in drafts]):
            self._best_of([made("draft_model", length, draft_model=best.draft_model) for length in _DRAFTS[1:]])
        return sorted(self.found, key=lambda trial: -trial.speedup)

    def close(self) -> None:
        """End the engines that are loaded."""
        for peer in self.peers.values():
            peer.close()

    def _best_of(self, trials: Sequence[EngineTrial]) -> list[EngineTrial]:
        """Measure trials and return the fastest, if any could be measured in time."""
        measured = [done for trial in trials for done in self._measured(trial)]
        return sorted(measured, key=lambda trial: -trial.speedup)[:1]

    def _measured(self, trial: EngineTrial) -> list[EngineTrial]:
        if time.monotonic() > self._end and self.found:
            return []
        say(f"engines: trial: {trial.name}")
        try:
            peer = self.peers[trial.name] = self.load(**trial.settings)
            rows = list(interleave(self.target, self.prompts, {_OURS: self._plain, self.engine: peer}, self.task))
        except UnsupportedModel as error:
            say(f"engines: trial left out: {error}")
            self._unload([trial.name])
            return []
        done = replace(trial, speedup=Measurement.of(rows, _OURS, self.engine).speedup)
        self.found.append(done)
        say(f"engines: trial: {trial.name}: {done.speedup:.2f} x our plain decoding")
        fastest = max(self.found, key=lambda each: each.speedup)
        self._unload([each.name for each in self.found if not each.is_default and each is not fastest])
        return [done]

    def _unload(self, names: Sequence[str]) -> None:
        for name in names:
            if (peer := self.peers.pop(name, None)) is not None:
                peer.close()
