"""What would a search see of a decoder of which everything is known? A bench and an oracle on a planted landscape.

The bench plays a decoder on a machine that is noisy and drifts, round by round, as the real one would be measured. The
oracle errs, and errs alike on masks that are alike, as one that had misjudged a sub-layer would: whoever follows it
blindly follows its error.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerskip import DecodeStats, PromptSet, Round, SkipMask, SpeculativeConfig
from layerskip.costs import NO_AIDS, Aids, CostProfile
from layerskip.lossless import Losslessness
from layerskip.measurement import Sample
from layerskip.prompts import PromptItem

from .bench import BASELINE
from .chances import Floats, threshold_of
from .foresight import ScanSettings, scanned_stops
from .landscape import Landscape
from .oracle import Prediction
from .space import SearchSpace
from .works import Work

_MEMORY = 2**30


class Machine:
    """A clock that is wrong: every timing by chance, and all of them together ever more and less.

    Args:
        seed: of its errors.
        noise: standard deviation of a timing's own error, on a log scale.
        drift: standard deviation of what timings near each other share, on a log scale.
        persistence: how much of that is left at the next timing.
    """

    def __init__(self, seed: int, noise: float = 0.02, drift: float = 0.05, persistence: float = 0.98) -> None:
        self._random = np.random.default_rng([seed, 11])
        self._noise, self._drift, self._persistence = noise, drift, persistence
        self._pace = drift * self._random.normal()

    def time(self, seconds: float) -> float:
        """What is measured of something that takes so long."""
        fresh, error = self._random.normal(size=2)
        self._pace = self._persistence * self._pace + math.sqrt(1 - self._persistence**2) * self._drift * fresh
        return seconds * math.exp(self._pace + self._noise * error)


@dataclass(frozen=True)
class SimulatedBench:
    """A planted decoder, measured on a machine.

    Args:
        landscape: the truth.
        machine: what times it; drifts on from comparison to comparison.
    """

    landscape: Landscape
    machine: Machine

    @property
    def layers(self) -> int:
        """The landscape's."""
        return self.landscape.layers

    @property
    def exact(self) -> bool:
        """Nothing rounds here."""
        return True

    def compare(
        self,
        configs: Mapping[str, SpeculativeConfig],
        prompts: PromptSet,
        repeats: int,
        seed: int,
        without: Collection[str] = (),
        before: PromptSet | None = None,
    ) -> Iterator[dict[str, Sample]]:
        """Decode with each, in an order drawn anew for every prompt.

        Raises:
            ConfigError: a configuration asks for a draft model.
        """
        entries = {BASELINE: SpeculativeConfig(), **configs}
        order = random.Random(seed)
        for repeat in range(repeats):
            for item in prompts:
                names = [name for name in entries if name not in without]
                order.shuffle(names)
                row = {name: self._decode(item, entries[name]) for name in names}
                yield {name: replace(row[name], lossless=Losslessness(int(not repeat))) for name in entries if name in row}

    def _decode(self, item: PromptItem, config: SpeculativeConfig) -> Sample:
        work = self.landscape.work(item)
        rounds = draw_rounds(self.landscape, item, work, config)
        costs = self.landscape.profile.verify_seconds
        seconds = sum(self.landscape.draft_seconds(config) * r.drafted + costs[r.drafted] for r in rounds)
        return Sample(
            item.id,
            item.category,
            work.tokens + 1,  # prefill gives the first
            work.tokens,
            self.machine.time(4 * costs[0]),
            self.machine.time(seconds),
            _MEMORY,
            DecodeStats(tuple(rounds)),
        )


def draw_rounds(landscape: Landscape, item: PromptItem, work: Work, config: SpeculativeConfig) -> list[Round]:
    """The rounds of decoding a prompt: the same every time, and alike for configurations that are alike.

    How hard a token is belongs to its place in the output, so that what one draft has right a better one has, too. Behind a
    wrong token a draft goes its own way, and only how long it goes on matters.
    """
    if config.kind == "none":
        return [Round(0, 0, 1)] * work.tokens
    ease, luck, found, further = _draws(landscape, item, work)
    chances = landscape.chances(config, np.array(work.difficulty), np.array(work.copying))
    drafts, right, sure = float(chances.drafts), float(chances.right), float(chances.sure)
    if config.kind == "layer_skip":
        confidence = ease ** (1 / right - 1)
        good = (luck < confidence).tolist()
        on = (confidence >= threshold_of(config.stop)).tolist()
    else:
        good, on = (luck < right).tolist(), [True] * work.tokens
    rounds = []
    start = 0
    while start < work.tokens:
        left = work.tokens - start
        limit = min(config.draft_length, left - 1) if found[start] < drafts else 0
        drafted = accepted = 0
        while drafted < limit:
            place = start + drafted
            drafted += 1
            if not good[place]:
                if on[place]:
                    more = limit if sure >= 1 else 1 + int(math.log(further[start]) / math.log(max(sure, 1e-300)))
                    drafted = min(limit, drafted + more)
                break
            accepted += 1
            if not on[place]:
                break
        rounds.append(Round(drafted, accepted, accepted + 1))
        start += accepted + 1
    return rounds


