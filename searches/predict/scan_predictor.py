"""Speedups predicted from scans and a cost profile, before anything is decoded with a mask.

Every prediction is stored in a file, mask by mask, so that an interrupted search repeats none of them. Masks are scanned in
batches, each of which one of a study's workers makes for all of them.

The costs of attention depend on the context, the positions in the cache. They are timed where the continuations are, and
every continuation is predicted with the costs of its own context.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from layerskip import SkipMask, SpeculativeConfig, StopRule
from layerskip.costs.cost_model import NO_EXTRAS, CostProfile, DraftExtras
from layerskip.drafters.prompt_lookup import PromptLookup
from layerskip.files import digest
from layerskip.models.skip_view import Replacements
from layerskip.scan.replay import Branching, Counts, count, replay_lookup
from layerskip.scan.scan import Scan, Scanner, lowest_threshold
from layerskip.texts.continuations import Continuation
from searches.predict.predictor import SCREENED_TOGETHER, Prediction
from searches.results import ResultLog
from searches.workers.pool import ALONE, Workers

SCANNED_MASKS = 64  # masks whose scans are expressed in whole trials
_SHARED_TOGETHER = 256  # masks that several workers screen together, so that all have some
SCREENED_ROWS = 128  # positions on which masks are screened
_ROWS_PER_MASK = 256  # fewer rows of a pass are not worth sharing among masks
_CACHED_SCANS = 64  # scans kept in memory for further stop rules
_STEP = 64  # timed contexts are rounded to multiples of it, so that similar prompt sets share a cost profile
_SHORT = 1024  # up to it, attention is a small part of all costs
_FAR_APART = 2  # the factor between contexts that are timed apart

DraftChoice = tuple[int, StopRule, Branching]


@dataclass(frozen=True)
class DraftChoices:
    """The draft lengths, stop rules and numbers of siblings to choose from.

    Args:
        lengths: the shortest and the longest draft.
        siblings: numbers of alternatives to each drafted token.
    """

    lengths: tuple[int, int]
    stops: tuple[StopRule, ...] = (StopRule(),)
    siblings: tuple[int, ...] = (0,)

    @property
    def floor(self) -> float | None:
        """The confidence down to which scans follow drafts for these stop rules; None if no rule needs it."""
        return lowest_threshold(self.stops)

    def combinations(self, depth: int, verified: int) -> Iterator[tuple[int, DraftChoice]]:
        """Yield every combination, with the index of its stop rule.

        Long drafts and low thresholds come first, because what a scan follows for them covers the others.

        Args:
            verified: the most tokens for which verification was measured.
        """
        shortest, longest = self.lengths
        rules = sorted(enumerate(self.stops), key=lambda pair: pair[1].threshold)
        for length in range(min(longest, depth), shortest - 1, -1):
            for number, stop in rules:
                for siblings in self.siblings:
                    if length * (1 + siblings) <= verified:
                        yield number, (length, stop, Branching(siblings))


def mean_context(continuation: Continuation) -> float:
    """Return the mean number of positions in the cache while a continuation is decoded."""
    return len(continuation.prompt) + len(continuation.tokens) / 2


def spread_contexts(contexts: Sequence[float]) -> list[int]:
    """Return the contexts at which costs are timed, rising: the mean of short or similar ones.

    Others are timed at the longest, the median and the shortest context, as far as these are far apart. Three contexts also
    follow sliding windows, whose cost stops growing.
    """
    shortest, median, longest = min(contexts), statistics.median(contexts), max(contexts)
    chosen = [statistics.fmean(contexts)]
    if longest > max(_SHORT, _FAR_APART * shortest):
        middle = [median] if longest > _FAR_APART * median and median > _FAR_APART * shortest else []
        chosen = [shortest, *middle, longest]
    return [_STEP * max(1, round(context / _STEP)) for context in chosen]


class ContextCosts:
    """The costs of decoding each of some continuations.

    Attributes:
        profiles: the profile at the context of each continuation.
        average: their mean over all tokens; ``profile`` itself if it has one context.
    """

    def __init__(self, profile: CostProfile, continuations: Sequence[Continuation]) -> None:
        self.profile, self.average = profile, profile
        self.profiles = [profile.at(mean_context(continuation)) for continuation in continuations]
        if profile.others:
            self.average = CostProfile.mean(self.profiles, [continuation.starts for continuation in continuations])

    def speedup(self, parts: Sequence[Counts], seconds: Callable[[CostProfile, Counts], float]) -> float:
        """Return the speedup over plain decoding; 1.0 if nothing is decoded."""
        pairs = [(self.average, sum(parts, Counts()))]
        if self.profile.others:
            pairs = list(zip(self.profiles, parts, strict=True))
        plain = sum(counts.tokens * profile.verify_seconds[0] for profile, counts in pairs)
        return plain / sum(seconds(profile, counts) for profile, counts in pairs) if plain else 1.0


def masks_at_once(rows: int) -> int:
    """Return how many masks are scanned together in passes of this many rows: one on a CPU, where more gain nothing."""
    return max(1, rows // _ROWS_PER_MASK)


class EmptyDrafts:
    """Drafts of masks with empty skips and the whole vocabulary. A subclass fills the gaps, or reduces the vocabulary.

    Attributes:
        tokens: ``[K]`` int64, the tokens of the draft head; None for the whole vocabulary.
        fills_gaps: whether anything replaces the skipped sub-layers.
    """

    tokens: Tensor | None = None
    fills_gaps = False

    def fields(self, mask: SkipMask) -> dict[str, Any]:
        """Return the fields of a configuration that drafts so, in addition to the mask."""
        return {}

    def replacements(self, masks: Sequence[SkipMask]) -> Sequence[Replacements | None] | None:
        """Return what replaces the skipped sub-layers of each mask; None for nothing at all."""
        return None

    def reproducible(self, mask: SkipMask) -> bool:
        """Return whether another process would scan the mask alike, since nothing is missing for lack of memory."""
        return True

    def extras(self, mask: SkipMask) -> DraftExtras:
        """Return the extras of a mask's draft, as costs count them."""
        return NO_EXTRAS

    def matches(self, config: SpeculativeConfig) -> bool:
        """Return whether a self-draft is one of these drafts."""
        return not config.fitted


