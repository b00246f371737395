"""The rows of an output layer for a part of the vocabulary, which grow with a text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from layerskip.heads.readout import OutputRows
from layerskip.models import packing


@pytest.mark.parametrize("bias", [None, torch.arange(900) / 7])
@pytest.mark.parametrize("packed", [True, False])
def test_rows_are_those_of_common_tokens_and_of_the_text(
    bias: Tensor | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))  # packs few rows, too
    weight = torch.randn(900, 6, generator=torch.Generator().manual_seed(0))
    common, text = (2, 3, 5, 8), list[int]()
    rows, hidden = OutputRows(weight, bias, torch.tensor(common), 880, packed), torch.randn(2, 6)
    for length in (0, 3, 40, 41, 300, 800):  # beyond the reserved rows, twice
        text += [(7 * row + 1) % 900 for row in range(len(text), length)]
        with torch.inference_mode():  # as decoding does
            rows.follow(text)
            logits = linear(hidden, weight, bias)[:, rows.tokens]
            torch.testing.assert_close(rows.multiply(hidden), logits, rtol=1e-5, atol=1e-5)
        tokens = rows.tokens.tolist()
        assert tuple(tokens[: len(common)]) == common
        assert sorted(tokens) == sorted({*common, *(token for token in text if token < 880)})
        assert torch.equal(rows.weight, weight[tokens])
        assert rows.bias is None if bias is None else rows.bias is not None and torch.equal(rows.bias, bias[tokens])
    rows.begin()
    for text, tokens in ([], [*common]), ([11, 2], [*common, 11]):
        rows.follow(text)
        assert rows.tokens.tolist() == tokens and torch.equal(rows.weight, weight[tokens])