def _draws(landscape: Landscape, item: PromptItem, work: Work) -> Floats:
    """``[4, tokens]`` uniform draws that belong to a prompt, whoever decodes it."""
    words = hashlib.sha256(item.id.encode()).digest()[8:16]
    return 1.0 - np.random.default_rng([landscape.seed, *words]).random((4, work.tokens))  # never 0


class SimulatedOracle:
    """Foretells a planted decoder's speedups as scans do, with an error as was measured of them.

    Args:
        landscape: the truth.
        space: the draft lengths to choose from, and the kinds of stop rules, tried with the thresholds that scans try.
        prompts: whose texts prompt lookups are replayed on; the truth about them is not the truth about all.
        error: standard deviation of a prediction's error, on a log scale; masks err alike as far as they skip alike.
        bias: mean of the error of every mask that skips anything, on the same scale.
    """

    def __init__(
        self, landscape: Landscape, space: SearchSpace, prompts: PromptSet, error: float = 0.02, bias: float = 0.02
    ) -> None:
        self._landscape, self._space, self._prompts, self._error, self._bias = landscape, space, prompts, error, bias
        self._stops = scanned_stops(space, ScanSettings().thresholds)
        self._misjudged = np.random.default_rng([landscape.seed, 13]).normal(size=(2, landscape.layers))

    @property
    def layers(self) -> int:
        """The landscape's."""
        return self._landscape.layers

    @property
    def prompts(self) -> frozenset[str]:
        """Those whose texts lookups are replayed on."""
        return frozenset(item.id for item in self._prompts)

    @property
    def profile(self) -> CostProfile:
        """The true one: what it gets wrong is in its error."""
        return self._landscape.profile

    def agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        """How often the first drafted token is right, but for the error."""
        return [min(1.0, self._landscape.agreement(mask) * self._factor(mask)) for mask in masks]

    def predict(self, masks: Sequence[SkipMask]) -> list[Prediction]:
        """Each mask with its best draft length and stop rule; as the error is the mask's, it changes neither."""
        drafts = self._landscape.best_drafts(masks, self._space, self._stops)
        found = zip(masks, drafts, self.agreements(masks), strict=True)
        return [Prediction(config, speedup * self._factor(mask), agreement) for mask, (config, speedup), agreement in found]

    def foretells(self, config: SpeculativeConfig) -> bool:
        """Layer skipping by any stop rule, and prompt lookups."""
        return config.kind in ("layer_skip", "prompt_lookup") and not config.siblings and config.lossless

    def aids(self, mask: SkipMask) -> Aids:
        """Skips are empty here."""
        return NO_AIDS

    def knows(self, config: SpeculativeConfig) -> bool:
        """Skips are empty here."""
        return not config.bridge and not config.draft_head

    def speedup(self, config: SpeculativeConfig) -> float:
        """What is foretold of one configuration."""
        if config.kind == "prompt_lookup":
            costs = self._landscape.profile.verify_seconds
            works = [(item, self._landscape.work(item)) for item in self._prompts]
            rounds = [r for item, work in works for r in draw_rounds(self._landscape, item, work, config)]
            return sum(work.tokens for _, work in works) * costs[0] / sum(costs[r.drafted] for r in rounds)
        return self._landscape.speedup(config) * self._factor(SkipMask.parse(config.mask, self.layers))

    def _factor(self, mask: SkipMask) -> float:
        skipped = np.array([mask.attention, mask.mlp], float)
        if not skipped.any():
            return 1.0
        return math.exp(self._bias + self._error * float((self._misjudged * skipped).sum()) / math.sqrt(skipped.sum()))
