"""Landscape of a simulated decoder: known costs and acceptance of every skip mask, and the long-run speedups they give.

Only a known optimum shows whether a search finds the best configuration. The draft of a mask has a random confidence in each
token, and is right with that probability. Confidence falls with the losses of the skipped sub-layers and with the difficulty
of the prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from layerskip import ConfigError, SkipMask, SpeculativeConfig, StopRule
from layerskip.costs.cost_model import CostProfile
from layerskip.prompts import PromptItem
from searches.evaluate.expected_rounds import TOKENS, Floats, RoundProbabilities, expected_rounds, threshold_of
from searches.evaluate.workload import Workload, population
from searches.space.search_space import SearchSpace

_GRID = np.linspace(0.0, 1.0, 160) ** 2 * 8.0  # losses at which counts are tabulated, denser where acceptance is high

Prospect = Literal["hopeful", "hopeless", "close"]
PROSPECTS: tuple[Prospect, ...] = get_args(Prospect)
# Factor on losses; range of the cost of verifying one more token, in steps; mean and deviation of the copying of outputs.
_PROSPECTS = {
    "hopeful": (1.0, (0.01, 0.04), (-1.3, 0.6)),
    "hopeless": (8.0, (0.3, 0.4), (-4.0, 0.0)),
    "close": (2.0, (0.12, 0.2), (-3.0, 0.2)),
}


@dataclass(frozen=True, eq=False)
class Landscape:
    """Costs and acceptance of a simulated decoder.

    Args:
        seed: seed of the workloads of its prompts.
        profile: cost of every part.
        attention_losses: loss of acceptance by skipping the attention of each layer, on a log scale.
        mlp_losses: loss of acceptance by skipping the MLP of each layer, on a log scale.
        relief: how much less than the sum of both losses it costs to skip two neighbours, relative to the geometric mean of
            their losses. Entry i applies to the sub-layers of layer i with each other, and with those of layer i - 1.
        copying: added to the copying of all prompts, on a logit scale.
    """

    seed: int
    profile: CostProfile
    attention_losses: tuple[float, ...]
    mlp_losses: tuple[float, ...]
    relief: tuple[float, ...]
    copying: float = 0.0

    @classmethod
    def draw(cls, seed: int, layers: int = 16, prospect: Prospect = "hopeful") -> Landscape:
        """Draw a landscape that resembles trained models: outer layers matter most, and early runs lose little if skipped.

        Args:
            seed: seed of the draw.
            layers: number of layers of the target.
            prospect: ``hopeful``: something beats plain decoding. ``close``: much comes near plain decoding, and little or
                nothing beats it. ``hopeless``: nothing beats it, as drafts are mostly wrong and verification is expensive.
        """
        loss_factor, slopes, (copied, spread) = _PROSPECTS[prospect]
        random = np.random.default_rng([seed, PROSPECTS.index(prospect)])
        depth = np.linspace(0.0, 1.0, layers)
        shape = 0.35 + 2.5 * (depth - random.uniform(0.35, 0.55)) ** 2
        losses = shape * random.lognormal(0.0, 1.0, (2, layers)) * [[0.7], [1.3]]
        losses *= random.uniform(0.6, 1.2) / losses.sum() * loss_factor
        step = random.uniform(0.01, 0.04)
        head, blocks, attention = random.uniform(0.05, 0.12), 0.06, random.uniform(0.3, 0.45)
        slope = random.uniform(*slopes)
        profile = CostProfile(
            context=128,
            head_seconds=step * head,
            block_seconds=step * blocks / layers,
            attention_seconds=(step * (1 - head - blocks) * attention / layers,) * layers,
            mlp_seconds=(step * (1 - head - blocks) * (1 - attention) / layers,) * layers,
            confidence_seconds=step * 0.01,
            round_seconds=0.0,
            verify_seconds=tuple(step * (1 + slope * drafted) for drafted in range(17)),
        )
        relief = tuple(float(value) for value in 0.3 - 0.2 * depth)
        copying = random.normal(copied, spread)
        return cls(seed, profile, tuple(losses[0].tolist()), tuple(losses[1].tolist()), relief, float(copying))

    @property
    def layers(self) -> int:
        """Number of layers of the target."""
        return len(self.attention_losses)

    def work(self, item: PromptItem) -> Workload:
        """Return the workload of a prompt, always the same for the same prompt."""
        return Workload.of(item, self.seed, self.copying)

    def losses(self, masks: Sequence[SkipMask]) -> Floats:
        """Return the loss of acceptance of each mask on a prompt of difficulty 1, on a log scale: ``[masks]``."""
        attention, mlp = _flags(masks)
        attention_losses, mlp_losses = np.array(self.attention_losses), np.array(self.mlp_losses)
        relief = np.array(self.relief)
        losses = attention @ attention_losses + mlp @ mlp_losses
        losses = losses - (attention * mlp) @ (relief * np.sqrt(attention_losses * mlp_losses))
        for flags, each in ((attention, attention_losses), (mlp, mlp_losses)):
            losses -= (flags[:, :-1] * flags[:, 1:]) @ (relief[1:] * np.sqrt(each[:-1] * each[1:]))
        return np.asarray(losses)

    def probabilities(self, config: SpeculativeConfig, difficulty: Floats, copying: Floats) -> RoundProbabilities:
        """Return the probabilities within a round of a configuration, for prompts of some difficulty and copying.

        Raises:
            ConfigError: the drafter is neither layer skipping nor prompt lookup.
        """
        if config.kind == "layer_skip":
            loss = _loss(self, config.mask)
            return RoundProbabilities.of_layer_skip(loss * difficulty, np.array(threshold_of(config.stop)))
        if config.kind == "prompt_lookup":
            return RoundProbabilities.of_prompt_lookup(config, copying)
        raise ConfigError(f"kind: a simulated decoder has no {config.kind}")

    def draft_seconds(self, config: SpeculativeConfig) -> float:
        """Return the seconds of drafting one token; 0 for prompt lookup."""
        if config.kind != "layer_skip":
            return 0.0
        confidence = self.profile.confidence_seconds if config.stop.kind != "length" else 0.0
        return self.profile.draft_seconds(SkipMask.parse(config.mask, self.layers)) + confidence

    def speedup(self, config: SpeculativeConfig) -> float:
        """Return the true speedup over plain decoding: the expectation over all possible prompts."""
        if config.kind == "none":
            return 1.0
        difficulty, copying, weights = population(self.copying)
        drafted, verified = expected_rounds(self.probabilities(config, difficulty, copying), config.draft_length)
        verifying = np.array(self.profile.verify_seconds[: config.draft_length + 1]) @ verified
        return float(self._plain_seconds / (weights @ (drafted * self.draft_seconds(config) + verifying)))

    def best_drafts(self, masks: Sequence[SkipMask], space: SearchSpace) -> list[tuple[SpeculativeConfig, float]]:
        """Return each mask with its best draft length and stop rule of a space, and the true speedup by interpolation."""
        lengths = range(space.skip_length[0], space.skip_length[1] + 1)
        stops = _stops(tuple(space.stops))
        losses = np.clip(self.losses(masks), _GRID[0], _GRID[-1])
        low = np.clip(np.searchsorted(_GRID, losses, side="right") - 1, 0, len(_GRID) - 2)
        share = ((losses - _GRID[low]) / (_GRID[low + 1] - _GRID[low]))[:, None]
        confidence = np.array([0.0 if stop.kind == "length" else self.profile.confidence_seconds for stop in stops])
        each = self._draft_seconds(masks)[:, None] + confidence
        seconds = []
        for length in lengths:
            drafted, verified = _tables(length, stops)
            verifying = np.tensordot(np.array(self.profile.verify_seconds[: length + 1]), verified, axes=1)
            counts, times = (table[low] * (1 - share) + table[low + 1] * share for table in (drafted, verifying))
            seconds.append(counts * each + times)
        table = np.array(seconds)  # [lengths, masks, stops]
        best = []
        for index, mask in enumerate(masks):
            length, stop = divmod(int(np.argmin(table[:, index])), len(stops))
            config = SpeculativeConfig("layer_skip", lengths[length], mask=mask.format(), stop=stops[stop])
            best.append((config, float(self._plain_seconds / table[length, index, stop])))
        return best

    def best(self, space: SearchSpace) -> tuple[SpeculativeConfig, float]:
        """Return the best configuration of a space and its true speedup.

        Every prompt lookup is tried. Masks are improved by hill climbing from the empty mask and from the best contiguous
        runs: one or two sub-layers at a time, with the best draft length and stop rule, until no step helps.
        """
        candidates = [(SpeculativeConfig(), 1.0)]
        if "prompt_lookup" in space.available_kinds:
            candidates += [(config, self.speedup(config)) for config in space.lookups()]
        if "layer_skip" in space.available_kinds:
            runs = _contiguous_masks(space)
            ranked = sorted(zip(runs, self.best_drafts(runs, space), strict=True), key=lambda pair: -pair[1][1])
            for start in (SkipMask.none(self.layers), *(mask for mask, _ in ranked[:3])):
                config = self._climb(start, space)
                candidates.append((config, self.speedup(config)))
        return max(candidates, key=lambda pair: pair[1])

    def _climb(self, mask: SkipMask, space: SearchSpace) -> SpeculativeConfig:
        ((config, speedup),) = self.best_drafts([mask], space)
        while True:
            near = _neighbours(mask, space)
            drafts = self.best_drafts(near, space)
            step = max(range(len(near)), key=lambda index: drafts[index][1])
            if drafts[step][1] <= speedup * (1 + 1e-9):
                return config
            mask, (config, speedup) = near[step], drafts[step]

    def _draft_seconds(self, masks: Sequence[SkipMask]) -> Floats:
        """Return :meth:`CostProfile.draft_seconds` of many masks at once: ``[masks]``."""
        attention, mlp = _flags(masks)
        blocks = (1 - attention * mlp).sum(axis=1)
        kept = (1 - attention) @ np.array(self.profile.attention_seconds) + (1 - mlp) @ np.array(self.profile.mlp_seconds)
        return np.asarray(self.profile.head_seconds + self.profile.block_seconds * blocks + kept)

    @property
    def _plain_seconds(self) -> float:
        return float(np.mean(TOKENS)) * self.profile.verify_seconds[0]


@functools.lru_cache(1024)
def _loss(landscape: Landscape, mask: str) -> float:
    """Return the loss of one mask; cached, as every prompt needs it."""
    return float(landscape.losses([SkipMask.parse(mask, landscape.layers)])[0])


def _contiguous_masks(space: SearchSpace) -> list[SkipMask]:
    """Return every contiguous run of layers, of attention only and of MLPs only, from length 1 on."""
    first, last = space.skippable[0], space.skippable[-1]
    runs = [set(range(start, end + 1)) for start in range(first, last + 1) for end in range(start, last + 1)]
    return [
        SkipMask.of(space.layers, run if attention else set(), run if mlp else set())
        for attention, mlp in ((True, True), (True, False), (False, True))
        for run in runs
    ]


def _neighbours(mask: SkipMask, space: SearchSpace) -> list[SkipMask]:
    """Return the masks that differ in one or two sub-layers."""
    bits = [(part, layer) for part in (0, 1) for layer in space.skippable]
    steps = [(bit,) for bit in bits] + [(bits[i], bits[j]) for i in range(len(bits)) for j in range(i)]
    neighbours = []
    for step in steps:
        flags = [list(mask.attention), list(mask.mlp)]
        for part, layer in step:
            flags[part][layer] = not flags[part][layer]
        neighbours.append(SkipMask(tuple(flags[0]), tuple(flags[1])))
    return neighbours


def _stops(kinds: tuple[str, ...]) -> tuple[StopRule, ...]:
    """Return the stop rules that a space can propose. Adaptive thresholds stay constant here, so they equal thresholds."""
    fixed = [StopRule()] if "length" in kinds else []
    kind = next((kind for kind in ("threshold", "adaptive") if kind in kinds), None)
    return (*fixed, *(StopRule(kind, round(0.1 + 0.05 * step, 2)) for step in range(17) if kind is not None))


@functools.cache
def _tables(length: int, stops: tuple[StopRule, ...]) -> tuple[Floats, Floats]:
    """Return the expected counts of :func:`expected_rounds` by loss, averaged over prompts; the same for all landscapes.

    Returns:
        ``[losses, stops]`` and ``[length + 1, losses, stops]``.
    """
    difficulty, _, weights = population(0.0)
    loss = np.maximum(_GRID, 1e-9)[:, None, None] * difficulty[None, None, :]
    thresholds = np.array([threshold_of(stop) for stop in stops])[None, :, None]
    drafted, verified = expected_rounds(RoundProbabilities.of_layer_skip(loss, thresholds), length)
    return drafted @ weights, verified @ weights


def _flags(masks: Sequence[SkipMask]) -> tuple[Floats, Floats]:
    return np.array([mask.attention for mask in masks], float), np.array([mask.mlp for mask in masks], float)
