"""Logits and outputs of transformers' own ``generate``, the reference of distributions and of greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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


def generated(model: Any, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """The new tokens after a prompt of token ids, at most ``count``; they end at an end token of the model."""
    ids = torch.tensor([list(prompt)], device=None if model.device.type == "meta" else model.device)  # if it is offloaded
    options = {"do_sample": False, "max_new_tokens": count} | options
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
    return tokens
