"""Workloads of simulated prompts: the difficulty of drafting, and the share of the output that copies the prompt."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np

from layerskip.prompts import PromptItem, PromptSet
from searches.evaluate.expected_rounds import TOKENS, Floats

# By category: mean difficulty (log scale) and mean share of the output that copies the prompt (logit scale).
CATEGORIES = {
    "chat": (0.2, -1.5),
    "code": (-0.3, 0.2),
    "extraction": (-0.2, 1.2),
    "reasoning": (0.0, -0.8),
    "summary": (0.1, 0.6),
    "translation": (0.3, -2.0),
}
_DIFFICULTY_SPREAD, _COPYING_SPREAD = 0.35, 0.8  # standard deviations between prompts of one category
_NODES = 9  # of the quadrature over prompts


@dataclass(frozen=True)
class Workload:
    """Demands of one prompt on a simulated decoder.

    Args:
        difficulty: factor on the loss of a skip mask.
        copying: how well the prompt predicts the output, from 0 to 1.
        tokens: number of decoded tokens.
    """

    difficulty: float
    copying: float
    tokens: int

    @classmethod
    def of(cls, item: PromptItem, seed: int, shift: float) -> Workload:
        """Draw the workload of a prompt. The same prompt and seed always give the same workload.

        Args:
            item: the prompt.
            seed: seed of the simulated decoder.
            shift: added to the copying of all prompts, on a logit scale.
        """
        difficulty, copying = CATEGORIES[item.category]
        random = np.random.default_rng([seed, *hashlib.sha256(item.id.encode()).digest()[:8]])
        harder, more_copied = random.normal(size=2)
        return cls(
            float(np.exp(difficulty + _DIFFICULTY_SPREAD * harder)),
            float(_logistic(shift + copying + _COPYING_SPREAD * more_copied)),
            int(random.choice(TOKENS)),
        )


def draw_prompts(count: int, seed: int) -> PromptSet:
    """Draw prompts of all categories at random."""
    random = np.random.default_rng([seed, 7])
    categories = random.choice(list(CATEGORIES), size=count)
    items = (PromptItem(f"{seed}-{i}", str(category), f"prompt {i}") for i, category in enumerate(categories))
    return PromptSet(tuple(items), "planted")


@functools.cache
def population(shift: float) -> tuple[Floats, Floats, Floats]:
    """Return quadrature nodes over all possible prompts: difficulty, copying and weights, each ``[categories * nodes]``.

    All categories are equally frequent, and prompts are normal within one. No drafter depends on both difficulty and
    copying, so one set of nodes serves both.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    categories = np.array(list(CATEGORIES.values()))
    difficulty = np.exp(categories[:, :1] + _DIFFICULTY_SPREAD * nodes).ravel()
    copying = _logistic(shift + categories[:, 1:] + _COPYING_SPREAD * nodes).ravel()
    return difficulty, copying, np.tile(weights / weights.sum(), len(categories)) / len(categories)


def _logistic(value: Floats | float) -> Floats:
    return np.asarray(1 / (1 + np.exp(-value)))
