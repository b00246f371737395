"""Heads that copy before they have learnt anything: what followed the last two tokens earlier on, or the last one."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.induction import induce
from layerskip.heads.readout import Readout
from layerskip.models.target import Target
from tests.tiny import build

TARGET = Target(build("llama", 0, vocab_size=200, hidden_size=256, eos_token_id=None))
SAID = torch.randperm(200, generator=torch.Generator().manual_seed(2))
EMBEDDINGS = TARGET.model.get_input_embeddings()
SHAPE = replace(EagleShape.of(TARGET, lookback=2), heads=4, key_value_heads=2, head_dim=64)


def _head(shape: EagleShape, tokens: torch.Tensor | None = None) -> EagleHead:
    """One whose linear map says nothing."""
    torch.manual_seed(0)
    head = EagleHead(shape, tokens).eval()
    torch.nn.init.zeros_(head.fc.weight)
    torch.nn.init.zeros_(head.fc.bias)
    return head


@torch.no_grad()
def _said(head: EagleHead, tokens: list[int]) -> list[int]:
    """What it says behind every token but the first."""
    embedded = EMBEDDINGS(torch.tensor([tokens]))
    hidden = head(head.look(embedded, len(tokens) - 1), torch.randn(1, len(tokens) - 1, SHAPE.hidden))
    readout = Readout(TARGET, head.tokens)
    return [readout.token(place) for place in readout(hidden[0]).argmax(-1).tolist()]


def _copied(head: EagleHead, drafted: torch.Tensor) -> float:
    """How much of thirty tokens it says right when they come the second and the third time."""
    once = drafted[torch.randperm(len(drafted), generator=torch.Generator().manual_seed(1))[:30]].tolist()
    wanted = [*once, *once][1:]
    said = _said(head, [*once, *once, *once])[len(once) - 1 :]
    return sum(a == b for a, b in zip(said, wanted, strict=False)) / len(wanted)


@pytest.mark.parametrize("lookback", [1, 2, 4])
@pytest.mark.parametrize("few", [False, True])
def test_what_followed_a_token_follows_it_again(lookback: int, few: bool) -> None:
    """However far back, and from a part of the vocabulary."""
    drafted = torch.arange(20, TARGET.vocabulary, 2) if few else torch.arange(TARGET.vocabulary)
    head = _head(replace(SHAPE, lookback=lookback), drafted if few else None)
    lucky = _copied(head, drafted)
    induce(head, EMBEDDINGS, Readout(TARGET, head.tokens), SAID)
    assert _copied(head, drafted) >= 0.9
    assert lucky <= 0.1


def test_two_tokens_tell_more_than_one() -> None:
    one, other, both = [3, 11, 19, 27, 35, 43], [51, 59, 67, 75, 83, 91], 99
    follows, misleads = [5, 13, 21, 29, 37, 45], [7, 15, 23, 31, 39, 47]
    head = _head(SHAPE)
    induce(head, EMBEDDINGS, Readout(TARGET, None), SAID)
    right = 0
    for a, b, x, y in zip(one, other, follows, misleads, strict=True):
        right += _said(head, [1, a, both, x, 2, b, both, y, 4, a, both])[-1] == x
        right += _said(head, [1, a, both, x, 2, b, both, y, 4, b, both])[-1] == y
    assert right >= 11


@pytest.mark.parametrize("changes", [{"key_value_heads": 4}, {"key_value_heads": 1}, {"attention_bias": True}])
def test_keys_of_ones_own_or_shared_copy_alike(changes: dict[str, int]) -> None:
    head = _head(replace(SHAPE, **changes))
    induce(head, EMBEDDINGS, Readout(TARGET, None), SAID)
    assert _copied(head, torch.arange(TARGET.vocabulary)) >= 0.9


@pytest.mark.parametrize("changes", [{"lookback": 0}, {"head_dim": 2}, {"modules": ("a", "b", "c")}])
def test_what_cannot_look_back_far_is_left_alone(changes: dict[str, Any]) -> None:
    head = _head(replace(SHAPE, **changes))
    known = copy.deepcopy(head.state_dict())
    induce(head, EMBEDDINGS, Readout(TARGET, None), SAID)
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in known.items())


def test_only_what_copies_is_set() -> None:
    """Queries of further heads of a group stay as they are, and so does all but attention."""
    head = _head(replace(SHAPE, heads=8))
    known = copy.deepcopy(head.state_dict())
    induce(head, EMBEDDINGS, Readout(TARGET, None), SAID)
    changed = {name for name, tensor in known.items() if not torch.equal(tensor, head.state_dict()[name])}
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert changed == {f"body.layers.0.self_attn.{part}.weight" for part in parts}
    queries = head.body.layers[0].self_attn.q_proj.weight.view(8, 64, -1)
    same = known["body.layers.0.self_attn.q_proj.weight"].view(8, 64, -1)
    assert [torch.equal(a, b) for a, b in zip(queries, same, strict=True)] == [False, False, True, True] * 2
