"""Dependence of the choice of a mask on the prompts and on the seed.

Scanned masks are ranked on many resamples of the continuations: each draws as many continuations as there are, with
replacement, and picks the mask with the greatest predicted speedup on them. Studies that differ only in their seed leave
their choices next to their exports. The overlap of two choices is compared with that of random masks of the same sizes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from layerskip import SkipMask
from layerskip.files import digest, read_json, write_json

_CHOICE = "choice.json"
_MIN_PAIRS = 200  # random pairs; fewer estimate chance poorly


@dataclass(frozen=True)
class Stability:
    """Dependence of the choice of a mask on the prompts.

    Args:
        share: of the resamples that pick the mask that all prompts pick.
        overlap: mean Jaccard index of the skipped sub-layers of two picks; 1.0 for two that skip nothing.
        chance: the same for random masks of the same sizes.
    """

    share: float
    overlap: float
    chance: float


@dataclass(frozen=True)
class SeedStability:
    """Dependence of the choice of a mask on the seed, as in :class:`Stability`, over all pairs of a number of seeds."""

    seeds: int
    overlap: float
    chance: float


def stability(
    masks: Sequence[SkipMask], seconds: np.ndarray, baseline: np.ndarray, sublayers: int, resamples: int = 200
) -> Stability:
    """Rank masks on resampled continuations.

    Args:
        seconds: ``[M, P]``, the predicted seconds of each mask at its best for each of P continuations.
        baseline: ``[P]``, the seconds of plain decoding.
    """
    drawn = np.random.default_rng(0).integers(len(baseline), size=(resamples, len(baseline)))
    speedups = baseline[drawn].sum(1) / seconds[:, drawn].sum(2)
    picks = [masks[best] for best in speedups.argmax(0)]
    chosen = masks[int((baseline.sum() / seconds.sum(1)).argmax())]
    source = random.Random(0)
    pairs = [(one, other) for one, other in (source.sample(picks, 2) for _ in range(resamples))]
    share = float(np.mean([pick == chosen for pick in picks]))
    return Stability(share, *_overlaps(pairs, sublayers, source))


def seed_stability(folder: Path, settings: Mapping[str, Any], mask: SkipMask, sublayers: int) -> SeedStability | None:
    """Store a study's choice in its folder, and compare it with those of studies that differ only in their seed.

    Args:
        folder: of the study.
        settings: everything that changes its measurements, ``seed`` among them.

    Returns:
        None if no other seed has chosen yet.
    """
    like = digest({name: value for name, value in settings.items() if name != "seed"})
    write_json(folder / _CHOICE, {"like": like, "seed": settings["seed"], "mask": mask.format(), "layers": mask.layers})
    rows = filter(None, map(read_json, sorted(folder.parent.glob(f"*/{_CHOICE}"))))
    chosen = {row["seed"]: SkipMask.parse(row["mask"], row["layers"]) for row in rows if row["like"] == like}
    chosen[settings["seed"]] = mask  # a study of another name may have stored another choice with this seed
    if len(chosen) < 2:
        return None
    pairs = [*itertools.combinations(chosen.values(), 2)]
    repeats = -(-_MIN_PAIRS // len(pairs))
    return SeedStability(len(chosen), *_overlaps(pairs * repeats, sublayers, random.Random(0)))


def _overlaps(pairs: Sequence[tuple[SkipMask, SkipMask]], sublayers: int, source: random.Random) -> tuple[float, float]:
    """Return the mean overlap of pairs, and that of random pairs of the same sizes."""
    sizes = [(one.skipped, other.skipped) for one, other in pairs]
    overlap = float(np.mean([_jaccard(_skips(one), _skips(other)) for one, other in pairs]))
    return overlap, float(np.mean([_jaccard(*(_draw(size, sublayers, source) for size in pair)) for pair in sizes]))


def _skips(mask: SkipMask) -> frozenset[int]:
    return frozenset(itertools.compress(itertools.count(), (*mask.attention, *mask.mlp)))


def _draw(size: int, sublayers: int, source: random.Random) -> frozenset[int]:
    return frozenset(source.sample(range(sublayers), min(size, sublayers)))


def _jaccard(one: frozenset[int], other: frozenset[int]) -> float:
    return len(one & other) / len(one | other) if one | other else 1.0
