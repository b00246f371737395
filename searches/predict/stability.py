"""Would other texts, or another seed, have chosen the same mask?

Scanned masks are ranked again and again on resampled continuations: each resample draws as many continuations as there are, with
replacement, and picks the mask that is foretold to be fastest on them. Studies that differ in their seed alone leave what
they chose beside their exports. How alike two choices are is set against what chance gives for masks of their sizes.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from layerskip import SkipMask
from layerskip.files import digest, write_json

_CHOICE = "choice.json"


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


@dataclass(frozen=True)
class SeedStability:
    """How much it owes to the seed.

    Args:
        seeds: how many chose.
        overlap, chance: as in :class:`Stability`, over all pairs of seeds.
    """

    seeds: int
    overlap: float
    chance: float


def stability(
    masks: Sequence[SkipMask], seconds: np.ndarray, baseline: np.ndarray, sublayers: int, resamples: int = 200, seed: int = 0
) -> Stability:
    """Rank masks on resampled continuations.

    Args:
        masks: M of them.
        seconds: ``[M, P]``: what decoding each of P continuations is foretold to take with each mask, at its best.
        baseline: ``[P]``: what plain decoding takes.
        sublayers: how many may be skipped.
    """
    drawn = np.random.default_rng(seed).integers(len(baseline), size=(resamples, len(baseline)))
    speedups = baseline[drawn].sum(1) / seconds[:, drawn].sum(2)
    picks = [masks[best] for best in speedups.argmax(0)]
    chosen = masks[int((baseline.sum() / seconds.sum(1)).argmax())]
    source = random.Random(seed)
    pairs = [(one, other) for one, other in (source.sample(picks, 2) for _ in range(resamples))]
    share = float(np.mean([pick == chosen for pick in picks]))
    return Stability(share, *_alike(pairs, sublayers, source))


def across_seeds(
    folder: Path, settings: Mapping[str, Any], mask: SkipMask, sublayers: int, seed: int = 0
) -> SeedStability | None:
    """Leave a study's choice in its folder, and compare it with those of studies beside it that asked the same.

    Args:
        folder: the study's.
        settings: all that changes what it measured; ``seed`` among them.
        mask: what it chose.
        sublayers: how many may be skipped.

    Returns:
        None where no other seed has chosen yet.
    """
    like = digest({name: value for name, value in settings.items() if name != "seed"})
    write_json(folder / _CHOICE, {"like": like, "seed": settings["seed"], "mask": mask.format(), "layers": mask.layers})
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.parent.glob(f"*/{_CHOICE}"))]
    chosen = {row["seed"]: SkipMask.parse(row["mask"], row["layers"]) for row in rows if row["like"] == like}
    chosen[settings["seed"]] = mask  # whatever a study of another name chose with this seed
    if len(chosen) < 2:
        return None
    pairs = [*itertools.combinations(chosen.values(), 2)]
    repeats = -(-200 // len(pairs))  # few pairs are no measure of chance
    return SeedStability(len(chosen), *_alike(pairs * repeats, sublayers, random.Random(seed)))


def _alike(pairs: Sequence[tuple[SkipMask, SkipMask]], sublayers: int, source: random.Random) -> tuple[float, float]:
    """Mean overlap of pairs, and of pairs of the same sizes drawn at random."""
    sizes = [(one.skipped, other.skipped) for one, other in pairs]
    overlap = float(np.mean([_overlap(_skips(one), _skips(other)) for one, other in pairs]))
    return overlap, float(np.mean([_overlap(*(_drawn(size, sublayers, source) for size in pair)) for pair in sizes]))


def _skips(mask: SkipMask) -> frozenset[int]:
    return frozenset(itertools.compress(itertools.count(), (*mask.attention, *mask.mlp)))


def _drawn(size: int, sublayers: int, source: random.Random) -> frozenset[int]:
    return frozenset(source.sample(range(sublayers), min(size, sublayers)))


def _overlap(one: frozenset[int], other: frozenset[int]) -> float:
    return len(one & other) / len(one | other) if one | other else 1.0
