"""Scans of masks in batches, each of which one of a study's workers makes for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from layerskip import SkipMask
from layerskip.files import digest
from searches.app.resume_log import ResultLog
from searches.workers.alone import Workers

SHARED_TOGETHER = 256  # masks that several workers screen together, so that all have some
_ROWS_PER_MASK = 256  # fewer rows of a pass are not worth sharing among masks


def masks_at_once(rows: int) -> int:
    """Return how many masks are scanned together in passes of this many rows: one on a CPU, where more gain nothing."""
    return max(1, rows // _ROWS_PER_MASK)


def share_scans(
    crew: Workers,
    identity: Sequence[str],
    masks: Sequence[SkipMask],
    rows: int,
    log: ResultLog,
    scan: Callable[[Sequence[SkipMask]], dict[str, Any]],
) -> Iterator[tuple[SkipMask, Any]]:
    """Yield the results of the masks that a log lacks, batch by batch.

    Args:
        crew: the workers.
        identity: everything that the results depend on, except the masks.
        masks: the masks.
        rows: of a pass.
        log: of earlier results, by mask.
        scan: returns the results of a batch, by mask.
    """
    new, size = [mask for mask in dict.fromkeys(masks) if mask.format() not in log], masks_at_once(rows)
    batches = [new[first : first + size] for first in range(0, len(new), size)]
    named = {digest([*identity, *(mask.format() for mask in batch)])[:32]: batch for batch in batches}
    for name, results in crew.share_all(named, lambda name: scan(named[name])):
        for mask in named[name]:
            yield mask, results[mask.format()]
