"""How do rounds go where every token is accepted with a known chance? Expected counts, without drawing anything.

Rounds of such a decoder form a Markov chain over the tokens left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerskip import SpeculativeConfig, StopRule

Floats = NDArray[np.float64]

TOKENS = (24, 36, 48)  # decoded tokens of a prompt; each as likely
_NO_STOP = 0.0  # a draft is never less sure


@dataclass(frozen=True)
class Chances:
    """How a round goes, for one prompt or many at once.

    Args:
        drafts: the chance that anything is drafted.
        right: that a drafted token is accepted.
        sure: that drafting goes on behind a token.
        both: that it is accepted and drafting goes on.
    """

    drafts: Floats
    right: Floats
    sure: Floats
    both: Floats

    @classmethod
    def of_skipping(cls, loss: Floats, threshold: Floats) -> Chances:
        """A draft that is sure of a token to the degree ``u ** odds``, u uniform, and right as often.

        Args:
            loss: on the log scale of acceptance; positive.
            threshold: that drafting stops below.
        """
        right = np.exp(-loss)
        odds = np.maximum(np.expm1(loss), 1e-12)
        below = threshold ** (1 / odds)  # the u that are less sure
        return cls(np.ones_like(right * below), right + 0 * below, 1 - below, right * (1 - threshold * below))

    @classmethod
    def of_lookup(cls, config: SpeculativeConfig, copying: Floats) -> Chances:
        """Longer n-grams are found less often and continue better, though ever less so."""
        found = (0.2 + 0.75 * copying) * 0.85 ** (config.ngram_min - 1) * (0.95 if config.match == "first" else 1.0)
        reliable = 1.5 - 0.5**config.ngram_max + 0.15 * (config.ngram_min - 1)
        right = 0.95 * copying ** (1 / reliable)
        return cls(found, right, np.ones_like(right), right)


def threshold_of(stop: StopRule) -> float:
    """What a draft stops below. An adaptive threshold is held where it starts, so that its long run is known, too."""
    return _NO_STOP if stop.kind == "length" else stop.threshold


def expected_rounds(chances: Chances, length: int) -> tuple[Floats, Floats]:
    """Expected drafted tokens, and rounds by how many tokens they verify, of a prompt of each length in equal parts.

    Returns:
        ``[...]`` and ``[length + 1, ...]``, over the shape of the chances.
    """
    shape = np.broadcast_shapes(*(part.shape for part in (chances.drafts, chances.right, chances.sure, chances.both)))
    reached = np.array(
        [np.ones(shape), *(np.broadcast_to(chances.drafts * chances.right * chances.both**k, shape) for k in range(length))]
    )
    visits = np.zeros((max(TOKENS) + 1, *shape))
    for tokens in TOKENS:
        visits[tokens] = 1 / len(TOKENS)
    full = np.zeros(shape)
    verified = np.zeros((length + 1, *shape))
    for left in range(max(TOKENS), 0, -1):
        # A round adds one token of the target's own, so it may draft all but one of those left.
        limit = min(length, left - 1)
        for accepted in range(limit):
            visits[left - accepted - 1] += visits[left] * (reached[accepted] - reached[accepted + 1])
        visits[left - limit - 1] += visits[left] * reached[limit]
        if limit == length:
            full += visits[left]
        else:
            verified[: limit + 1] += visits[left] * _drafted(chances, limit, shape)
    verified += full * _drafted(chances, length, shape)
    return np.tensordot(np.arange(length + 1.0), verified, axes=1), verified


def _drafted(chances: Chances, limit: int, shape: tuple[int, ...]) -> Floats:
    """``[limit + 1, ...]``: the chance of each number of drafted tokens in a round that may draft so many."""
    if not limit:
        return np.ones((1, *shape))
    least = np.array([np.broadcast_to(chances.drafts * chances.sure**k, shape) for k in range(limit)])
    return np.concatenate([1 - least[:1], least[:-1] - least[1:], least[-1:]])
