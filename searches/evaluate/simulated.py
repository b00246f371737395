"""Simulated decoders whose costs, acceptance and best configuration are known: a back end and a predictor.

A :class:`Landscape` has costs of all parts and a loss of acceptance for every skipped sub-layer. A drafted token is right
with a probability that falls with these losses and with the difficulty of the prompt. Drafts end at their length, so stop
rules have no effect. Only such a known optimum shows whether a search finds the best configuration. The back end decodes
round by round on a machine whose clock is noisy and drifts, as real decoders are measured.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from layerskip import ConfigError, DecodeStats, PromptSet, Round, Sampling, SkipMask, SpeculativeConfig, Target
from layerskip.costs.cost_model import NO_EXTRAS, CostProfile, DraftExtras
from layerskip.measure.losslessness import Losslessness
from layerskip.measure.measure import Task
from layerskip.measure.measurement import Sample
from layerskip.prompts import PromptItem
from searches.backends.backend import Backend, Workload
from searches.predict.predictor import SCREENED_TOGETHER, Prediction
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, ModelBench

Floats = NDArray[np.float64]

TOKENS = (24, 36, 48)  # numbers of decoded tokens of a prompt, equally likely
PREFILL_STEPS = 4  # time of a prefill in steps of plain decoding
# By category: difficulty of drafting, and how well the prompt predicts the output (logit scale).
CATEGORIES = {
    "chat": (1.22, -1.5),
    "code": (0.74, 0.2),
    "extraction": (0.82, 1.2),
    "reasoning": (1.0, -0.8),
    "summary": (1.11, 0.6),
    "translation": (1.35, -2.0),
}
_RELIEF = 0.85  # exponent of the sum of losses: to skip several sub-layers costs less than they cost one by one
_MEMORY = 2**30
_STALL = 1.8

Prospect = Literal["hopeful", "hopeless", "close"]
PROSPECTS: tuple[Prospect, ...] = get_args(Prospect)
# Factor on losses; range of the cost of verifying one more token, in steps; mean and deviation of the copying of outputs.
_PROSPECTS = {
    "hopeful": (1.0, (0.01, 0.04), (-1.3, 0.6)),
    "hopeless": (8.0, (0.3, 0.4), (-4.0, 0.0)),
    "close": (2.0, (0.12, 0.2), (-3.0, 0.2)),
}


def draw_prompts(count: int, seed: int) -> PromptSet:
    """Draw prompts of all categories at random."""
    categories = np.random.default_rng([seed, 7]).choice(list(CATEGORIES), size=count)
    items = (PromptItem(f"{seed}-{i}", str(category), f"prompt {i}") for i, category in enumerate(categories))
    return PromptSet(tuple(items), "planted")


def expected_counts(drafts: Floats, accepted: Floats, length: int) -> tuple[Floats, Floats]:
    """Return the expected numbers of rounds and of drafted tokens of a prompt, averaged over :data:`TOKENS`.

    Rounds form a Markov chain over the number of tokens that are left to decode, so no sampling is needed. ``drafts`` and
    ``accepted`` are probabilities of one shape: that a round drafts anything, and that a drafted token is accepted.
    """
    visits = np.zeros((max(TOKENS) + 1, *drafts.shape))
    rounds, drafted = np.zeros(drafts.shape), np.zeros(drafts.shape)
    for left in range(max(TOKENS), 0, -1):
        visits[left] += (left in TOKENS) / len(TOKENS)
        # A round adds one token of the target, so it drafts at most all but one of the tokens that are left.
        limit = min(length, left - 1)
        rounds += visits[left]
        drafted += visits[left] * drafts * limit
        reached = visits[left].copy()  # times that so many tokens were accepted
        for place in range(limit):
            passed = visits[left] * drafts * accepted ** (place + 1)
            visits[left - place - 1] += reached - passed
            reached = passed
        visits[left - limit - 1] += reached
    return rounds, drafted


@dataclass(frozen=True, eq=False)
class Landscape:
    """Costs and acceptance of a simulated decoder.

    Args:
        profile: cost of every part. Layers cost the same, and every drafted token adds the same seconds to verification.
        attention_losses: loss of acceptance by skipping the attention of each layer, on a log scale.
        copying: added to the copying of all prompts, on a logit scale.
    """

    seed: int
    profile: CostProfile
    attention_losses: tuple[float, ...]
    mlp_losses: tuple[float, ...]
    copying: float = 0.0

    @classmethod
    def draw(cls, seed: int, layers: int = 16, prospect: Prospect = "hopeful") -> Landscape:
        """Draw a landscape that resembles trained models: outer layers matter most.

        In a ``hopeful`` one, something beats plain decoding. In a ``close`` one, much comes near it, and little or nothing
        beats it. In a ``hopeless`` one nothing does, because drafts are mostly wrong and verification is slow.
        """
        loss_factor, slopes, (copied, spread) = _PROSPECTS[prospect]
        random = np.random.default_rng([seed, PROSPECTS.index(prospect)])
        depth = np.linspace(0.0, 1.0, layers)
        shape = 0.35 + 2.5 * (depth - random.uniform(0.35, 0.55)) ** 2
        losses = shape * random.lognormal(0.0, 1.0, (2, layers)) * [[0.7], [1.3]]
        losses *= random.uniform(0.6, 1.2) / losses.sum() * loss_factor
        step = random.uniform(0.01, 0.04)
        head, attention = random.uniform(0.05, 0.12), random.uniform(0.3, 0.45)
        slope = random.uniform(*slopes)
        profile = CostProfile(
            context=128,
            head_seconds=step * head,
            block_seconds=0.0,
            attention_seconds=(step * (1 - head) * attention / layers,) * layers,
            mlp_seconds=(step * (1 - head) * (1 - attention) / layers,) * layers,
            confidence_seconds=step * 0.01,
            round_seconds=0.0,
            verify_seconds=tuple(step * (1 + slope * drafted) for drafted in range(17)),
        )
        attention_losses, mlp_losses = (tuple(kind.tolist()) for kind in losses)
        return cls(seed, profile, attention_losses, mlp_losses, float(random.normal(copied, spread)))

    @property
    def layers(self) -> int:
        """Number of layers of the target."""
        return len(self.attention_losses)

    def tokens(self, item: PromptItem) -> int:
        """Return the number of decoded tokens of a prompt, always the same for the same prompt."""
        return TOKENS[hashlib.sha256(f"{self.seed} {item.id}".encode()).digest()[0] % len(TOKENS)]

    def loss(self, mask: SkipMask) -> float:
        """Return the loss of acceptance of a mask at difficulty 1, on a log scale."""
        flags = np.array([mask.attention, mask.mlp])
        return float((flags * [self.attention_losses, self.mlp_losses]).sum() ** _RELIEF)

    def odds(self, config: SpeculativeConfig) -> Floats:
        """Return the probabilities that a round drafts anything, and that a drafted token is accepted: ``[2, categories]``.

        Longer n-grams of prompt lookup match less often, and their tokens are accepted more often.

        Raises:
            ConfigError: the drafter is neither layer skipping nor prompt lookup.
        """
        difficulty, copying = np.array(list(CATEGORIES.values())).T
        copying = 1 / (1 + np.exp(-self.copying - copying))
        if config.method == "layer_skip":
            loss = self.loss(SkipMask.parse(config.mask, self.layers))
            return np.array([np.ones_like(difficulty), np.exp(-loss * difficulty)])
        if config.method == "prompt_lookup":
            longer, first = config.prompt_lookup_min - 1, 0.95 if config.match == "first" else 1.0
            drafts = (0.2 + 0.75 * copying) * 0.85**longer * first
            reliability = 1.5 - 0.5**config.prompt_lookup_max + 0.15 * longer
            return np.array([drafts, 0.95 * copying ** (1 / reliability)])
        raise ConfigError(f"method: a simulated decoder has no {config.method}")

    def draft_seconds(self, config: SpeculativeConfig) -> float:
        """Return the seconds of drafting one token; 0 for prompt lookup."""
        masked = config.method == "layer_skip"
        return self.profile.draft_seconds(SkipMask.parse(config.mask, self.layers)) if masked else 0.0

    def speedup(self, config: SpeculativeConfig) -> float:
        """Return the true speedup over plain decoding: the expectation over all possible prompts."""
        return 1.0 if config.method == "none" else self._speedups([config], config.num_speculative_tokens)[0]

    def _speedups(self, configs: Sequence[SpeculativeConfig], length: int) -> list[float]:
        """Return the true speedups of configurations of one draft length."""
        drafts, accepted = np.array([self.odds(config) for config in configs]).swapaxes(0, 1)  # [configs, categories] each
        rounds, drafted = (counts.mean(axis=1) for counts in expected_counts(drafts, accepted, length))
        plain, with_one = self.profile.verify_seconds[:2]
        each = np.array([self.draft_seconds(config) for config in configs]) + with_one - plain
        return [float(speedup) for speedup in np.mean(TOKENS) * plain / (rounds * plain + drafted * each)]

    def best(self, space: SearchSpace) -> tuple[SpeculativeConfig, float]:
        """Return the best configuration of a space and its true speedup, of all prompt lookups and all masks.

        A draft pass costs the same for all masks that skip as many attentions and as many MLPs, so only those that skip the
        ones with the smallest losses can be the best.
        """
        configs = space.lookups()
        if "layer_skip" in space.available_methods:
            shortest, longest = space.values("layer_skip", "num_speculative_tokens")
            kinds = (self.attention_losses, self.mlp_losses)
            attention, mlp = (sorted(space.skippable, key=losses.__getitem__) for losses in kinds)
            each = range(len(space.skippable) + 1)
            masks = [SkipMask.of(self.layers, set(attention[:a]), set(mlp[:m])).format() for a in each for m in each]
            lengths = range(shortest, longest + 1)
            configs += [SpeculativeConfig("layer_skip", n, mask=mask) for mask in masks for n in lengths]
        found = [(SpeculativeConfig(), 1.0)]
        for length in {config.num_speculative_tokens for config in configs}:
            group = [config for config in configs if config.num_speculative_tokens == length]
            found += zip(group, self._speedups(group, length), strict=True)
        return max(found, key=lambda pair: pair[1])


class Machine:
    """Noisy clock of a simulated machine. Timings have independent errors and a common drift.

    Args:
        noise: standard deviation of the independent error of a timing, on a log scale.
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
class SimulatedBackend(Backend):
    """A back end that decodes nothing. It may sleep for the seconds of a simulated decoder, which needs no processor.

    Args:
        target: gives the number of layers of a landscape that is drawn.
        seed: of that landscape.
        pace: real seconds of sleep per simulated second.
        landscape: costs and acceptance of the decoder; None draws them.
        machine: the clock, whose drift continues from one comparison to the next. None makes one from the seed of every
            task alone, so that a trial measures the same in any process.
    """

    target: Target | None = field(default=None, metadata={"runtime": True})
    seed: int = 0
    pace: float = 0.0
    landscape: Landscape | None = None
    machine: Machine | None = None
    name: ClassVar[str] = "simulated"
    exact: ClassVar[bool] = True

    def describe(self) -> dict[str, Any]:
        """Return the seed of the landscape. The pace changes no sample."""
        return {"landscape": self.seed}

    def supports(self, method: str) -> str | None:
        """Return None for the methods that a landscape knows."""
        return None if method in ("none", "layer_skip", "prompt_lookup") else "it is not simulated"

    def restrict(self, space: SearchSpace) -> SearchSpace:
        """Return the space without siblings and without stop rules."""
        return space.narrowed(["layer_skip"], siblings=(0, 0), stop=("length",))

    def compare(
        self,
        configs: Mapping[str, SpeculativeConfig],
        prompts: PromptSet,
        task: Task,
        workload: Workload = Workload(),
        repeats: int = 1,
        without: Collection[str] = (),
        before: PromptSet | None = None,
    ) -> Iterator[dict[str, Sample]]:
        """Decode every prompt with every configuration, in a new random order; see :meth:`Backend.compare`."""
        landscape, machine = self.landscape, self.machine or Machine(task.seed)
        if landscape is None:
            assert self.target is not None
            landscape = Landscape.draw(self.seed, self.target.layers)
        entries = {BASELINE: SpeculativeConfig(), **configs}
        order = random.Random(task.seed)
        for repeat in range(repeats):
            for item in prompts:
                names = [name for name in entries if name not in without]
                order.shuffle(names)
                row = {name: _decode(landscape, machine, item, entries[name]) for name in names}
                time.sleep(self.pace * sum(sample.prefill_seconds + sample.decode_seconds for sample in row.values()))
                yield {name: replace(row[name], lossless=Losslessness(int(not repeat))) for name in entries if name in row}

    def close(self) -> None:
        """Do nothing, because nothing was started."""


