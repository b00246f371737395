"""What would a search see of a decoder of which everything is known? A bench and an oracle on a planted landscape.

The bench plays a decoder on a machine that is noisy and drifts, round by round, as the real one would be measured. The
oracle knows no more than a scan does, the rounds of a few prompts, and errs about what they cost, alike on masks that are
alike, as one that had misjudged a sub-layer would: whoever follows it blindly follows its error.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from layerskip import DecodeStats, PromptSet, Round, SkipMask, SpeculativeConfig
from layerskip.costs.cost_model import NO_AIDS, Aids, CostProfile
from layerskip.measure.losslessness import Losslessness
from layerskip.measure.measurement import Sample
from layerskip.prompts import PromptItem
from searches.evaluate.expected_rounds import Floats, threshold_of
from searches.evaluate.landscape import Landscape
from searches.evaluate.workload import Workload
from searches.predict.oracle import Choices, Prediction
from searches.predict.preparation import ScanSettings, scanned_stops
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE

_MEMORY = 2**30
_STALL = 1.8
_SCANNING = ScanSettings()
_SCREENED_STEPS, _SCANNED_STEPS = 10, 30
"""What asking about a mask's first drafted token takes in steps of plain decoding, and scanning it whole on four prompts."""


class Machine:
    """A clock that is wrong: every timing by chance, and all of them together ever more and less.

    Args:
        seed: of its errors.
        noise: standard deviation of a timing's own error, on a log scale.
        drift: standard deviation of what timings near each other share, on a log scale.
        persistence: how much of that is left at the next timing.
        stalls: the share of timings that something else on the machine makes 1.8 times as long.
    """

    def __init__(
        self, seed: int, noise: float = 0.02, drift: float = 0.05, persistence: float = 0.98, stalls: float = 0.0
    ) -> None:
        self._random = np.random.default_rng([seed, 11])
        self._noise, self._drift, self._persistence, self._stalls = noise, drift, persistence, stalls
        self._pace = drift * self._random.normal()

    def time(self, seconds: float) -> float:
        """What is measured of something that takes so long."""
        fresh, error = self._random.normal(size=2)
        self._pace = self._persistence * self._pace + math.sqrt(1 - self._persistence**2) * self._drift * fresh
        stalled = self._stalls > 0 and self._random.random() < self._stalls
        return seconds * math.exp(self._pace + self._noise * error) * (_STALL if stalled else 1.0)


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
    def conditions(self) -> Any:
        """Nothing: simulated samples are not kept."""
        return None

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


def draw_rounds(landscape: Landscape, item: PromptItem, work: Workload, config: SpeculativeConfig) -> list[Round]:
    """The rounds of decoding a prompt: the same every time, and alike for configurations that are alike.

    How hard a token is belongs to its place in the output, so that what one draft has right a better one has, too. Behind a
    wrong token a draft goes its own way, and only how long it goes on matters.
    """
    if config.kind == "none":
        return [Round(0, 0, 1)] * work.tokens
    ease, luck, found, further = _draws(landscape.seed, item.id, work.tokens)
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


@functools.lru_cache(4096)
def _draws(seed: int, prompt_id: str, tokens: int) -> Floats:
    """``[4, tokens]`` uniform draws that belong to a prompt, whoever decodes it."""
    words = hashlib.sha256(prompt_id.encode()).digest()[8:16]
    return 1.0 - np.random.default_rng([seed, *words]).random((4, tokens))  # never 0


class SimulatedOracle:
    """Foretells a planted decoder's speedups as scans do: from the rounds of a few prompts, with an error in what they cost.

    Args:
        landscape: the truth.
        space: the draft lengths to choose from, and the kinds of stop rules.
        prompts: whose rounds are replayed; the truth about them is not the truth about all.
        settings: the thresholds, and how many positions the first question about a mask is answered from.
        error: standard deviation of a prediction's error, on a log scale; masks err alike as far as they skip alike.
        bias: mean of the error of every mask that skips anything, on the same scale.
        spend: told how many seconds each question would have taken.
    """

    def __init__(
        self,
        landscape: Landscape,
        space: SearchSpace,
        prompts: PromptSet,
        settings: ScanSettings = _SCANNING,
        error: float = 0.02,
        bias: float = 0.02,
        spend: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._landscape, self._error, self._bias, self._spend = landscape, error, bias, spend
        self._works = [(item, landscape.work(item)) for item in prompts]
        self._choices = Choices((space.skip_length[0], space.skip_length[1]), scanned_stops(space, settings.thresholds))
        self._misjudged = np.random.default_rng([landscape.seed, 13]).normal(size=(2, landscape.layers))
        luck = [(_draws(landscape.seed, item.id, work.tokens)[:2], work.difficulty) for item, work in self._works]
        every = np.concatenate([np.vstack((draws, np.full(draws.shape[1], hard))) for draws, hard in luck], axis=1)
        places = np.linspace(0, every.shape[1] - 1, settings.screened_rows).round().astype(int)
        self._positions = every[:, places]

    @property
    def layers(self) -> int:
        """The landscape's."""
        return self._landscape.layers

    @property
    def prompts(self) -> frozenset[str]:
        """Those whose rounds are replayed."""
        return frozenset(item.id for item, _ in self._works)

    @property
    def profile(self) -> CostProfile:
        """The true one: what it gets wrong is in the error."""
        return self._landscape.profile

    def agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        """The share of some positions where the first drafted token is right."""
        self._spend(len(masks) * _SCREENED_STEPS * self.profile.verify_seconds[0])
        return self._agreements(masks)

    def _agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        ease, luck, difficulty = self._positions
        losses = np.maximum(self._landscape.losses(masks), 1e-12)
        return [float(np.mean(luck < ease ** np.expm1(loss * difficulty))) for loss in losses]

    def predict(self, masks: Sequence[SkipMask]) -> list[Prediction]:
        """Each mask with the draft length and stop rule that suit it best."""
        self._spend(len(masks) * _SCANNED_STEPS * len(self._works) / 4 * self.profile.verify_seconds[0])
        verified = len(self.profile.verify_seconds) - 1
        found = []
        for mask, agreement in zip(masks, self._agreements(masks), strict=True):
            choices = self._choices.every(self._choices.lengths[1], verified)
            configs = [
                SpeculativeConfig("layer_skip", length, mask=mask.format(), stop=stop) for _, (length, stop, _) in choices
            ]
            speedup, config = max(((self.speedup(config), config) for config in configs), key=lambda pair: pair[0])
            found.append(Prediction(config, speedup, agreement))
        return found

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
        costs, each = self.profile.verify_seconds, self._landscape.draft_seconds(config)
        rounds = [found for item, work in self._works for found in draw_rounds(self._landscape, item, work, config)]
        plain = sum(work.tokens for _, work in self._works) * costs[0]
        return plain / sum(each * r.drafted + costs[r.drafted] for r in rounds) * self._factor(config)

    def _factor(self, config: SpeculativeConfig) -> float:
        mask = SkipMask.parse(config.mask, self.layers)
        skipped = np.array([mask.attention, mask.mlp], float)
        if not skipped.any():
            return 1.0
        return math.exp(self._bias + self._error * float((self._misjudged * skipped).sum()) / math.sqrt(skipped.sum()))
