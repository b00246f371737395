"""Tests of the memory of scans."""

from __future__ import annotations

import random

from layerskip import SkipMask, StopRule, Target
from layerskip.scan.scan import Scanner
from tests.allocations import peak_bytes
from tests.scan.test_scan import GREEDY, continuation_of, random_mask


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
