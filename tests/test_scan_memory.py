"""What scans take at once: ``max_rows`` bounds it, whatever number of passages and masks there is."""

from __future__ import annotations

import random

from layerskip.mask import SkipMask
from layerskip.scan import Scanner
from layerskip.target import Target
from tests.allocations import peak_bytes
from tests.test_scan import GREEDY, passage_of, random_mask


def test_more_passages_take_no_larger_cache(tiny_target: Target) -> None:
    """Memory is bounded by the rows of a pass, whatever number of packs the starts make."""
    sizes = []
    for count in (2, 8):
        passages = [passage_of(tiny_target, i, [9, 8, 7], GREEDY, 10) for i in range(count)]
        scanner = Scanner(tiny_target, passages, GREEDY, depth=4, max_rows=8)
        scanner.scan([SkipMask.parse("mlp:1", tiny_target.layers)])
        sizes.append(scanner.cache_bytes)
    assert 0 < sizes[0] == sizes[1]


def test_the_memory_of_scans_is_that_of_a_pass(tiny_target: Target) -> None:
    """All that tensors take at once, the target's own states of the passages left aside: rows count, and masks do not."""
    passages = [passage_of(tiny_target, i, [9, 8, 7, i], GREEDY, 10) for i in range(6)]
    source = random.Random(2)
    masks = [random_mask(tiny_target.layers, source, 0.5) for _ in range(64)]

    def peak(count: int, rows: int) -> int:
        scanner = Scanner(tiny_target, passages, GREEDY, depth=4, max_rows=rows)
        return peak_bytes(lambda: scanner.scan(masks[:count]))

    few, many, wide = peak(8, 16), peak(64, 16), peak(64, 128)
    assert many <= 1.05 * few
    assert 4 * many < wide <= 8 * many
