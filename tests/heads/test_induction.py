"""Tests that untrained heads with induction copy what followed the last two tokens earlier, or the last one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.induction import add_induction_heads
from layerskip.heads.readout import Readout
from layerskip.models.target import Target
from tests.tiny import build

TARGET = Target(build("llama", 0, vocab_size=200, hidden_size=256, eos_token_id=None))
TEXT = torch.randperm(200, generator=torch.Generator().manual_seed(2))
EMBEDDINGS = TARGET.model.get_input_embeddings()
SHAPE = replace(EagleShape.of(TARGET, lookback=2), heads=4, key_value_heads=2, head_dim=64)


def _head(shape: EagleShape, tokens: torch.Tensor | None = None) -> EagleHead:
    """A head whose linear map is zero."""
    torch.manual_seed(0)
    head = EagleHead(shape, tokens).eval()
    torch.nn.init.zeros_(head.fc.weight)
    return head


@torch.no_grad()
def _predicted(head: EagleHead, tokens: list[int]) -> list[int]:
    """The head's predictions after every token except the first."""
    embedded = EMBEDDINGS(torch.tensor([tokens]))
    hidden = head(head.with_lookback(embedded, len(tokens) - 1), torch.randn(1, len(tokens) - 1, SHAPE.hidden))
    readout = Readout(TARGET, head.tokens)
    return readout.tokens_at(readout(hidden[0]).argmax(-1)).tolist()


def _copied(head: EagleHead, drafted: torch.Tensor) -> float:
    """The share of right predictions when thirty tokens occur the second and the third time."""
    once = drafted[torch.randperm(len(drafted), generator=torch.Generator().manual_seed(1))[:30]].tolist()
    wanted = [*once, *once][1:]
    predicted = _predicted(head, [*once, *once, *once])[len(once) - 1 :]
    return sum(a == b for a, b in zip(predicted, wanted, strict=False)) / len(wanted)


@pytest.mark.parametrize(
    ("changes", "few"),
    [({"lookback": 1}, False), ({"lookback": 4}, True), ({"key_value_heads": 4}, False), ({"key_value_heads": 1}, False)],
)
def test_what_followed_a_token_is_copied(changes: dict[str, int], few: bool) -> None:
    """For every lookback, with own or shared keys, and for a part of the vocabulary."""
    drafted = torch.arange(20, TARGET.vocabulary, 2) if few else torch.arange(TARGET.vocabulary)
    head = _head(replace(SHAPE, **changes), drafted if few else None)
    without = _copied(head, drafted)
    add_induction_heads(head, EMBEDDINGS, Readout(TARGET, head.tokens), TEXT)
    assert _copied(head, drafted) >= 0.9
    assert without <= 0.1
