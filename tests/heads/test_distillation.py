"""Tests the loss in portions against torch's own over all rows at once."""

from __future__ import annotations

import pytest
import torch

from layerskip.heads.readout import Readout
from layerskip.heads.training import cross_entropy, most_likely_tokens
from layerskip.models.target import Target
from tests.accelerator import DEVICE
from tests.families import build


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # Gemma 2 caps its logits
@pytest.mark.parametrize("tokens", [None, (2, 3, 5, 7, 11)])
@pytest.mark.parametrize("rows", [1, 128, 300])
def test_loss_and_gradient_equal_those_of_all_rows_at_once(family: str, tokens: tuple[int, ...] | None, rows: int) -> None:
    target = Target(build(family, 0))
    readout = Readout(target, None if tokens is None else torch.tensor(tokens))
    torch.manual_seed(0)
    hidden = (4 * torch.randn(rows, target.hidden, device=DEVICE)).requires_grad_()
    final = 4 * torch.randn(rows, target.hidden, device=DEVICE)
    expected = torch.nn.functional.cross_entropy(readout(hidden), readout(final).softmax(-1))
    (slope,) = torch.autograd.grad(3 * expected, hidden)
    found = cross_entropy(readout, hidden, final)
    assert torch.allclose(found, expected, rtol=1e-5)
    assert torch.allclose(torch.autograd.grad(3 * found, hidden)[0], slope, atol=1e-7, rtol=1e-4)
    places = readout(hidden).argmax(-1)
    assert most_likely_tokens(readout, hidden).tolist() == [
        place if tokens is None else tokens[place] for place in places.tolist()
    ]
