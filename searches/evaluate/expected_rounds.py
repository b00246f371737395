"""Expected number of rounds and drafted tokens if every drafted token is accepted with a known probability.

The rounds of such a decoder form a Markov chain over the number of tokens that are left to decode, so no sampling is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerskip import SpeculativeConfig, StopRule

Floats = NDArray[np.float64]

TOKENS = (24, 36, 48)  # numbers of decoded tokens of a prompt, equally likely
_NO_STOP = 0.0  # confidence is never lower


@dataclass(frozen=True)
class RoundProbabilities:
    """Probabilities within a round, for one prompt or for arrays of prompts.

    Args:
        drafts: anything is drafted.
        accepted: a drafted token is accepted.
        continues: drafting continues after a token.
        accepted_and_continues: a token is accepted and drafting continues after it.
    """

    drafts: Floats
    accepted: Floats
    continues: Floats
    accepted_and_continues: Floats

    @classmethod
    def of_layer_skip(cls, loss: Floats, threshold: Floats) -> RoundProbabilities:
        """Return the probabilities of a self-draft whose confidence in a token is ``u ** odds`` with uniform ``u``.

        A token is accepted with a probability equal to the confidence.

        Args:
            loss: loss of acceptance on a log scale; positive.
            threshold: confidence below which drafting stops.
        """
        accepted = np.exp(-loss)
        odds = np.maximum(np.expm1(loss), 1e-12)
        below = threshold ** (1 / odds)  # largest u whose confidence is below the threshold
        return cls(np.ones_like(accepted * below), accepted + 0 * below, 1 - below, accepted * (1 - threshold * below))

    @classmethod
    def of_prompt_lookup(cls, config: SpeculativeConfig, copying: Floats) -> RoundProbabilities:
        """Return the probabilities of prompt lookup. Longer n-grams match less often, and their continuations are
        accepted more often, with diminishing gains."""
        drafts = (0.2 + 0.75 * copying) * 0.85 ** (config.ngram_min - 1) * (0.95 if config.match == "first" else 1.0)
        reliability = 1.5 - 0.5**config.ngram_max + 0.15 * (config.ngram_min - 1)
        accepted = 0.95 * copying ** (1 / reliability)
        return cls(drafts, accepted, np.ones_like(accepted), accepted)


def threshold_of(stop: StopRule) -> float:
    """Return the confidence below which a draft stops. An adaptive threshold keeps its start value in the simulation, so
    that the long-run speedup is known."""
    return _NO_STOP if stop.kind == "length" else stop.threshold


def expected_rounds(probabilities: RoundProbabilities, length: int) -> tuple[Floats, Floats]:
    """Return the expected counts of decoding one prompt, averaged over :data:`TOKENS`.

    Args:
        probabilities: probabilities within a round, of any shape ``[...]``.
        length: draft length.

    Returns:
        The number of drafted tokens, ``[...]``, and the number of rounds that verify 0, 1, ..., ``length`` drafted tokens,
        ``[length + 1, ...]``.
    """
    parts = (probabilities.drafts, probabilities.accepted, probabilities.continues, probabilities.accepted_and_continues)
    shape = np.broadcast_shapes(*(part.shape for part in parts))
    first, more = probabilities.drafts * probabilities.accepted, probabilities.accepted_and_continues
    reached = np.array([np.ones(shape), *(np.broadcast_to(first * more**k, shape) for k in range(length))])
    visits = np.zeros((max(TOKENS) + 1, *shape))
    for tokens in TOKENS:
        visits[tokens] = 1 / len(TOKENS)
    full = np.zeros(shape)
    verified = np.zeros((length + 1, *shape))
    for left in range(max(TOKENS), 0, -1):
        # A round adds one token of the target, so it drafts at most all but one of the tokens that are left.
        limit = min(length, left - 1)
        for accepted in range(limit):
            visits[left - accepted - 1] += visits[left] * (reached[accepted] - reached[accepted + 1])
        visits[left - limit - 1] += visits[left] * reached[limit]
        if limit == length:
            full += visits[left]
        else:
            verified[: limit + 1] += visits[left] * _drafted(probabilities, limit, shape)
    verified += full * _drafted(probabilities, length, shape)
    return np.tensordot(np.arange(length + 1.0), verified, axes=1), verified


def _drafted(probabilities: RoundProbabilities, limit: int, shape: tuple[int, ...]) -> Floats:
    """Return the probability of each number of drafted tokens in a round with at most ``limit``: ``[limit + 1, ...]``."""
    if not limit:
        return np.ones((1, *shape))
    at_least = np.array([np.broadcast_to(probabilities.drafts * probabilities.continues**k, shape) for k in range(limit)])
    return np.concatenate([1 - at_least[:1], at_least[:-1] - at_least[1:], at_least[-1:]])
