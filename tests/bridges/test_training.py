"""Tests the training of bridges: its loss against single drafts, its gradient against differences, and its effect."""

from __future__ import annotations

import pytest
import torch

import layerskip.scan.text_batch
from layerskip.bridges.bridge import Bridges
from layerskip.bridges.training import BridgeTraining
from layerskip.models.skip_view import skip_view
from layerskip.models.target import Target
from layerskip.scan.row_model import RowModel
from layerskip.scan.text_batch import TargetPass, TextCache
from layerskip.texts.continuations import Continuation
from tests.accelerator import DEVICE
from tests.drafters.bridges import bridge_shape, drawn_continuations
from tests.families import build

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
    continuations, bridges = [*drawn_continuations(target)[:3]], _bridges(target)
    continuations = [_greedy(target, continuation) for continuation in continuations]
    tokens = torch.arange(3, target.vocabulary, device=DEVICE)
    loss = BridgeTraining(target, bridges, tokens, 2).loss(continuations)
    assert float(loss.detach()) == pytest.approx(_loss_of_single_drafts(target, bridges, continuations, tokens), rel=1e-3)


def _greedy(target: Target, continuation: Continuation) -> Continuation:
    """The same prompt with the target's own continuation, for which some drafts are right."""
    ids = torch.tensor([continuation.prompt], device=DEVICE)
    output = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    return Continuation(continuation.prompt_id, "own", continuation.prompt, tuple(output[0, ids.shape[1] :].tolist()), 12)


def test_the_gradient_equals_finite_differences() -> None:
    target = Target(build("llama").double())
    continuations, bridges = drawn_continuations(target)[:2], _bridges(target).double()
    training = BridgeTraining(target, bridges, torch.arange(target.vocabulary), 1)
    training.loss(continuations).backward()  # type: ignore[no-untyped-call]
    for _, bridge in bridges.items():
        for name in ("bias", "down", "up", "gate", "out"):
            parameter = getattr(bridge, name)
            flat, found = parameter.detach().view(-1), float(parameter.grad.view(-1)[3])
            step = 1e-2
            losses = []
            for sign in (1, -1):
                flat[3] += sign * step
                with torch.no_grad():
                    losses.append(float(training.loss(continuations)))
                flat[3] -= sign * step
            assert found == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=0.02, abs=1e-4)
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_a_cached_text_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(build("gemma3_text"))  # its layers have different attention windows
    bridges, tokens, continuations = (
        _bridges(target),
        torch.arange(3, target.vocabulary, device=DEVICE),
        drawn_continuations(target)[:3],
    )
    uncached = float(BridgeTraining(target, bridges, tokens, 2).loss(continuations).detach())
    alone = BridgeTraining(target, bridges, tokens, 2)
    of_each = [float(alone.loss([continuation]).detach()) for continuation in continuations]
    read: list[int] = []
    original = layerskip.scan.text_batch.run_target

    def counted(rows: RowModel, ids: torch.Tensor, last: int, recorded: int = 0) -> TargetPass:
        read.append(len(ids))
        return original(rows, ids, last, recorded)

    monkeypatch.setattr(layerskip.scan.text_batch, "run_target", counted)
    text_cache = TextCache(10**9)
    for _ in range(2):
        assert float(BridgeTraining(target, bridges, tokens, 2, text_cache).loss(continuations).detach()) == uncached
    assert len(read) == 3
    # Half the budget holds some of the texts; the others are read again.
    small = TextCache(text_cache.nbytes // 2)
    training = BridgeTraining(target, bridges, tokens, 2, small)
    for _ in range(2):
        assert [float(training.loss([continuation]).detach()) for continuation in continuations] == pytest.approx(of_each)
    assert 0 < small.nbytes <= small.max_bytes
    assert 3 + 3 < len(read) < 3 + 6
