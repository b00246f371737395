"""Draft heads: drafts from a part of the vocabulary, whose output rows grow with a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from layerskip import save_draft_checkpoint
from layerskip.config import ConfigError, SpeculativeConfig
from layerskip.decoding.decode import decode
from layerskip.drafters.registry import build_drafter
from layerskip.mask import SkipMask
from layerskip.models import packing
from layerskip.models.draft_head import DraftHead, OutputRows, load_draft_tokens, save_draft_tokens
from layerskip.models.skip_view import skip_view
from tests.accelerator import DEVICE
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, Recorder, generated, target_of
from tests.models.passes import fresh


@pytest.mark.parametrize("kind", ["layer_skip", "draft_model"])
def test_a_draft_has_only_tokens_of_its_head_and_of_the_text(kind: str, tmp_path: Path) -> None:
    target = target_of("llama")
    tokens = (3, 4, 8, 9, 10)
    fields: dict[str, Any] = {"mask": ""}
    if kind == "draft_model":
        save_draft_checkpoint(target, SkipMask.none(target.layers), tmp_path / "draft")
        fields = {"draft_model": str(tmp_path / "draft")}
    save_draft_tokens(tmp_path / "head", torch.tensor(tokens), target, {})
    config = SpeculativeConfig(kind, 3, draft_head=str(tmp_path / "head"), **fields)
    drafter = build_drafter(config, target)
    from_text = set()
    for prompt in PROMPTS[:4]:
        recorder = Recorder(drafter)
        assert decode(target, recorder, prompt, GREEDY, LENGTH).tokens == generated("llama", prompt, LENGTH)
        for context, branches in recorder.drafts:
            drafted = {token for branch in branches for token in branch}
            assert drafted <= {*tokens, *context}
            from_text |= drafted - set(tokens)
    assert from_text
    head = DraftHead(target.model, torch.tensor(tokens), target.vocabulary)
    view = skip_view(target.model, SkipMask.none(target.layers))
    head.restrict(view)
    ids = torch.tensor(PROMPTS[1], device=DEVICE)
    assert torch.allclose(fresh(view, ids), fresh(target.model, ids)[:, list(tokens)], atol=1e-5)


def test_a_draft_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    target = target_of("llama")
    with pytest.raises(ConfigError, match="^draft_head: .*tokens outside the model's vocabulary"):
        DraftHead(target.model, torch.tensor([1, 99]), target.vocabulary)
    save_draft_tokens(tmp_path, torch.tensor([4, 3]), target, {})
    with pytest.raises(ConfigError, match="^draft_head: .* is damaged"):
        load_draft_tokens(tmp_path, target)
    with pytest.raises(ConfigError, match="^draft_head: cannot read"):
        load_draft_tokens(tmp_path / "nothing", target)


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
