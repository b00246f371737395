"""What do prompts ask of a planted decoder? Workload of all kinds: how hard to draft, and how much of it copies the prompt."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np

from layerskip.prompts import PromptItem, PromptSet
from searches.evaluate.expected_rounds import TOKENS, Floats

# Kind of work: how difficult for a draft, on a log scale, and how much of its output copies the prompt, on a logit scale.
CATEGORIES = {
    "chat": (0.2, -1.5),
    "code": (-0.3, 0.2),
    "extraction": (-0.2, 1.2),
    "reasoning": (0.0, -0.8),
    "summary": (0.1, 0.6),
    "translation": (0.3, -2.0),
}
_DIFFICULTY_SPREAD, _COPYING_SPREAD = 0.35, 0.8  # standard deviations between prompts of one kind
_NODES = 9  # of the quadrature over prompts


@dataclass(frozen=True)
class Workload:
    """What a prompt asks of a decoder.

    Args:
        difficulty: multiplies what a mask loses.
        copying: from 0 to 1; how well the prompt foretells the output.
        tokens: decoded ones.
    """

    difficulty: float
    copying: float
    tokens: int

    @classmethod
    def of(cls, item: PromptItem, seed: int, shift: float) -> Workload:
        """What a prompt asks; the same prompt always asks the same.

        Args:
            item: the prompt.
            seed: of the decoder.
            shift: of how much outputs copy their prompts, on a logit scale.
        """
        difficulty, copying = CATEGORIES[item.category]
        random = np.random.default_rng([seed, *hashlib.sha256(item.id.encode()).digest()[:8]])
        one, other = random.normal(size=2)
        return cls(
            float(np.exp(difficulty + _DIFFICULTY_SPREAD * one)),
            float(_logistic(shift + copying + _COPYING_SPREAD * other)),
            int(random.choice(TOKENS)),
        )


def draw_prompts(count: int, seed: int) -> PromptSet:
    """Prompts of all kinds of work, as they come."""
    random = np.random.default_rng([seed, 7])
    kinds = random.choice(list(CATEGORIES), size=count)
    return PromptSet(tuple(PromptItem(f"{seed}-{i}", str(kind), f"prompt {i}") for i, kind in enumerate(kinds)), "planted")


@functools.cache
def population(shift: float) -> tuple[Floats, Floats, Floats]:
    """Nodes of difficulty and copying, and their weights: every kind of work as often, normal within.

    No drafter feels both difficulty and copying, so that both may run over the same nodes.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    kinds = np.array(list(CATEGORIES.values()))
    difficulty = np.exp(kinds[:, :1] + _DIFFICULTY_SPREAD * nodes).ravel()
    copying = _logistic(shift + kinds[:, 1:] + _COPYING_SPREAD * nodes).ravel()
    return difficulty, copying, np.tile(weights / weights.sum(), len(kinds)) / len(kinds)


def _logistic(value: Floats | float) -> Floats:
    return np.asarray(1 / (1 + np.exp(-value)))
