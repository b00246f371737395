"""Which layers can be left out so that what remains ends up closest? A dynamic programme over hidden states.

CLaSp: In-Context Layer Skip for Self-Speculative Decoding (arXiv 2505.24196), algorithm 1: layer by layer and for every
number of skipped layers, keep the hidden states that are most like the whole model's, whether they came about by running the
layer or by skipping it. Here likeness is the mean cosine over many positions, not one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from layerskip.mask import SkipMask


@torch.inference_mode()
def similar_masks(
    layers: Sequence[Callable[[Tensor], Tensor]], states: Sequence[Tensor], skippable: Collection[int], most: int
) -> list[SkipMask]:
    """The programme's answer for every number of skipped layers from 1 to ``most``.

    Args:
        layers: each runs one layer on hidden states ``[1, R, H]``.
        states: the whole model's hidden states: before the first layer, and behind each; one more than ``layers``.
        skippable: the layers that may be skipped.
        most: the most skipped layers.
    """
    best: list[tuple[Tensor, tuple[int, ...]]] = [(states[0], ())]
    for index, layer in enumerate(layers):
        following: list[tuple[Tensor, tuple[int, ...]]] = []
        for count in range(min(len(best) + 1, most + 1)):
            candidates = []
            if count < len(best):
                hidden, skipped = best[count]
                candidates.append((layer(hidden), skipped))
            if count > 0 and index in skippable:
                hidden, skipped = best[count - 1]
                candidates.append((hidden, (*skipped, index)))
            if candidates:
                following.append(max(candidates, key=lambda pair: _likeness(pair[0], states[index + 1])))
        best = following
    chosen = [frozenset(skipped) for _, skipped in best[1:]]
    return [SkipMask.of(len(layers), skipped, skipped) for skipped in chosen]


def _likeness(found: Tensor, whole: Tensor) -> float:
    return float(cosine_similarity(found.float(), whole.float(), dim=-1).mean())
