"""Simulated decoder with known costs and acceptance: a bench and a speedup predictor on a :class:`Landscape`.

The bench decodes round by round on a machine whose clock is noisy and drifts, in the same way as real decoders are measured.
The predictor knows as much as a scan, the rounds of a few prompts. Its errors in costs are correlated between similar masks,
as if the cost of a sub-layer had been mismeasured. A search that trusts the predictor blindly inherits that error.
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
from layerskip.costs.cost_model import NO_EXTRAS, CostProfile, DraftExtras
from layerskip.measure.losslessness import Losslessness
from layerskip.measure.measurement import Sample
from layerskip.prompts import PromptItem
from searches.evaluate.expected_rounds import Floats, threshold_of
from searches.evaluate.landscape import Landscape
from searches.evaluate.workload import Workload
from searches.predict.predictor import SCREENED_TOGETHER, DraftChoices, Prediction, SpeedupPredictor
from searches.predict.preparation import ScanSettings, scanned_stops
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, Bench

PREFILL_STEPS = 4  # time of a prefill in steps of plain decoding
_MEMORY = 2**30
_STALL = 1.8
_SCANNING = ScanSettings()
# Time per mask in steps of plain decoding: screening its first drafted token, and scanning it on four prompts.
_SCREENED_STEPS, _SCANNED_STEPS = 10, 30


def _ignore(seconds: float) -> None:
    """Ignore seconds: the default of ``spend``."""


class Machine:
    """Noisy clock of a simulated machine. Timings have independent errors and a common drift.

    Args:
        seed: seed of all errors.
        noise: standard deviation of the independent error of a timing, on a log scale.
        drift: standard deviation of the error that neighbouring timings share, on a log scale.
        persistence: correlation of the drift of one timing with that of the next.
        stalls: share of timings that other work on the machine makes 1.8 times as long.
    """

    def __init__(
        self, seed: int, noise: float = 0.02, drift: float = 0.05, persistence: float = 0.98, stalls: float = 0.0
    ) -> None:
        self._random = np.random.default_rng([seed, 11])
        self._noise, self._drift, self._persistence, self._stalls = noise, drift, persistence, stalls
        self._drifted = drift * self._random.normal()

    def time(self, seconds: float) -> float:
        """Return the measured time of something that takes ``seconds``."""
        fresh, error = self._random.normal(size=2)
        self._drifted = self._persistence * self._drifted + math.sqrt(1 - self._persistence**2) * self._drift * fresh
        stalled = self._stalls > 0 and self._random.random() < self._stalls
        return seconds * math.exp(self._drifted + self._noise * error) * (_STALL if stalled else 1.0)


@dataclass(frozen=True)
class SimulatedBench(Bench):
    """Bench that measures a simulated decoder.

    Args:
        landscape: costs and acceptance of the decoder.
        machine: the clock; its drift continues from one comparison to the next.
        spend: called with the measured seconds of every row.
    """

    landscape: Landscape
    machine: Machine
    spend: Callable[[float], None] = _ignore

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return self.landscape.layers

    @property
    def conditions(self) -> Any:
        """None: simulated samples are not cached."""
        return None

    @property
    def exact(self) -> bool:
        """Always true: nothing is rounded."""
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
        """Decode every prompt with every configuration, in a new random order for each prompt.

        Args:
            configs: by name.
            prompts: all of them are decoded in each repeat.
            repeats: how often every prompt is decoded.
            seed: of the order of configurations.
            without: configurations that are no longer measured.
            before: ignored, since simulated drafters do not learn.

        Raises:
            ConfigError: a configuration is neither plain decoding, layer skipping nor prompt lookup.
        """
        entries = {BASELINE: SpeculativeConfig(), **configs}
        order = random.Random(seed)
        for repeat in range(repeats):
            for item in prompts:
                names = [name for name in entries if name not in without]
                order.shuffle(names)
                row = {name: self._decode(item, entries[name]) for name in names}
                self.spend(sum(sample.prefill_seconds + sample.decode_seconds for sample in row.values()))
                yield {name: replace(row[name], lossless=Losslessness(int(not repeat))) for name in entries if name in row}

    def _decode(self, item: PromptItem, config: SpeculativeConfig) -> Sample:
        work = self.landscape.work(item)
        rounds = draw_rounds(self.landscape, item, work, config)
        costs = self.landscape.profile.verify_seconds
        seconds = sum(self.landscape.draft_seconds(config) * r.drafted + costs[r.drafted] for r in rounds)
        return Sample(
            item.id,
            item.category,
            work.tokens + 1,  # prefill gives the first token
            work.tokens,
            self.machine.time(PREFILL_STEPS * costs[0]),
            self.machine.time(seconds),
            _MEMORY,
            DecodeStats(tuple(rounds)),
        )


def draw_rounds(landscape: Landscape, item: PromptItem, work: Workload, config: SpeculativeConfig) -> list[Round]:
    """Return the rounds of decoding a prompt: always the same for one configuration, and similar for similar ones.

    The difficulty of a token belongs to its position in the output, so a better draft is right wherever a worse one is.
    After a wrong token a draft departs from the output, and only the number of further drafted tokens matters.

    Args:
        landscape: costs and acceptance of the decoder.
        item: the prompt.
        work: its workload.
        config: of the drafter.
    """
    if config.kind == "none":
        return [Round(0, 0, 1)] * work.tokens
    ease, luck, matched, further = _draws(landscape.seed, item.id, work.tokens)
    drawn = landscape.probabilities(config, np.array(work.difficulty), np.array(work.copying))
    drafts, accepted_rate, continues = float(drawn.drafts), float(drawn.accepted), float(drawn.continues)
    if config.kind == "layer_skip":
        confidence = ease ** (1 / accepted_rate - 1)
        right = (luck < confidence).tolist()
        confident = (confidence >= threshold_of(config.stop)).tolist()
    else:
        right, confident = (luck < accepted_rate).tolist(), [True] * work.tokens
    rounds = []
    start = 0
    while start < work.tokens:
        left = work.tokens - start
        limit = min(config.draft_length, left - 1) if matched[start] < drafts else 0
        drafted = accepted = 0
        while drafted < limit:
            place = start + drafted
            drafted += 1
            if not right[place]:
                if confident[place]:
                    endless = continues >= 1
                    more = limit if endless else 1 + int(math.log(further[start]) / math.log(max(continues, 1e-300)))
                    drafted = min(limit, drafted + more)
                break
            accepted += 1
            if not confident[place]:
                break
        rounds.append(Round(drafted, accepted, accepted + 1))
        start += accepted + 1
    return rounds


@functools.lru_cache(4096)
def _draws(seed: int, prompt_id: str, tokens: int) -> Floats:
    """Return ``[4, tokens]`` uniform draws of a prompt, shared by all configurations."""
    words = hashlib.sha256(prompt_id.encode()).digest()[8:16]
    return 1.0 - np.random.default_rng([seed, *words]).random((4, tokens))  # never 0


class SimulatedPredictor(SpeedupPredictor):
    """Predictor of a simulated decoder's speedups as from scans: from the rounds of a few prompts, with an error in costs.

    Args:
        landscape: costs and acceptance of the decoder.
        space: draft lengths and kinds of stop rules to choose from.
        prompts: prompts whose rounds are replayed. The best configuration of these is not the best of all prompts.
        settings: thresholds, and the number of positions that screening looks at.
        error: standard deviation of the error of a prediction, on a log scale. Similar masks have similar errors.
        bias: mean error of all masks that skip anything, on the same scale.
        spend: called with the seconds that each question would have taken.
    """

    def __init__(
        self,
        landscape: Landscape,
        space: SearchSpace,
        prompts: PromptSet,
        settings: ScanSettings = _SCANNING,
        error: float = 0.02,
        bias: float = 0.02,
        spend: Callable[[float], None] = _ignore,
    ) -> None:
        self._landscape, self._error, self._bias, self._spend = landscape, error, bias, spend
        self._works = [(item, landscape.work(item)) for item in prompts]
        self._choices = DraftChoices((space.skip_length[0], space.skip_length[1]), scanned_stops(space, settings.thresholds))
        self._sublayer_errors = np.random.default_rng([landscape.seed, 13]).normal(size=(2, landscape.layers))
        draws = [(_draws(landscape.seed, item.id, work.tokens)[:2], work.difficulty) for item, work in self._works]
        every = np.concatenate([np.vstack((draw, np.full(draw.shape[1], hard))) for draw, hard in draws], axis=1)
        places = np.linspace(0, every.shape[1] - 1, settings.screened_rows).round().astype(int)
        self._positions = every[:, places]

    screened_together = SCREENED_TOGETHER

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return self._landscape.layers

    @property
    def prompts(self) -> frozenset[str]:
        """The ids of replayed prompts."""
        return frozenset(item.id for item, _ in self._works)

    @property
    def profile(self) -> CostProfile:
        """The true costs; ``error`` and ``bias`` stand for the errors of a measured profile."""
        return self._landscape.profile

    def agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        """Return the share of a sample of positions where the first drafted token is right, for every mask."""
        self._spend(len(masks) * _SCREENED_STEPS * self.profile.verify_seconds[0])
        return self._agreements(masks)

    def _agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        ease, luck, difficulty = self._positions
        losses = np.maximum(self._landscape.losses(masks), 1e-12)
        return [float(np.mean(luck < ease ** np.expm1(loss * difficulty))) for loss in losses]

    def predict(self, masks: Sequence[SkipMask]) -> list[Prediction]:
        """Predict each mask with its best draft length and stop rule."""
        self._spend(len(masks) * _SCANNED_STEPS * len(self._works) / 4 * self.profile.verify_seconds[0])
        verified = len(self.profile.verify_seconds) - 1
        predictions = []
        for mask, agreement in zip(masks, self._agreements(masks), strict=True):
            choices = self._choices.combinations(self._choices.lengths[1], verified)
            configs = [
                SpeculativeConfig("layer_skip", length, mask=mask.format(), stop=stop) for _, (length, stop, _) in choices
            ]
            speedup, config = max(((self.speedup(config), config) for config in configs), key=lambda pair: pair[0])
            predictions.append(Prediction(config, speedup, agreement))
        return predictions

    def can_predict(self, config: SpeculativeConfig) -> bool:
        """Return whether this is lossless layer skipping or prompt lookup without siblings."""
        return config.kind in ("layer_skip", "prompt_lookup") and not config.siblings and config.lossless

    def extras(self, mask: SkipMask) -> DraftExtras:
        """Return no extras: skips are empty."""
        return NO_EXTRAS

    def matches(self, config: SpeculativeConfig) -> bool:
        """Return whether a configuration has neither bridges nor a draft head."""
        return not config.bridge and not config.draft_head

    def speedup(self, config: SpeculativeConfig) -> float:
        """Predict the speedup of one configuration over plain decoding."""
        costs, draft_seconds = self.profile.verify_seconds, self._landscape.draft_seconds(config)
        rounds = [r for item, work in self._works for r in draw_rounds(self._landscape, item, work, config)]
        plain = sum(work.tokens for _, work in self._works) * costs[0]
        return plain / sum(draft_seconds * r.drafted + costs[r.drafted] for r in rounds) * self._error_factor(config)

    def _error_factor(self, config: SpeculativeConfig) -> float:
        mask = SkipMask.parse(config.mask, self.layers)
        skipped = np.array([mask.attention, mask.mlp], float)
        if not skipped.any():
            return 1.0
        error = float((self._sublayer_errors * skipped).sum()) / math.sqrt(skipped.sum())
        return math.exp(self._bias + self._error * error)
