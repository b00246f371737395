"""Drafting through a view of the target: the contract for several masks and stop rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from layerskip.config import SpeculativeConfig
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Context, Drafter
from layerskip.decoding.sampling import Chooser
from layerskip.drafters.layer_skip import LayerSkip
from layerskip.drafters.registry import build_drafter
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
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


# The window is shorter than some prompts, and outputs outgrow it.
TestWindow = contract(
    lambda target: _drafter(target, "mlp:1", "attention:0", num_speculative_tokens=3, draft_window=1),
    samplings=SAMPLINGS[::2],
)


TestSiblings = contract(
    lambda target: _drafter(target, "mlp:1", "attention:0", num_speculative_tokens=3, siblings=2),
    trees=True,
    samplings=SAMPLINGS[::2],
)


@pytest.mark.parametrize("siblings", [1, 2])
def test_siblings_are_the_next_likely_tokens_of_the_same_places(siblings: int) -> None:
    """The first tokens are those of the chain; deeper ones follow the first of every place."""
    target, prompt = target_of("llama"), PROMPTS[1]
    cache, chain = KVCache(target.layers, len(prompt) + 4, device=DEVICE), torch.tensor(prompt[-1:], device=DEVICE)
    drafter = _drafter(target, "", "", num_speculative_tokens=3, siblings=siblings)
    with torch.inference_mode():
        forward(target.model, torch.tensor(prompt[:-1], device=DEVICE), cache, last=1)
        cache.length, expected = len(prompt) - 1, list[int]()
        drafter.start(prompt, cache, Chooser(GREEDY, target.vocabulary, target.device, 0))
        draft = drafter.draft(Context([*prompt], chain), 8)
        for _ in range(3):
            text = torch.cat((torch.tensor(prompt[:-1], device=DEVICE), chain))
            likely = target.model(input_ids=text[None]).logits[0, -1].topk(1 + siblings).indices
            expected, chain = [*expected, *likely.tolist()], torch.cat((chain, likely[:1]))
    width = 1 + siblings
    assert draft.tokens.tolist() == expected and cache.length == len(prompt) - 1
    assert draft.parents == (-1,) * width + (0,) * width + (width,) * width


def test_an_adaptive_rule_counts_places() -> None:
    """A draft is wholly accepted if a token of every place is."""
    target = target_of("llama")
    drafter = _drafter(target, "", "", num_speculative_tokens=2, siblings=1, stop={"method": "adaptive", "threshold": 0.0})
    decode(target, drafter, PROMPTS[1], GREEDY, 8)  # the target's own drafts
    assert cast(LayerSkip, drafter).stopper._acceptance_rate == 1.0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.inference_mode()
def test_a_window_shows_the_first_and_the_last_positions(family: str) -> None:
    """Compared with a pass of the model's own under a mask, over its own cache of the whole text."""
    target, window, cut = target_of(family), 3, 0
    for prompt in PROMPTS:
        text = [*prompt, *generated(family, prompt, LENGTH)]
        cache = KVCache(target.layers, len(text) + 8, device=target.device)
        for length in range(9, len(text) - 1, 3):
            cache.length = 0
            forward(target.model, torch.tensor(text[:length], device=DEVICE), cache, last=1)
            cache.length = length
            drafter = _drafter(target, "", "", num_speculative_tokens=1, draft_window=window)
            chooser = Chooser(GREEDY, target.vocabulary, target.device, 0)
            drafter.start(text[:length], cache, chooser)
            last = torch.tensor(text[length : length + 1], device=DEVICE)
            (found,) = drafter.draft(Context([*text[: length + 1]], last), 1).tokens.tolist()
            assert cache.length == length
            seen = [*range(4), *range(length - window, length + 1)]
            own = target.model(torch.tensor([text[:length]], device=DEVICE), use_cache=True).past_key_values
            mask = torch.full((1, 1, 1, length + 1), torch.finfo(target.model.dtype).min, device=DEVICE)
            mask[..., seen] = 0
            place = torch.tensor([[length]], device=DEVICE)
            logits = target.model(last[None], past_key_values=own, attention_mask=mask, position_ids=place).logits[0, -1]
            assert float(logits.max() - logits[found]) < 1e-4
            cut += found != int(target.model(torch.tensor([text[: length + 1]], device=DEVICE)).logits[0, -1].argmax())
    assert cut, "no window changed a draft"


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
