"""What if everything about a decoder were known? Planted losses, costs and prompts, and the long-run speedups they give.

Only a truth that was planted can tell whether a search finds it. The draft of a mask is sure of each token to a degree that
is random, and right as often as it is sure; how sure falls with what the skipped sub-layers lose and with how difficult the
prompt is.
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
from searches.evaluate.expected_rounds import TOKENS, Chances, Floats, expected_rounds, threshold_of
from searches.evaluate.workload import Workload, population
from searches.space.search_space import SearchSpace

_GRID = np.linspace(0.0, 1.0, 160) ** 2 * 8.0  # losses of tabulated counts, close where acceptance is high

Prospect = Literal["hopeful", "hopeless", "close"]
PROSPECTS: tuple[Prospect, ...] = get_args(Prospect)
# What losses are multiplied by; a further token's share of a step; how much outputs copy, and how that differs.
_PROSPECTS = {
    "hopeful": (1.0, (0.01, 0.04), (-1.3, 0.6)),
    "hopeless": (8.0, (0.3, 0.4), (-4.0, 0.0)),
    "close": (2.0, (0.12, 0.2), (-3.0, 0.2)),
}


@dataclass(frozen=True, eq=False)
class Landscape:
    """A decoder of which everything is known.

    Args:
        seed: names it, and draws its prompts.
        profile: what everything costs.
        attention_losses: what skipping each layer's attention takes off acceptance, on a log scale.
        mlp_losses: the same of each MLP.
        relief: entry i: the share that skipping two neighbours, the second of them in layer i, loses less than the two
            by themselves; neighbours are the same sub-layer of the layer before, and the other one of the same layer.
        copying: shifts how much outputs copy their prompts.
    """

    seed: int
    profile: CostProfile
    attention_losses: tuple[float, ...]
    mlp_losses: tuple[float, ...]
    relief: tuple[float, ...]
    copying: float = 0.0

    @classmethod
    def draw(cls, seed: int, layers: int = 16, prospect: Prospect = "hopeful") -> Landscape:
        """A landscape like those of trained models: first and last layers matter most, early runs are cheap to skip.

        Args:
            seed: of the draw.
            layers: of the target.
            prospect: whether something beats plain decoding, or much comes near and little or nothing gets past it, or
                drafts are mostly wrong and blocks of tokens dear to verify, so that nothing does.
        """
        harm, slopes, (copied, spread) = _PROSPECTS[prospect]
        random = np.random.default_rng([seed, PROSPECTS.index(prospect)])
        depth = np.linspace(0.0, 1.0, layers)
        shape = 0.35 + 2.5 * (depth - random.uniform(0.35, 0.55)) ** 2
        losses = shape * random.lognormal(0.0, 1.0, (2, layers)) * [[0.7], [1.3]]
        losses *= random.uniform(0.6, 1.2) / losses.sum() * harm
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
        """Of the target."""
        return len(self.attention_losses)

    def work(self, item: PromptItem) -> Workload:
        """What a prompt asks; the same prompt always asks the same."""
        return Workload.of(item, self.seed, self.copying)

    def losses(self, masks: Sequence[SkipMask]) -> Floats:
        """What each mask takes off acceptance, on a log scale, on a prompt of difficulty 1."""
        attention, mlp = _flags(masks)
        one, other = np.array(self.attention_losses), np.array(self.mlp_losses)
        relief = np.array(self.relief)
        found = attention @ one + mlp @ other - (attention * mlp) @ (relief * np.sqrt(one * other))
        for flags, each in ((attention, one), (mlp, other)):
            found -= (flags[:, :-1] * flags[:, 1:]) @ (relief[1:] * np.sqrt(each[:-1] * each[1:]))
        return np.asarray(found)

    def chances(self, config: SpeculativeConfig, difficulty: Floats, copying: Floats) -> Chances:
        """How rounds of a drafting configuration go on prompts.

        Raises:
            ConfigError: there are no draft models here.
        """
        if config.kind == "layer_skip":
            loss = _loss(self, config.mask)
            return Chances.of_skipping(loss * difficulty, np.array(threshold_of(config.stop)))
        if config.kind == "prompt_lookup":
            return Chances.of_lookup(config, copying)
        raise ConfigError(f"kind: a planted decoder has no {config.kind}")

    def draft_seconds(self, config: SpeculativeConfig) -> float:
        """What a drafted token takes; looking one up takes nothing."""
        if config.kind != "layer_skip":
            return 0.0
        sure = self.profile.confidence_seconds if config.stop.kind != "length" else 0.0
        return self.profile.draft_seconds(SkipMask.parse(config.mask, self.layers)) + sure

    def speedup(self, config: SpeculativeConfig) -> float:
        """The true one: over all prompts that there could be."""
        if config.kind == "none":
            return 1.0
        difficulty, copying, weights = population(self.copying)
        drafted, verified = expected_rounds(self.chances(config, difficulty, copying), config.draft_length)
        verifying = np.array(self.profile.verify_seconds[: config.draft_length + 1]) @ verified
        return float(self._plain_seconds / (weights @ (drafted * self.draft_seconds(config) + verifying)))

    def agreement(self, mask: SkipMask) -> float:
        """How often the mask's first drafted token is right."""
        difficulty, _, weights = population(self.copying)
        return float(weights @ np.exp(-self.losses([mask])[0] * difficulty))

    def best_drafts(
        self, masks: Sequence[SkipMask], space: SearchSpace, stops: tuple[StopRule, ...] | None = None
    ) -> list[tuple[SpeculativeConfig, float]]:
        """Each mask with the draft length and stop rule that suit it best, and its true speedup by interpolation.

        Args:
            masks: any.
            space: the draft lengths, and the stop rules where no others are given.
            stops: the stop rules.
        """
        lengths = range(space.skip_length[0], space.skip_length[1] + 1)
        stops = stops or _stops(tuple(space.stops))
        losses = np.clip(self.losses(masks), _GRID[0], _GRID[-1])
        low = np.clip(np.searchsorted(_GRID, losses, side="right") - 1, 0, len(_GRID) - 2)
        share = ((losses - _GRID[low]) / (_GRID[low + 1] - _GRID[low]))[:, None]
        looked = np.array([0.0 if stop.kind == "length" else self.profile.confidence_seconds for stop in stops])
        each = self._draft_seconds(masks)[:, None] + looked
        seconds = []
        for length in lengths:
            drafted, verified = _tables(length, stops)
            verifying = np.tensordot(np.array(self.profile.verify_seconds[: length + 1]), verified, axes=1)
            counts, times = (table[low] * (1 - share) + table[low + 1] * share for table in (drafted, verifying))
            seconds.append(counts * each + times)
        table = np.array(seconds)  # [lengths, masks, stops]
        found = []
        for index, mask in enumerate(masks):
            length, stop = divmod(int(np.argmin(table[:, index])), len(stops))
            config = SpeculativeConfig("layer_skip", lengths[length], mask=mask.format(), stop=stops[stop])
            found.append((config, float(self._plain_seconds / table[length, index, stop])))
        return found

    def best(self, space: SearchSpace) -> tuple[SpeculativeConfig, float]:
        """The truly best configuration of a space.

        Every lookup is tried. Masks are improved one or two sub-layers at a time from nothing skipped and from the best
        contiguous runs, with the best draft length and stop rule for each, until none of those steps helps.
        """
        found = [(SpeculativeConfig(), 1.0)]
        if "prompt_lookup" in space.arms:
            found += [(config, self.speedup(config)) for config in space.lookups()]
        if "layer_skip" in space.arms:
            runs = _contiguous_masks(space)
            ranked = sorted(zip(runs, self.best_drafts(runs, space), strict=True), key=lambda pair: -pair[1][1])
            for start in (SkipMask.none(self.layers), *(mask for mask, _ in ranked[:3])):
                config = self._climb(start, space)
                found.append((config, self.speedup(config)))
        return max(found, key=lambda pair: pair[1])

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
        """As the profile's own, for many masks at once."""
        attention, mlp = _flags(masks)
        blocks = (1 - attention * mlp).sum(axis=1)
        kept = (1 - attention) @ np.array(self.profile.attention_seconds) + (1 - mlp) @ np.array(self.profile.mlp_seconds)
        return np.asarray(self.profile.head_seconds + self.profile.block_seconds * blocks + kept)

    @property
    def _plain_seconds(self) -> float:
        return float(np.mean(TOKENS)) * self.profile.verify_seconds[0]


