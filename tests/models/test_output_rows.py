"""Output rows while a text grows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerskip.models.draft_head import OutputRows

VOCABULARY, KNOWN = 900, 880
COMMON = (2, 3, 5, 8)


@pytest.mark.parametrize("bias", [None, torch.arange(VOCABULARY) / 7])
def test_rows_are_those_of_common_tokens_and_of_the_text(bias: Tensor | None) -> None:
    weight = torch.randn(VOCABULARY, 6, generator=torch.Generator().manual_seed(0))
    rows = OutputRows(weight, bias, torch.tensor(COMMON), KNOWN)
    text: list[int] = []
    for length in (0, 3, 40, 41, 300, 800):  # beyond the reserved rows, twice
        text += [(7 * row + 1) % VOCABULARY for row in range(len(text), length)]
        with torch.inference_mode():  # as decoding does
            rows.follow(text)
        tokens = rows.tokens.tolist()
        assert tuple(tokens[: len(COMMON)]) == COMMON
        assert sorted(tokens) == sorted({*COMMON, *(token for token in text if token < KNOWN)})
        assert torch.equal(rows.weight, weight[tokens])
        assert rows.bias is None if bias is None else rows.bias is not None and torch.equal(rows.bias, bias[tokens])
    rows.begin()
    assert tuple(rows.tokens.tolist()) == COMMON
    assert torch.equal(rows.weight, weight[list(COMMON)])
    rows.follow([11, 2])
    assert tuple(rows.tokens.tolist()) == (*COMMON, 11)
    assert torch.equal(rows.weight, weight[[*COMMON, 11]])
