"""Tests the training of bridges: its loss against single drafts, its gradient against differences, and cached texts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import layerskip.scan.text_batch
from layerskip.bridges.bridge import Bridges
from layerskip.bridges.training import BridgeTraining
from layerskip.models.skip_view import skip_view
from layerskip.models.target import Target
from layerskip.scan.text_batch import TextCache
from layerskip.texts.continuations import Continuation
from tests.accelerator import DEVICE
from tests.drafters.bridges import bridge_shape, drawn_continuations
from tests.families import build
from tests.scan.test_scan import GREEDY, continuation_of

MASK = "layers:1;mlp:2"


def _bridges(target: Target, mask: str = MASK) -> Bridges:
    torch.manual_seed(4)
    bridges = Bridges(bridge_shape(target, mask, "mlp", 4, 6))
    with torch.no_grad():
        for parameter in bridges.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return bridges.to(DEVICE)


def _loss_of_single_drafts(
    target: Target, bridges: Bridges, continuations: list[Continuation], tokens: torch.Tensor
) -> float:
    """The loss of drafts of two tokens, each computed separately with transformers' own cache."""
    view = skip_view(target.model, bridges.mask, bridges)
    sums, counts = [0.0, 0.0], [0, 0]
    for continuation in continuations:
        for s in range(continuation.starts):
            known = [*continuation.prompt, *continuation.tokens[: s + 1]]
            with torch.no_grad():
                cache = target.model(input_ids=torch.tensor([known[:-1]], device=DEVICE), use_cache=True).past_key_values
                for place in range(2):
                    logits = view(input_ids=torch.tensor([[known[-1]]], device=DEVICE), past_key_values=cache).logits[
                        0, -1, tokens
                    ]
                    own = target.model(input_ids=torch.tensor([known], device=DEVICE)).logits[0, -1].softmax(-1)[tokens]
                    sums[place] -= float((own * logits.log_softmax(-1)).sum())
                    counts[place] += 1
                    answer = continuation.tokens[s + 1]
                    if int(tokens[logits.argmax()]) != answer or s + 2 > continuation.starts:
                        break
                    known.append(answer)
                    s += 1
    assert all(counts)
    return sum(0.8**place * sums[place] / counts[place] for place in range(2))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_the_loss_equals_that_of_single_drafts(family: str) -> None:
    target = Target(build(family))
    # The target's own continuations, for which some drafts are right.
    drawn, bridges = drawn_continuations(target)[:3], _bridges(target)
    continuations = [continuation_of(target, i, each.prompt, GREEDY, 12) for i, each in enumerate(drawn)]
    tokens = torch.arange(3, target.vocabulary, device=DEVICE)
    loss = BridgeTraining(target, bridges, tokens, 2).loss(continuations)
    assert float(loss.detach()) == pytest.approx(_loss_of_single_drafts(target, bridges, continuations, tokens), rel=1e-3)


def test_the_gradient_equals_finite_differences() -> None:
    target = Target(build("llama").double())
    continuations, bridges = drawn_continuations(target)[:2], _bridges(target).double()
    training = BridgeTraining(target, bridges, torch.arange(target.vocabulary), 1)
    training.loss(continuations).backward()  # type: ignore[no-untyped-call]
    for _, bridge in bridges.items():
        for name in ("bias", "down", "up", "gate", "out"):
            parameter, step, losses = getattr(bridge, name), 1e-2, []
            flat, found = parameter.detach().view(-1), float(parameter.grad.view(-1)[3])
            for move in (step, -2 * step, step):
                flat[3] += move
                with torch.no_grad():
                    losses.append(float(training.loss(continuations)))
            assert found == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=0.02, abs=1e-4)
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_a_cached_text_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(build("gemma3_text"))  # its layers have different attention windows
    bridges, tokens = _bridges(target), torch.arange(3, target.vocabulary, device=DEVICE)
    continuations = drawn_continuations(target)[:3]

    def losses(text_cache: TextCache | None) -> list[float]:
        training = BridgeTraining(target, bridges, tokens, 2, text_cache)
        return [float(training.loss([continuation]).detach()) for continuation in continuations]

    uncached, read = losses(None), mock.Mock(side_effect=layerskip.scan.text_batch.run_target)
    monkeypatch.setattr(layerskip.scan.text_batch, "run_target", read)
    text_cache = TextCache(10**9)
    assert losses(text_cache) == losses(text_cache) == pytest.approx(uncached)
    assert read.call_count == 3
    # Half the budget holds some of the texts; the others are read again.
    small = TextCache(text_cache.nbytes // 2)
    assert losses(small) == losses(small) == pytest.approx(uncached)
    assert 0 < small.nbytes <= small.max_bytes
    assert 3 + 3 < read.call_count < 3 + 6