def simulated_bench(landscape: Landscape, machine: Machine) -> ModelBench:
    """Return a bench that measures a simulated decoder."""
    return ModelBench(SimulatedBackend(landscape=landscape, machine=machine), Sampling(), max(TOKENS))


def _decode(landscape: Landscape, machine: Machine, item: PromptItem, config: SpeculativeConfig) -> Sample:
    tokens, costs = landscape.tokens(item), landscape.profile.verify_seconds
    rounds = draw_rounds(landscape, item, config)
    seconds = sum(landscape.draft_seconds(config) * r.drafted + costs[r.drafted] for r in rounds)
    return Sample(
        prompt_id=item.id,
        category=item.category,
        tokens=tokens + 1,  # prefill gives the first token
        decoded_tokens=tokens,
        prefill_seconds=machine.time(PREFILL_STEPS * costs[0]),
        decode_seconds=machine.time(seconds),
        peak_memory_bytes=_MEMORY,
        stats=DecodeStats(tuple(rounds)),
    )


def draw_rounds(landscape: Landscape, item: PromptItem, config: SpeculativeConfig) -> list[Round]:
    """Return the rounds of decoding a prompt: always the same for one configuration, and similar for similar ones.

    Luck belongs to the position of a token in the output, so a better draft is right wherever a worse one is.
    """
    tokens = landscape.tokens(item)
    if config.method == "none":
        return [Round(0, 0, 1)] * tokens
    luck, matched = _draws(landscape.seed, item.id, tokens)
    drafts, accepted_rate = _odds(landscape, config)[:, list(CATEGORIES).index(item.category)]
    right, rounds, start = luck < accepted_rate, list[Round](), 0
    while start < tokens:
        drafted = min(config.num_speculative_tokens, tokens - start - 1) if matched[start] < drafts else 0
        wrong = np.flatnonzero(~right[start : start + drafted])
        accepted = int(wrong[0]) if wrong.size else drafted
        rounds.append(Round(drafted, accepted, accepted + 1))
        start += accepted + 1
    return rounds