@functools.lru_cache(1024)
def _loss(landscape: Landscape, mask: str) -> float:
    """Of one mask, which is asked about prompt by prompt."""
    return float(landscape.losses([SkipMask.parse(mask, landscape.layers)])[0])


def _contiguous_masks(space: SearchSpace) -> list[SkipMask]:
    """Every run of layers, of attention alone and of MLPs alone; single skips are the shortest."""
    first, last = space.skippable[0], space.skippable[-1]
    runs = [set(range(start, end + 1)) for start in range(first, last + 1) for end in range(start, last + 1)]
    return [
        SkipMask.of(space.layers, run if attention else set(), run if mlp else set())
        for attention, mlp in ((True, True), (True, False), (False, True))
        for run in runs
    ]


def _neighbours(mask: SkipMask, space: SearchSpace) -> list[SkipMask]:
    """The masks that differ in one or two sub-layers."""
    bits = [(part, layer) for part in (0, 1) for layer in space.skippable]
    steps = [(bit,) for bit in bits] + [(bits[i], bits[j]) for i in range(len(bits)) for j in range(i)]
    found = []
    for step in steps:
        flags = [list(mask.attention), list(mask.mlp)]
        for part, layer in step:
            flags[part][layer] = not flags[part][layer]
        found.append(SkipMask(tuple(flags[0]), tuple(flags[1])))
    return found


def _stops(kinds: tuple[str, ...]) -> tuple[StopRule, ...]:
    """The stop rules that a space can propose; the adaptive ones are held, so they are the thresholds once more."""
    found = [StopRule()] if "length" in kinds else []
    held = next((kind for kind in ("threshold", "adaptive") if kind in kinds), None)
    return (*found, *(StopRule(held, round(0.1 + 0.05 * step, 2)) for step in range(17) if held is not None))


@functools.cache
def _tables(length: int, stops: tuple[StopRule, ...]) -> tuple[Floats, Floats]:
    """Expected counts by loss, ``[losses, stops]`` and ``[length + 1, losses, stops]``; no landscape changes them."""
    difficulty, _, weights = population(0.0)
    loss = np.maximum(_GRID, 1e-9)[:, None, None] * difficulty[None, None, :]
    thresholds = np.array([threshold_of(stop) for stop in stops])[None, :, None]
    drafted, verified = expected_rounds(Chances.of_skipping(loss, thresholds), length)
    return drafted @ weights, verified @ weights


def _flags(masks: Sequence[SkipMask]) -> tuple[Floats, Floats]:
    return np.array([mask.attention for mask in masks], float), np.array([mask.mlp for mask in masks], float)
