"""Layer skips that keep the hidden states most similar to the whole model's. A scan offers them as candidate masks.

CLaSp: In-Context Layer Skip for Self-Speculative Decoding (arXiv 2505.24196), algorithm 1: a dynamic programme keeps, layer
by layer and for every number of skipped layers, the hidden states closest to the whole model's, with the layer run or
skipped. Here similarity is the mean cosine over many positions instead of one.
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
    """Find the best mask for every number of skipped layers from 1 to ``most``.

    Args:
        layers: functions that each run one layer on hidden states ``[1, R, H]``.
        states: the whole model's hidden states, before the first layer and after each; one more than ``layers``.
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
                following.append(max(candidates, key=lambda pair: _similarity(pair[0], states[index + 1])))
        best = following
    return [SkipMask.of(len(layers), set(skipped), set(skipped)) for _, skipped in best[1:]]


def _similarity(hidden: Tensor, whole: Tensor) -> float:
    return float(cosine_similarity(hidden.float(), whole.float(), dim=-1).mean())
