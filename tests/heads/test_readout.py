"""The target's output layer over all of its tokens, or over a part of them that grows with a text."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layerskip.heads.readout import Readout, choose_tokens
from layerskip.models import packing
from layerskip.models.target import Target
from tests.accelerator import DEVICE
from tests.families import build


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_rows_are_those_of_common_tokens_and_of_the_text(bias: bool, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))  # packs few rows, too
    model = build("llama", vocab_size=880)
    layer = model.lm_head = nn.Linear(model.config.hidden_size, 880, bias=bias, device=DEVICE)
    common, text = (2, 3, 5, 8), list[int]()
    readout, hidden = Readout(Target(model, pack_weights=packed), torch.tensor(common)), torch.randn(2, 32, device=DEVICE)
    for length in (0, 3, 40, 41, 300, 800):  # beyond the reserved rows, twice
        text += [(7 * row + 1) % 900 for row in range(len(text), length)]
        with torch.inference_mode():  # as decoding does
            readout.follow(text)
            logits = layer(hidden)[:, readout.tokens]
            torch.testing.assert_close(readout(hidden), logits, rtol=1e-5, atol=1e-5)
        tokens = readout.tokens.tolist()
        assert tuple(tokens[: len(common)]) == common
        assert sorted(tokens) == sorted({*common, *(token for token in text if token < 880)})
        assert torch.equal(readout.weight, layer.weight[tokens])
        assert torch.equal(readout.bias, layer.bias[tokens]) if bias else readout.bias is None
    readout.begin()
    for text, tokens in ([], [*common]), ([11, 2], [*common, 11]):
        readout.follow(text)
        assert readout.tokens.tolist() == tokens and torch.equal(readout.weight, layer.weight[tokens])


@pytest.mark.parametrize("family", ["cohere", "gemma2", "granite", "llama"])
def test_logits_equal_the_targets(family: str) -> None:
    """Some families scale or cap their logits. A readout over some tokens returns their logits alone."""
    model = build(family)
    target, ids, chosen = Target(model), torch.tensor([[3, 4, 5, 6]], device=DEVICE), torch.tensor([3, 8, 50])
    with torch.no_grad():
        hidden, logits = model.base_model(input_ids=ids).last_hidden_state, model(input_ids=ids).logits
        assert torch.allclose(Readout(target, None)(hidden), logits, atol=1e-5)
        assert torch.allclose(Readout(target, chosen)(hidden), logits[..., chosen], atol=1e-5)
    assert Readout(target, chosen).tokens_at(torch.arange(3, device=DEVICE)).tolist() == [3, 8, 50]


def test_the_most_common_tokens_and_the_required_ones_are_chosen() -> None:
    counts = torch.tensor([5, 0, 9, 1, 7, 0])
    assert choose_tokens(counts, 3, [1]).tolist() == [1, 2, 4]
    assert choose_tokens(counts, 99, []).tolist() == list(range(6))
    assert choose_tokens(torch.zeros(5000), 3, [7]).tolist() == [0, 1, 7]