@functools.lru_cache(4096)
def _odds(landscape: Landscape, config: SpeculativeConfig) -> Floats:
    """Return :meth:`Landscape.odds`; cached, because every prompt needs them."""
    return landscape.odds(config)


@functools.lru_cache(4096)
def _draws(seed: int, prompt_id: str, tokens: int) -> Floats:
    """Return ``[2, tokens]`` uniform draws of a prompt, shared by all configurations."""
    words = hashlib.sha256(prompt_id.encode()).digest()[8:16]
    return np.random.default_rng([seed, *words]).random((2, tokens))


class SimulatedPredictor:
    """Predictor of a simulated decoder's speedups as from scans: from the rounds of a few prompts, with an error in costs.

    Errors are correlated between similar masks, as if the cost of a sub-layer had been mismeasured. A search that trusts the
    predictor blindly inherits that error.

    Args:
        landscape: costs and acceptance of the decoder. The profile is the true one; ``error`` and ``bias`` stand for the
            errors of a measured one.
        prompts: prompts whose rounds are replayed. The best configuration of these is not the best of all prompts.
        error: standard deviation of the error of a prediction, on a log scale.
    """

    screened_together = SCREENED_TOGETHER

    def __init__(
        self, landscape: Landscape, lengths: Sequence[int], prompts: PromptSet, error: float = 0.02, bias: float = 0.02
    ) -> None:
        self._landscape, self._error, self._bias = landscape, error, bias
        self.layers, self.profile = landscape.layers, landscape.profile
        self._lengths = range(lengths[0], lengths[1] + 1)
        self._prompts, self.prompts = prompts, frozenset(item.id for item in prompts)
        self._sublayer_errors = np.random.default_rng([landscape.seed, 13]).normal(size=(2, landscape.layers))

    def sharpen(self) -> None:
        """Do nothing, because the costs are known."""

    def agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        """Return how often the first drafted token of each mask is right on the prompts."""
        difficulty = np.array([CATEGORIES[item.category][0] for item in self._prompts])
        return [float(np.mean(np.exp(-self._landscape.loss(mask) * difficulty))) for mask in masks]

    def predict(self, masks: Sequence[SkipMask]) -> list[Prediction]:
        """Predict each mask with its best draft length."""
        predictions = []
        for mask, agreement in zip(masks, self.agreements(masks), strict=True):
            configs = [SpeculativeConfig("layer_skip", length, mask=mask.format()) for length in self._lengths]
            best = max(configs, key=self.speedup)
            predictions.append(Prediction(best, self.speedup(best), agreement))
        return predictions

    def can_predict(self, config: SpeculativeConfig) -> bool:
        """Return whether this is lossless layer skipping or prompt lookup without siblings."""
        return config.method in ("layer_skip", "prompt_lookup") and not config.siblings and config.lossless

    def extras(self, mask: SkipMask) -> DraftExtras:
        """Return no extras: skips are empty."""
        return NO_EXTRAS

    def matches(self, config: SpeculativeConfig) -> bool:
        """Return whether a configuration drafts without fitted parts."""
        return not config.fitted

    def speedup(self, config: SpeculativeConfig) -> float:
        """Predict the speedup of one configuration over plain decoding."""
        costs, draft_seconds = self.profile.verify_seconds, self._landscape.draft_seconds(config)
        rounds = [r for item in self._prompts for r in draw_rounds(self._landscape, item, config)]
        plain = sum(map(self._landscape.tokens, self._prompts)) * costs[0]
        return plain / sum(draft_seconds * r.drafted + costs[r.drafted] for r in rounds) * self._error_factor(config)

    def _error_factor(self, config: SpeculativeConfig) -> float:
        mask = SkipMask.parse(config.mask, self.layers)
        skipped = np.array([mask.attention, mask.mlp], float)
        if not skipped.any():
            return 1.0
        error = float((self._sublayer_errors * skipped).sum()) / math.sqrt(skipped.sum())
        return math.exp(self._bias + self._error * error)
