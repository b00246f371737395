"""Outputs of transformers' own ``generate``, the reference of greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def generated(model: Any, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """The new tokens after a prompt of token ids, at most ``count``; they end at an end token of the model."""
    ids = torch.tensor([list(prompt)], device=None if model.device.type == "meta" else model.device)  # if it is offloaded
    options = {"do_sample": False, "max_new_tokens": count} | options
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
    return tokens
