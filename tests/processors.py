"""Logits after the processors of transformers' ``generate``: the reference for every distribution in these tests."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from layerskip.decoding.sampling import Sampling


def processed_scores(prefix: Sequence[int], logits: Tensor, sampling: Sampling) -> Tensor:
    """``[V]`` float32 scores after a prefix, in generate's order: penalty, temperature, top-k, top-p, min-p."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature not in (0.0, 1.0):
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.temperature > 0 and sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.temperature > 0 and sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.temperature > 0 and sampling.min_p > 0.0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return processors(tensor([list(prefix)], device=logits.device), logits.float()[None])[0]


def processed_probs(prefix: Sequence[int], logits: Tensor, sampling: Sampling) -> Tensor:
    """``[V]`` float32: the softmax of :func:`processed_scores`."""
    return processed_scores(prefix, logits, sampling).softmax(-1)
