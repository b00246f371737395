"""The exact distribution of sampled outputs of a toy target: every continuation and its probability."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from layerskip.decoding.sampling import Sampling
from tests.accelerator import DEVICE
from tests.processors import processed_probs


def exact_law(
    model: PreTrainedModel, prompt: Sequence[int], sampling: Sampling, length: int, eos_ids: frozenset[int]
) -> dict[tuple[int, ...], float]:
    """Returns continuations of ``length`` tokens, or fewer that end with an end token, computed without a cache."""
    law: dict[tuple[int, ...], float] = {}
    open_ones: dict[tuple[int, ...], float] = {(): 1.0}
    for position in range(length):
        batch = torch.tensor([[*prompt, *prefix] for prefix in open_ones], device=DEVICE)
        with torch.inference_mode():
            logits = model(input_ids=batch, use_cache=False).logits[:, -1]
        grown: dict[tuple[int, ...], float] = {}
        for (prefix, reached), row in zip(open_ones.items(), logits, strict=True):
            probs = processed_probs([*prompt, *prefix], row, sampling).double()
            for token, probability in enumerate((probs / probs.sum()).tolist()):
                if probability > 0.0:
                    ended = token in eos_ids or position + 1 == length
                    (law if ended else grown)[*prefix, token] = reached * probability
        open_ones = grown
    return law
