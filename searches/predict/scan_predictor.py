"""Speedups predicted from scans and a cost profile, before anything is decoded with a mask.

Every prediction is stored in a file, mask by mask, so that an interrupted search repeats none of them. Masks are scanned in
batches, each of which one of a study's workers makes for all of them.

The costs of attention depend on the context, the positions in the cache. They are timed at the mean of the continuations.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from layerskip import DraftPlan, SpeculativeConfig, StopRule
from layerskip.costs.cost_model import CostProfile
from layerskip.drafters.prompt_lookup import PromptLookup
from layerskip.files import digest
from layerskip.scan.replay import Counts, count, replay_lookup
from layerskip.scan.scan import Scanner
from layerskip.texts.continuations import Continuation
from searches.predict.mask_search import SCREENED_TOGETHER, Prediction, drafting_with
from searches.results import ResultLog
from searches.workers.pool import ALONE, Workers

SCANNED_MASKS = 64  # masks whose scans are expressed in whole trials
_SHARED_TOGETHER = 256  # masks that several workers screen together, so that all have some
SCREENED_ROWS = 128  # positions on which masks are screened
_ROWS_PER_MASK = 256  # fewer rows of a pass are not worth sharing among masks
_STEP = 64  # the timed context is rounded to multiples of it, so that similar prompt sets share a cost profile

DraftChoice = tuple[int, StopRule]
"""The draft length and the stop rule of a scanned mask."""


def merged_choices(choices: Mapping[str, Sequence[DraftChoice]]) -> list[DraftChoice]:
    return list(dict.fromkeys(itertools.chain(*choices.values())))


def mean_context(continuations: Sequence[Continuation]) -> int:
    """Return the mean number of positions in the cache while continuations are decoded, over all tokens."""
    middles = [len(continuation.prompt) + len(continuation.tokens) / 2 for continuation in continuations]
    mean = statistics.fmean(middles, [continuation.starts for continuation in continuations])
    return _STEP * max(1, round(mean / _STEP))


def masks_at_once(rows: int) -> int:
    """Return how many masks are scanned together in passes of this many rows: one on a CPU, where more gain nothing."""
    return max(1, rows // _ROWS_PER_MASK)


class ScanPredictor:
    """A :class:`~searches.predict.mask_search.SpeedupPredictor` that scans masks."""

    def __init__(
        self,
        scanner: Scanner,
        profile: CostProfile,  # at the mean context of the continuations
        choices: Mapping[str, Sequence[DraftChoice]],  # that plans are combined with, by method
        folder: Path,  # for predictions; belongs to one target, prompt set, and these choices
        pool: Workers = ALONE,  # that share the predictions through their storage instead of the folder
    ) -> None:
        self.layers, self.profile = scanner.target.layers, profile
        self.prompts = frozenset(continuation.prompt_id for continuation in scanner.continuations)
        self.screened_together = SCREENED_TOGETHER if pool.alone else _SHARED_TOGETHER
        self._scanner, self._screen, self._choices = scanner, scanner.sample(SCREENED_ROWS), merged_choices(choices)
        self._choices_of = choices
        self.predicted: Collection[str] = tuple(choices)
        self._floor = min((stop.threshold for _, stop in self._choices if stop.method == "threshold"), default=None)
        self._folder, self._pool = folder, pool
        names = ("agreements", "counts")
        self._agreements, self._counts = (ResultLog(folder / f"{name}.jsonl" if pool.alone else None) for name in names)

    @property
    def scan_seconds(self) -> float | None:
        """The mean time of a mask's full scan, over earlier runs, too; None if no mask was scanned."""
        return statistics.fmean(row["seconds"] for row in self._counts.values()) if self._counts else None

    def agreements(self, masks: Sequence[DraftPlan]) -> list[float]:
        """Return how often each mask's first drafted token is the target's; one pass over the screen for each new mask."""

        def scan(batch: Sequence[DraftPlan]) -> dict[str, float]:
            return {each.mask.format(): each.agreement for each in self._screen.scan(batch, depth=1)}

        self._share("agreements", masks, self._agreements, scan)
        return [float(self._agreements[mask.format()]) for mask in masks]

    def predict(self, masks: Sequence[DraftPlan]) -> list[Prediction]:
        """Predict each plan's speedup with the best draft length and stop rule of its method, or of any."""
        predictions = []
        for mask, counts in zip(masks, self._scanned(masks), strict=True):
            allowed = self._choices_of.get("quantized" if mask.formats else "layer_skip", self._choices)
            speedups = {choice: self.profile.speedup(counts[choice], mask, choice[1]) for choice in allowed}
            (length, stop), speedup = max(speedups.items(), key=lambda pair: pair[1])
            predictions.append(Prediction(drafting_with(mask, length, stop), speedup))
        return predictions

    def _scanned(self, masks: Sequence[DraftPlan]) -> list[dict[DraftChoice, Counts]]:
        """Return the counts of all continuations together, by choice, of each mask; scan masks that are new."""

        def scan(batch: Sequence[DraftPlan]) -> dict[str, dict[str, Any]]:
            start, found = time.monotonic(), dict[str, list[Any]]()
            for one in self._scanner.scan(batch, floor=self._floor):
                totals = (sum(self._scanner.counts(one, *choice), Counts()) for choice in self._choices)
                found[one.mask.format()] = list(map(astuple, totals))
            seconds = (time.monotonic() - start) / len(batch)
            return {text: {"counts": counts, "seconds": seconds} for text, counts in found.items()}

        self._share("counts", masks, self._counts, scan)
        rows = (self._counts[mask.format()]["counts"] for mask in masks)
        return [{choice: Counts(*fields) for choice, fields in zip(self._choices, row, strict=True)} for row in rows]

    def can_predict(self, config: SpeculativeConfig) -> bool:
        """Return whether the draft is a timed prompt lookup, or a chain with a scanned draft length and stop rule."""
        if config.method == "prompt_lookup":
            return config.num_speculative_tokens <= self.profile.longest
        choice = config.num_speculative_tokens, config.stop
        if config.draft_window or config.siblings or choice not in self._choices_of.get(config.method, ()):
            return False
        return self.profile.times(DraftPlan.parse(config.plan, self.layers))

    def speedup(self, config: SpeculativeConfig) -> float:
        """Predict a configuration's speedup from the counts of its rounds; scans its mask if it is new."""
        if config.method == "prompt_lookup":
            drafter = PromptLookup(
                config.prompt_lookup_min, config.prompt_lookup_max, config.match, config.num_speculative_tokens
            )
            found = (count(replay_lookup(continuation, drafter)) for continuation in self._scanner.continuations)
            return self.profile.lookup_speedup(sum(found, Counts()))
        plan, choice = DraftPlan.parse(config.plan, self.layers), (config.num_speculative_tokens, config.stop)
        (counts,) = self._scanned([plan])
        return self.profile.speedup(counts[choice], plan, config.stop)

    def single_agreements(self) -> np.ndarray:
        """Return the agreement with one attention or MLP sub-layer skipped, ``[2, L]``; NaN if it was not screened."""
        names = [[f"{kind}:{layer}" for layer in range(self.layers)] for kind in ("attention", "mlp")]
        return np.array([[self._agreements.get(name, math.nan) for name in row] for row in names])

    def _share(
        self,
        stage: str,
        masks: Sequence[DraftPlan],
        log: ResultLog,
        scan: Callable[[Sequence[DraftPlan]], Mapping[str, Any]],
    ) -> None:
        """Add the results of the masks that a log lacks, batch by batch; ``scan`` returns those of a batch, by mask."""
        new = [mask for mask in dict.fromkeys(masks) if mask.format() not in log]
        size = masks_at_once(self._scanner.max_rows)
        batches = [new[first : first + size] for first in range(0, len(new), size)]
        identity = stage, *self._folder.parts[-2:]
        named = {digest([*identity, *(mask.format() for mask in batch)])[:32]: batch for batch in batches}
        for name, results in self._pool.share_all(named, lambda name: scan(named[name])):
            for mask in named[name]:
                log.add(mask.format(), results[mask.format()])
