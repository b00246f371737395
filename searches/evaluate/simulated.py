"""Simulated decoders whose costs, acceptance and best configuration are known: a back end and a predictor.

Only a known optimum shows whether a search finds the best configuration. A :class:`Landscape` has costs of all parts and a
loss of acceptance for every skipped sub-layer. A drafted token is right with a probability that falls with these losses and
with the difficulty of the prompt. The back end decodes round by round on a machine whose clock is noisy and drifts.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from layerskip import ConfigError, DecodeStats, DraftPlan, PromptSet, Round, Sampling, SpeculativeConfig
from layerskip.costs.cost_model import CostProfile
from layerskip.measure.losslessness import Losslessness
from layerskip.measure.measurement import Sample
from layerskip.prompts import PromptItem
from searches.backends.backend import Backend, Comparison
from searches.predict.mask_search import SCREENED_TOGETHER, Prediction
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
_PERSISTENCE = 0.98  # correlation of the drift of one timing with that of the next
_STALL = 1.8  # factor on a timing that is disturbed
# Factor on losses; range of the cost of verifying one more token, in steps; mean and deviation of the copying of outputs.
PROSPECTS = {
    "hopeful": (1.0, (0.01, 0.04), (-1.3, 0.6)),  # something beats plain decoding
    "hopeless": (8.0, (0.3, 0.4), (-4.0, 0.0)),  # nothing does: drafts are mostly wrong and verification is slow
    "close": (2.0, (0.12, 0.2), (-3.0, 0.2)),  # much comes near it, and little or nothing beats it
}


def draw_prompts(count: int, seed: int) -> PromptSet:
    """Draw prompts of all categories at random."""
    categories = np.random.default_rng([seed, 7]).choice(list(CATEGORIES), size=count)
    items = (PromptItem(f"{seed}-{i}", str(category), f"prompt {i}") for i, category in enumerate(categories))
    return PromptSet(tuple(items), "planted")


@dataclass(frozen=True, eq=False)
class Landscape:
    """Costs and acceptance of a simulated decoder."""

    seed: int
    profile: CostProfile  # of every part; layers cost the same, each drafted token adds the same seconds to verification
    losses: Floats  # ``[2, layers]``: loss of acceptance by skipping the attention and the MLP of each layer, on a log scale
    copying: float = 0.0  # added to the copying of all prompts, on a logit scale

    @classmethod
    def draw(cls, seed: int, layers: int = 16, prospect: str = "hopeful") -> Landscape:
        """Draw a landscape that resembles trained models: outer layers matter most."""
        loss_factor, slopes, (copied, spread) = PROSPECTS[prospect]
        random = np.random.default_rng([seed, list(PROSPECTS).index(prospect)])
        depth = np.linspace(0.0, 1.0, layers)
        shape = 0.35 + 2.5 * (depth - random.uniform(0.35, 0.55)) ** 2
        losses = shape * random.lognormal(0.0, 1.0, (2, layers)) * [[0.7], [1.3]]
        losses *= random.uniform(0.6, 1.2) / losses.sum() * loss_factor
        step = random.uniform(0.01, 0.04)
        head, attention, slope = random.uniform(0.05, 0.12), random.uniform(0.3, 0.45), random.uniform(*slopes)
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
        return cls(seed, profile, losses, float(random.normal(copied, spread)))

    @property
    def layers(self) -> int:
        return int(self.losses.shape[1])

    def tokens(self, item: PromptItem) -> int:
        return TOKENS[hashlib.sha256(f"{self.seed} {item.id}".encode()).digest()[0] % len(TOKENS)]

    def loss(self, mask: DraftPlan) -> float:
        """Return the loss of acceptance of a mask at difficulty 1, on a log scale."""
        return float((np.array([mask.attention, mask.mlp]) * self.losses).sum() ** _RELIEF)

    def draft_seconds(self, config: SpeculativeConfig) -> float:
        """Return the seconds of drafting one token; 0 for prompt lookup."""
        masked = config.method == "layer_skip"
        return self.profile.draft_seconds(DraftPlan.parse(config.mask, self.layers)) if masked else 0.0

    def seconds(self, config: SpeculativeConfig, rounds: Sequence[Round]) -> float:
        drafting, verifying = self.draft_seconds(config), self.profile.verify_seconds
        return sum(drafting * r.drafted + verifying[r.drafted] for r in rounds)

    def speedup(self, config: SpeculativeConfig) -> float:
        """Return the true speedup over plain decoding: the expectation over all possible prompts."""
        return 1.0 if config.method == "none" else self.speedups([config])[0]

    def speedups(self, configs: Sequence[SpeculativeConfig]) -> list[float]:
        """Return the true speedups of configurations of one draft length, without sampling."""
        drafts, accepted = np.array([odds(self, config) for config in configs]).swapaxes(0, 1)  # [configs, categories] each
        plain, with_one = self.profile.verify_seconds[:2]
        each = np.array([[self.draft_seconds(config) + with_one - plain] for config in configs])
        seconds = np.zeros((max(TOKENS) + 1, *drafts.shape))  # expected, by the tokens that are left to decode
        for left in range(1, max(TOKENS) + 1):
            # A round adds one token of the target, so it drafts at most all but one of the tokens that are left.
            limit = min(configs[0].num_speculative_tokens, left - 1)
            later = seconds[left - limit - 1]  # with every drafted token accepted
            for place in reversed(range(limit)):
                later = accepted * later + (1 - accepted) * seconds[left - place - 1]
            seconds[left] = plain + drafts * (limit * each + later) + (1 - drafts) * seconds[left - 1]
        return [float(speedup) for speedup in np.mean(TOKENS) * plain / seconds[list(TOKENS)].mean(axis=(0, 2))]

    def best(self, space: SearchSpace) -> tuple[SpeculativeConfig, float]:
        """Return the best configuration of a space with layer skipping, and its true speedup.

        A draft pass costs the same for all masks that skip as many attentions and as many MLPs, so only those that skip the
        ones with the smallest losses can be the best.
        """
        shortest, longest = space.values("layer_skip", "num_speculative_tokens")
        attention, mlp = (sorted(space.skippable, key=losses.__getitem__) for losses in self.losses)
        counts = itertools.product(range(len(space.skippable) + 1), repeat=2)
        masks = [DraftPlan.of(self.layers, set(attention[:a]), set(mlp[:m])).format() for a, m in counts]
        lengths, found = range(shortest, longest + 1), [(SpeculativeConfig(), 1.0)]
        configs = space.lookups() + [SpeculativeConfig("layer_skip", n, mask=mask) for mask in masks for n in lengths]
        for length in sorted({config.num_speculative_tokens for config in configs}):
            group = [config for config in configs if config.num_speculative_tokens == length]
            found += zip(group, self.speedups(group), strict=True)
        return max(found, key=lambda pair: pair[1])


@functools.lru_cache(4096)  # every prompt needs them
def odds(landscape: Landscape, config: SpeculativeConfig) -> Floats:
    """Return the probabilities that a round drafts anything, and that a drafted token is accepted: ``[2, categories]``.

    Longer n-grams of prompt lookup match less often, and their tokens are accepted more often.
    """
    difficulty, copying = np.array(list(CATEGORIES.values())).T
    if config.method == "layer_skip":
        loss = landscape.loss(DraftPlan.parse(config.mask, landscape.layers))
        return np.array([np.ones_like(difficulty), np.exp(-loss * difficulty)])
    if config.method != "prompt_lookup":
        raise ConfigError(f"method: a simulated decoder has no {config.method}")
    copying = 1 / (1 + np.exp(-landscape.copying - copying))
    longer, first = config.prompt_lookup_min - 1, 0.95 if config.match == "first" else 1.0
    drafts = (0.2 + 0.75 * copying) * 0.85**longer * first
    reliability = 1.5 - 0.5**config.prompt_lookup_max + 0.15 * longer
    return np.array([drafts, 0.95 * copying ** (1 / reliability)])


class Machine:
    """Noisy clock of a simulated machine.

    Timings have independent errors and a common drift, of these standard deviations on a log scale. ``stalls`` is the share
    of them that other work on the machine disturbs.
    """

    def __init__(self, seed: int, noise: float = 0.02, drift: float = 0.05, stalls: float = 0.0) -> None:
        self._random = np.random.default_rng([seed, 11])
        self._noise, self._drift, self._stalls = noise, drift, stalls
        self._drifted = drift * self._random.normal()

    def time(self, seconds: float) -> float:
        """Return the measured time of something that takes ``seconds``."""
        fresh, error = self._random.normal(size=2)
        self._drifted = _PERSISTENCE * self._drifted + math.sqrt(1 - _PERSISTENCE**2) * self._drift * fresh
        stall = _STALL if self._random.random() < self._stalls else 1.0
        return seconds * math.exp(self._drifted + self._noise * error) * stall


@dataclass(frozen=True)
class SimulatedBackend(Backend):
    """A back end that decodes nothing. It may sleep for the seconds of a simulated decoder, which needs no processor."""

    target: Any = field(default=None, metadata={"runtime": True})  # gives the number of layers of a landscape that is drawn
    seed: int = 0  # of that landscape
    pace: float = 0.0  # real seconds of sleep per simulated second
    landscape: Landscape | None = None  # None draws one
    machine: Machine | None = None  # its drift continues from comparison to comparison; None makes one from the seed of each
    name: ClassVar[str] = "simulated"
    exact: ClassVar[bool] = True

    def describe(self) -> dict[str, Any]:
        """Return the seed of the landscape. The pace changes no sample."""
        return {"landscape": self.seed}

    def supports(self, method: str) -> str | None:
        return None if method in ("none", "layer_skip", "prompt_lookup") else "it is not simulated"

    def compare(self, asked: Comparison) -> Iterator[dict[str, Sample]]:
        """Decode every prompt with every configuration, in a new random order."""
        landscape = self.landscape or Landscape.draw(self.seed, self.target.layers)
        machine, order = self.machine or Machine(asked.task.seed), random.Random(asked.task.seed)
        entries = {BASELINE: SpeculativeConfig(), **asked.configs}
        for item in itertools.chain.from_iterable(itertools.repeat(asked.prompts.items, asked.repeats)):
            names = [name for name in entries if name not in asked.without]
            row = {name: _decode(landscape, machine, item, entries[name]) for name in order.sample(names, len(names))}
            time.sleep(self.pace * sum(sample.prefill_seconds + sample.decode_seconds for sample in row.values()))
            yield {name: row[name] for name in names}


def simulated_bench(landscape: Landscape, machine: Machine) -> ModelBench:
    return ModelBench(SimulatedBackend(landscape=landscape, machine=machine), Sampling(), max(TOKENS))


def _decode(landscape: Landscape, machine: Machine, item: PromptItem, config: SpeculativeConfig) -> Sample:
    tokens, rounds = landscape.tokens(item), draw_rounds(landscape, item, config)
    return Sample(
        prompt_id=item.id,
        category=item.category,
        tokens=tokens + 1,  # prefill gives the first token
        decoded_tokens=tokens,
        prefill_seconds=machine.time(PREFILL_STEPS * landscape.profile.verify_seconds[0]),
        decode_seconds=machine.time(landscape.seconds(config, rounds)),
        peak_memory_bytes=2**30,
        stats=DecodeStats(tuple(rounds)),
        lossless=Losslessness(1),
    )


def draw_rounds(landscape: Landscape, item: PromptItem, config: SpeculativeConfig) -> list[Round]:
    """Return the rounds of decoding a prompt: always the same for one configuration, and similar for similar ones.

    Luck belongs to the position of a token in the output, so a better draft is right wherever a worse one is.
    """
    tokens = landscape.tokens(item)
    if config.method == "none":
        return [Round(0, 0, 1)] * tokens
    luck, matched = _draws(landscape.seed, item.id, tokens)
    drafts, accepted_rate = odds(landscape, config)[:, list(CATEGORIES).index(item.category)]
    right, rounds, start = luck < accepted_rate, list[Round](), 0
    while start < tokens:
        drafted = min(config.num_speculative_tokens, tokens - start - 1) if matched[start] < drafts else 0
        wrong = np.flatnonzero(~right[start : start + drafted])
        accepted = int(wrong[0]) if wrong.size else drafted
        rounds.append(Round(drafted, accepted, accepted + 1))
        start += accepted + 1
    return rounds


@functools.lru_cache(4096)
def _draws(seed: int, prompt_id: str, tokens: int) -> Floats:
    """Return ``[2, tokens]`` uniform draws of a prompt, shared by all configurations."""
    words = hashlib.sha256(prompt_id.encode()).digest()[8:16]
    return np.random.default_rng([seed, *words]).random((2, tokens))


class SimulatedPredictor:
    """Predictor of a simulated decoder's speedups as from scans: from the rounds of a few prompts and mismeasured costs.

    The cost of every sub-layer has an error, of a standard deviation on a log scale, so errors of predictions are correlated
    between similar masks. A search that trusts the predictor blindly inherits them.
    """

    screened_together = SCREENED_TOGETHER
    predicted: Collection[str] = ("layer_skip",)

    def __init__(self, landscape: Landscape, lengths: Sequence[int], prompts: PromptSet, error: float = 0.1) -> None:
        true, factors = landscape.profile, np.random.default_rng([landscape.seed, 13]).normal(size=(2, landscape.layers))
        costs = np.array([true.attention_seconds, true.mlp_seconds]) * np.exp(error * factors)
        attention, mlp = (tuple(kind.tolist()) for kind in costs)
        self.layers, self.profile = landscape.layers, replace(true, attention_seconds=attention, mlp_seconds=mlp)
        self._believed = replace(landscape, profile=self.profile)
        self._lengths = range(lengths[0], lengths[1] + 1)
        self._prompts, self.prompts = prompts, frozenset(item.id for item in prompts)

    def agreements(self, masks: Sequence[DraftPlan]) -> list[float]:
        """Return how often the first drafted token of each mask is right on the prompts."""
        difficulty = np.array([CATEGORIES[item.category][0] for item in self._prompts])
        return [float(np.mean(np.exp(-self._believed.loss(mask) * difficulty))) for mask in masks]

    def predict(self, masks: Sequence[DraftPlan]) -> list[Prediction]:
        """Predict each mask with its best draft length."""
        predictions = []
        for mask in masks:
            configs = [SpeculativeConfig("layer_skip", length, mask=mask.format()) for length in self._lengths]
            speedup, best = max((self.speedup(config), place) for place, config in enumerate(configs))
            predictions.append(Prediction(configs[best], speedup))
        return predictions

    def speedup(self, config: SpeculativeConfig) -> float:
        """Predict the speedup of one configuration over plain decoding."""
        rounds = [r for item in self._prompts for r in draw_rounds(self._believed, item, config)]
        plain = sum(map(self._believed.tokens, self._prompts)) * self.profile.verify_seconds[0]
        return plain / self._believed.seconds(config, rounds)

    def can_predict(self, config: SpeculativeConfig) -> bool:
        return config.method in ("layer_skip", "prompt_lookup")