class ScanPredictor:
    """A :class:`~searches.predict.predictor.SpeedupPredictor` that scans masks.

    Args:
        folder: for predictions; belongs to one target, prompt set, and choice of lengths and stop rules.
        drafts: what masks draft with.
        pool: the workers that share the predictions through their storage instead of the folder.
        costs: measures the costs well; None if ``profile`` is good enough.

    Attributes:
        profile: the costs at the contexts of all continuations on average.
        screening_seconds: that this process spent in :meth:`agreements`.
    """

    def __init__(
        self,
        scanner: Scanner,
        profile: CostProfile,
        choices: DraftChoices,
        folder: Path,
        drafts: EmptyDrafts | None = None,
        pool: Workers = ALONE,
        costs: Callable[[], CostProfile] | None = None,
    ) -> None:
        self.drafts = drafts or EmptyDrafts()
        self._folder, self._pool = folder, pool
        self.screened_together = SCREENED_TOGETHER if pool.alone else _SHARED_TOGETHER
        self._scanner, self._screen, self._choices = scanner, scanner.sample(SCREENED_ROWS), choices
        self._measure_costs = costs
        self._set_costs(profile)
        names = ("agreements", "counts", "others", "trained")
        logs = (ResultLog(folder / f"{name}.jsonl" if pool.alone else None) for name in names)
        self._agreements, self._counts, self._others, self._trained = logs
        self._scans: dict[SkipMask, Scan] = {}
        self.screening_seconds = 0.0

    def sharpen(self) -> None:
        """Measure the costs well, where the choice of a mask depends on them."""
        if self._measure_costs is not None:
            self._set_costs(self._measure_costs())
            self._measure_costs = None

    def _set_costs(self, profile: CostProfile) -> None:
        self._costs = ContextCosts(profile, self._scanner.continuations)
        self.profile = self._costs.average

    @property
    def scan_seconds(self) -> float | None:
        """The mean time of a mask's full scan, over earlier runs, too; None if no mask was scanned."""
        seconds = [self._counts[text]["seconds"] for text in self._counts]
        return statistics.fmean(seconds) if seconds else None

    @property
    def max_rows(self) -> int:
        """The rows of a pass, which bound a scan's memory."""
        return self._scanner.max_rows

    @property
    def layers(self) -> int:
        """The target's number of decoder layers."""
        return self._scanner.target.layers

    @property
    def prompts(self) -> frozenset[str]:
        """The ids of the prompts with a scanned continuation."""
        return frozenset(continuation.prompt_id for continuation in self._scanner.continuations)

    def agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        """Return how often each mask's first drafted token is the target's; one pass over the screen for each new mask."""

        def scan(batch: Sequence[SkipMask]) -> dict[str, float]:
            start = time.monotonic()
            found = {each.mask.format(): each.agreement for each in self._scan(self._screen, batch, depth=1)}
            self.screening_seconds += time.monotonic() - start
            return found

        self._share("agreements", masks, self._agreements, scan)
        return [float(self._agreements[mask.format()]) for mask in masks]

    def predict(self, masks: Iterable[SkipMask]) -> list[Prediction]:
        """Scan new masks, and predict the speedup of each mask with its best draft length, stop rule and siblings."""

        def scan(batch: Sequence[SkipMask]) -> dict[str, dict[str, Any]]:
            start, found = time.monotonic(), {}
            scans = self._scan(self._scanner, batch, floor=self._choices.floor)
            seconds = (time.monotonic() - start) / len(batch)
            for each in scans:
                start = time.monotonic()
                counts = self._all_counts(each)
                self._cache(each)
                mask_seconds = seconds + time.monotonic() - start
                found[each.mask.format()] = {"agreement": each.agreement, "counts": counts, "seconds": mask_seconds}
            return found

        masks = list(masks)
        self._share("counts", masks, self._counts, scan)
        return [self._best(mask) for mask in masks]

    def can_predict(self, config: SpeculativeConfig) -> bool:
        """Return whether the draft is a timed prompt lookup, or layer skipping within the depth and siblings of scans.

        False for an adaptive stop rule with sampled tokens: replays hold the threshold constant, and decoding moves it.
        """
        length, longest = config.num_speculative_tokens, self.profile.longest
        if config.method == "layer_skip":
            scanned = length <= self._scanner.depth and config.siblings <= self._scanner.runners
            if not (scanned and self.matches(config)):
                return False
        elif config.method != "prompt_lookup":
            return False
        moves = config.stop.method == "adaptive" and not self._scanner.sampling.greedy
        return config.lossless and not moves and length * (1 + config.siblings) <= longest

    def speedup(self, config: SpeculativeConfig) -> float:
        """Predict a configuration's speedup from the counts of its rounds; scans its mask if it is new."""
        if config.method == "prompt_lookup":
            drafter = PromptLookup(
                config.prompt_lookup_min, config.prompt_lookup_max, config.match, config.num_speculative_tokens
            )
            counts = [count(replay_lookup(continuation, drafter)) for continuation in self._scanner.continuations]
            return self._costs.speedup(counts, CostProfile.lookup_seconds)
        mask, choice = SkipMask.parse(config.mask, self.layers), _choice(config)
        known = self._parse(self._counts[mask.format()]["counts"]) if mask.format() in self._counts else {}
        counts = known[choice] if choice in known else self._count(mask, choice)
        return self._choice_speedup(counts, choice, mask, self.extras(mask))

    def extras(self, mask: SkipMask) -> DraftExtras:
        """Return the extras of a mask's draft, as costs count them."""
        return self.drafts.extras(mask)

    def matches(self, config: SpeculativeConfig) -> bool:
        """Return whether a self-draft is one of those that are predicted."""
        return self.drafts.matches(config)

    def tuned(
        self, config: SpeculativeConfig, name: str, replacements: Replacements, extras: DraftExtras
    ) -> SpeculativeConfig:
        """Return a predictable configuration with the best draft length, stop rule and siblings, its own ones included.

        Args:
            name: a digest of its replacements.
            replacements: what it drafts with in place of those of this predictor's drafts.
            extras: of its draft.
        """
        mask, own = SkipMask.parse(config.mask, self.layers), _choice(config)
        name = digest([name, own[0], own[1].to_dict(), astuple(own[2])])
        if name not in self._trained:
            (scan,) = self._scanner.scan([mask], replacements=[replacements], tokens=self.drafts.tokens)
            self._trained.add(name, [self._all_counts(scan), self._choice_counts(scan, own)])
        others, own_counts = self._trained[name]
        (length, stop, branching), _ = self._fastest(self._parse(others) | {own: _read_counts(own_counts)}, mask, extras)
        siblings, minimum = astuple(branching)
        return replace(config, num_speculative_tokens=length, stop=stop, siblings=siblings, min_token_prob=minimum)

    def with_drafts(self, drafts: EmptyDrafts, name: str) -> ScanPredictor:
        """Return a predictor for other drafts that shares the texts and their passes; ``name`` is that of its folder."""
        return ScanPredictor(
            self._scanner, self._costs.profile, self._choices, self._folder / name, drafts, self._pool, self._measure_costs
        )

    def single_agreements(self) -> np.ndarray:
        """Return the agreement with one attention or MLP sub-layer skipped, ``[2, L]``; NaN if it was not screened."""
        names = [[f"{kind}:{layer}" for layer in range(self.layers)] for kind in ("attention", "mlp")]
        known = {name: self._agreements[name] for name in self._agreements}
        return np.array([[known.get(name, math.nan) for name in row] for row in names])

    def _scan(self, scanner: Scanner, masks: Sequence[SkipMask], **options: Any) -> list[Scan]:
        return scanner.scan(masks, replacements=self.drafts.replacements(masks), tokens=self.drafts.tokens, **options)

    def _share(
        self, stage: str, masks: Sequence[SkipMask], log: ResultLog, scan: Callable[[Sequence[SkipMask]], Mapping[str, Any]]
    ) -> None:
        """Add the results of the masks that a log lacks, batch by batch; ``scan`` returns those of a batch, by mask."""
        new, size = [mask for mask in dict.fromkeys(masks) if mask.format() not in log], masks_at_once(self.max_rows)
        batches = [new[first : first + size] for first in range(0, len(new), size)]
        identity = stage, *self._folder.parts[-2:]
        named = {digest([*identity, *(mask.format() for mask in batch)])[:32]: batch for batch in batches}
        for name, results in self._pool.share_all(named, lambda name: scan(named[name])):
            for mask in named[name]:
                log.add(mask.format(), results[mask.format()], self.drafts.reproducible(mask))

    def _count(self, mask: SkipMask, choice: DraftChoice) -> list[Counts]:
        """Return each continuation's counts of a choice that is not among those every mask is combined with."""
        length, stop, branching = choice
        name = json.dumps([mask.format(), length, stop.to_dict(), *astuple(branching)])
        if name not in self._others:
            if mask not in self._scans:
                (scan,) = self._scan(self._scanner, [mask])
                self._cache(scan)
            self._others.add(name, self._choice_counts(self._scans[mask], choice), self.drafts.reproducible(mask))
        return _read_counts(self._others[name])

    def _cache(self, scan: Scan) -> None:
        self._scans[scan.mask] = scan
        while len(self._scans) > _CACHED_SCANS:
            del self._scans[next(iter(self._scans))]

    def _choice_counts(self, scan: Scan, choice: DraftChoice) -> list[list[Any]]:
        """Return the counts of each continuation as lists, with warmed stop rules as in a trial."""
        length, stop, branching = choice
        return [each.to_list() for each in self._scanner.counts(scan, length, stop, branching, warmed=True)]

    def _all_counts(self, scan: Scan) -> list[list[Any]]:
        """Return for every choice: draft length, index of its stop rule, siblings, and the counts of each continuation."""
        choices = self._choices.combinations(self._scanner.depth, self.profile.longest)
        return [[one[0], rule, one[2].siblings, self._choice_counts(scan, one)] for rule, one in choices]

    def _parse(self, rows: Sequence[Sequence[Any]]) -> dict[DraftChoice, list[Counts]]:
        """Return the counts of each continuation for every choice, from the rows of :meth:`_all_counts`."""
        stops = self._choices.stops
        return {(length, stops[rule], Branching(siblings)): _read_counts(parts) for length, rule, siblings, parts in rows}

    def _best(self, mask: SkipMask) -> Prediction:
        known = self._counts[mask.format()]
        (length, stop, branching), speedup = self._fastest(self._parse(known["counts"]), mask, self.extras(mask))
        config = SpeculativeConfig(
            "layer_skip", length, mask=mask.format(), stop=stop, siblings=branching.siblings, **self.drafts.fields(mask)
        )
        return Prediction(config, speedup, float(known["agreement"]))

    def _fastest(
        self, counts: Mapping[DraftChoice, Sequence[Counts]], mask: SkipMask, extras: DraftExtras
    ) -> tuple[DraftChoice, float]:
        speedups = {choice: self._choice_speedup(parts, choice, mask, extras) for choice, parts in counts.items()}
        return max(speedups.items(), key=lambda pair: pair[1])

    def _choice_speedup(self, parts: Sequence[Counts], choice: DraftChoice, mask: SkipMask, extras: DraftExtras) -> float:
        _, stop, branching = choice
        return self._costs.speedup(parts, lambda profile, counts: profile.seconds(counts, mask, stop, extras, branching))


def _choice(config: SpeculativeConfig) -> DraftChoice:
    return config.num_speculative_tokens, config.stop, Branching(config.siblings, config.min_token_prob)


def _read_counts(stored: Sequence[Any]) -> list[Counts]:
    return [Counts.from_list(part) for part in stored]
