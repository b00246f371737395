"""Drafting through a view of the target: the contract for several masks and stop rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from layerskip.config import SpeculativeConfig
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter
from layerskip.drafters.registry import build_drafter
from layerskip.models.target import Target
from tests.accelerator import DEVICE
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, SAMPLINGS, contract, generated, target_of, toy_target


def _drafter(target: Target, mask: str, toy_mask: str, **fields: Any) -> Drafter:
    mask = toy_mask if target is toy_target() else mask
    return build_drafter(SpeculativeConfig.from_dict({"method": "layer_skip", "mask": mask} | fields), target)


# transformers reads a cache's length from attention 0, which the draft skips here.
TestSkippedAttention = contract(
    lambda target: _drafter(target, "attention:0", "attention:0", num_speculative_tokens=3), samplings=SAMPLINGS[::2]
)


@pytest.mark.parametrize("mask", ["", "layers:0-3", "layers:0,3", "attention:0-3", "mlp:0-3"])
def test_any_mask_is_lossless(mask: str) -> None:
    target = target_of("gemma3_text")
    drafter = _drafter(target, mask, mask, num_speculative_tokens=6)
    for prompt in PROMPTS[:3]:
        result = decode(target, drafter, prompt, GREEDY, LENGTH)
        assert result.tokens == generated("gemma3_text", prompt, LENGTH)
        if not mask:
            assert result.stats.acceptance_rate == 1.0


@torch.inference_mode()
def _chances(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Returns the target's distributions of one pass. With nothing skipped, they are the draft's own."""
    ids = torch.tensor([[*prompt, *tokens]], device=DEVICE)
    return target.model(input_ids=ids, use_cache=False).logits[0].softmax(-1)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 1.0])
def test_a_threshold_stops_after_the_first_token_of_low_confidence(threshold: float) -> None:
    target = target_of("llama")
    stop = {"method": "threshold", "threshold": threshold}
    for prompt in PROMPTS[:4]:
        drafter = _drafter(target, "", "", num_speculative_tokens=5, stop=stop)
        result = decode(target, drafter, prompt, GREEDY, LENGTH)
        confidence = _chances(target, prompt, result.tokens).amax(-1)[len(prompt) - 1 :].tolist()  # of every new token
        expected, done = [], 1
        while done < LENGTH:
            maximum = min(5, LENGTH - done - 1)
            low = [i for i in range(maximum) if confidence[done + i] < threshold]
            expected.append(low[0] + 1 if low else maximum)
            done += expected[-1] + 1
        assert [round.drafted for round in result.stats.rounds] == expected
