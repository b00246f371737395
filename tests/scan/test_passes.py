"""Tests of the passes of scans: late begins, and bounded memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from layerskip import SkipMask, StopRule, Target
from layerskip.scan.scan import Scanner
from layerskip.scan.text_batch import TextBatch
from tests.allocations import peak_bytes
from tests.drafters.contract import PROMPTS
from tests.exhaustive import representative
from tests.families import build
from tests.scan.test_scan import FAMILIES, GREEDY, continuation_of, random_mask


def _first_tokens(scanner: Scanner, mask: SkipMask) -> tuple[list[np.ndarray], int]:
    """Return the confidences in the first tokens of a mask's drafts, and the rows that the first layer computed."""
    rows: list[int] = []
    blocks = scanner._texts.model._model_copy.get_submodule(scanner._texts.model.architecture.path)
    name = scanner._texts.model.architecture.blocks[0].mlp[0]
    hook = blocks.get_submodule(f"0.{name}").register_forward_hook(lambda _, args, __: rows.append(args[0].shape[-2]))
    (scan,) = scanner.scan([mask], depth=1)
    hook.remove()
    return [trace.confidence for trace in scan.traces], sum(rows)


@pytest.mark.parametrize("family", representative(["gemma3_text", "llama"], FAMILIES))
def test_first_tokens_are_drafted_from_the_first_skip_on(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless what a layer reads is not all that it needs, as in some families."""
    target = Target(build(family))
    continuations = [continuation_of(target, i, prompt, GREEDY, 12) for i, prompt in enumerate(PROMPTS)]
    mask = SkipMask.parse(f"mlp:{target.layers - 1}", target.layers)
    scanner = Scanner(target, continuations, GREEDY, depth=3)
    expected, every = _first_tokens(scanner, mask)
    scanner.check()
    found, none = _first_tokens(scanner, mask)
    assert none == 0 < every
    monkeypatch.setattr(TextBatch, "layer_input", lambda self, layer, starts: torch.zeros(1, len(starts), 1))
    scanner.check()
    without, again = _first_tokens(scanner, mask)
    assert again == every
    for whole, late, refused in zip(expected, found, without, strict=True):
        np.testing.assert_allclose(late, whole, rtol=1e-3, atol=1e-5)
        np.testing.assert_array_equal(refused, whole)


def test_the_memory_of_a_scan_grows_with_rows_and_not_with_masks(tiny_target: Target) -> None:
    """The peak of all tensors, without the target's states of the continuations."""
    continuations = [continuation_of(tiny_target, i, [9, 8, 7, i], GREEDY, 10) for i in range(6)]
    source = random.Random(2)
    masks = [random_mask(tiny_target.layers, source, 0.5) for _ in range(16)]

    def peak(count: int, rows: int) -> int:
        scanner = Scanner(tiny_target, continuations, GREEDY, depth=4, max_rows=rows)
        return peak_bytes(lambda: scanner.scan(masks[:count]))

    few, many, wide = peak(8, 16), peak(16, 16), peak(16, 128)
    assert many <= 1.05 * few
    assert 4 * many < wide <= 8 * many


def test_the_targets_states_stay_within_their_budget(tiny_target: Target) -> None:
    """Continuations beyond the budget are left out, and the results of the others stay the same."""
    continuations = [continuation_of(tiny_target, i, [9, 8, 7], GREEDY, 10) for i in range(8)]
    mask = SkipMask.parse("mlp:1", tiny_target.layers)
    whole = Scanner(tiny_target, continuations, GREEDY, depth=4)
    budget = sum(text.nbytes for text in whole._texts.texts) // 2
    assert whole.continuations == tuple(continuations)
    part = Scanner(tiny_target, continuations, GREEDY, depth=4, max_bytes=budget)
    assert part.continuations == tuple(continuations[:4])
    assert sum(text.nbytes for text in part._texts.texts) <= budget
    (scan,), (whole_scan,) = part.scan([mask]), whole.scan([mask])
    assert part.counts(scan, 3, StopRule()) == whole.counts(whole_scan, 3, StopRule())[:4]
    smallest = Scanner(tiny_target, continuations, GREEDY, depth=4, max_bytes=1)
    assert len(smallest.continuations) == 1  # the first one is never left out
