"""Would other texts have chosen the same mask? Scanned masks ranked again and again on resampled passages.

Each resample draws as many passages as there are, with replacement, and picks the mask that is foretold to be fastest on
them. How alike two such picks are is set against what chance gives for masks of their sizes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layerskip import SkipMask


@dataclass(frozen=True)
class Stability:
    """How much a choice of mask owes to the prompts.

    Args:
        share: resamples that picked the mask that all prompts together pick.
        overlap: mean Jaccard index of the skipped sub-layers of two picks; 1.0 for two that skip nothing.
        chance: the same for masks of the same sizes drawn at random.
    """

    share: float
    overlap: float
    chance: float


def stability(
    masks: Sequence[SkipMask], seconds: np.ndarray, baseline: np.ndarray, sublayers: int, resamples: int = 200, seed: int = 0
) -> Stability:
    """Rank masks on resampled passages.

    Args:
        masks: M of them.
        seconds: ``[M, P]``: what decoding each of P passages is foretold to take with each mask, at its best.
        baseline: ``[P]``: what plain decoding takes.
        sublayers: how many may be skipped.
    """
    drawn = np.random.default_rng(seed).integers(len(baseline), size=(resamples, len(baseline)))
    speedups = baseline[drawn].sum(1) / seconds[:, drawn].sum(2)
    picks = [masks[best] for best in speedups.argmax(0)]
    chosen = masks[int((baseline.sum() / seconds.sum(1)).argmax())]
    source = random.Random(seed)
    pairs = [tuple(source.sample(picks, 2)) for _ in range(resamples)]
    sizes = [(one.skipped, other.skipped) for one, other in pairs]
    return Stability(
        share=float(np.mean([pick == chosen for pick in picks])),
        overlap=float(np.mean([_overlap(_skips(one), _skips(other)) for one, other in pairs])),
        chance=float(np.mean([_overlap(*(_drawn(size, sublayers, source) for size in pair)) for pair in sizes])),
    )


def _skips(mask: SkipMask) -> frozenset[int]:
    return frozenset(itertools.compress(itertools.count(), (*mask.attention, *mask.mlp)))


def _drawn(size: int, sublayers: int, source: random.Random) -> frozenset[int]:
    return frozenset(source.sample(range(sublayers), min(size, sublayers)))


def _overlap(one: frozenset[int], other: frozenset[int]) -> float:
    return len(one & other) / len(one | other) if one | other else 1.0
