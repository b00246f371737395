"""What scans take at once: ``max_rows`` and ``most_bytes`` bound it, whatever number of continuations and masks there is."""

from __future__ import annotations

import random

from layerskip.config import StopRule
from layerskip.mask import SkipMask
from layerskip.models.target import Target
from layerskip.scan.scan import Scanner
from tests.allocations import peak_bytes
from tests.scan.test_scan import GREEDY, passage_of, random_mask


def test_more_passages_take_no_larger_cache(tiny_target: Target) -> None:
    """Memory is bounded by the rows of a pass, whatever number of packs the starts make."""
    sizes = []
    for count in (2, 8):
        continuations = [passage_of(tiny_target, i, [9, 8, 7], GREEDY, 10) for i in range(count)]
        scanner = Scanner(tiny_target, continuations, GREEDY, depth=4, max_rows=8)
        scanner.scan([SkipMask.parse("mlp:1", tiny_target.layers)])
        sizes.append(scanner.cache_bytes)
    assert 0 < sizes[0] == sizes[1]


def test_the_memory_of_scans_is_that_of_a_pass(tiny_target: Target) -> None:
    """All that tensors take at once, the target's own states of the continuations left aside: rows count, and masks do not."""
    continuations = [passage_of(tiny_target, i, [9, 8, 7, i], GREEDY, 10) for i in range(6)]
    source = random.Random(2)
    masks = [random_mask(tiny_target.layers, source, 0.5) for _ in range(64)]

    def peak(count: int, rows: int) -> int:
        scanner = Scanner(tiny_target, continuations, GREEDY, depth=4, max_rows=rows)
        return peak_bytes(lambda: scanner.scan(masks[:count]))

    few, many, wide = peak(8, 16), peak(64, 16), peak(64, 128)
    assert many <= 1.05 * few
    assert 4 * many < wide <= 8 * many


def test_what_the_target_read_keeps_to_its_budget(tiny_target: Target) -> None:
    """Passages that it does not hold are left out, and what is said of the others is what it was."""
    continuations = [passage_of(tiny_target, i, [9, 8, 7], GREEDY, 10) for i in range(8)]
    mask = SkipMask.parse("mlp:1", tiny_target.layers)
    whole = Scanner(tiny_target, continuations, GREEDY, depth=4)
    budget = whole.text_bytes // 2
    assert whole.continuations == tuple(continuations)
    part = Scanner(tiny_target, continuations, GREEDY, depth=4, most_bytes=budget)
    assert part.continuations == tuple(continuations[:4])
    assert part.text_bytes <= budget
    (scan,), (all_of_it,) = part.scan([mask]), whole.scan([mask])
    stop = StopRule()
    assert part.counts(scan, 3, stop) == whole.counts(all_of_it, 3, stop)[:4]
    assert (
        len(Scanner(tiny_target, continuations, GREEDY, depth=4, most_bytes=1).continuations) == 1
    )  # of nothing nothing is known

    def peak(count: int, most_bytes: int | None) -> int:
        return peak_bytes(lambda: Scanner(tiny_target, continuations[:count], GREEDY, depth=4, most_bytes=most_bytes))

    # Reading takes something beside, and what is read last is found to be too much.
    beside = peak(1, None) + whole.text_bytes // 4
    assert peak(8, budget) <= budget + beside
    assert peak(8, budget // 2) <= budget // 2 + beside
    assert peak(8, budget // 2) < peak(8, budget) < peak(8, None)
