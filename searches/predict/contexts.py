"""Contexts of continuations: the positions in the cache while they are decoded, on which the costs of attention depend."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from layerskip.costs.cost_model import CostProfile
from layerskip.scan.replay import Counts
from layerskip.texts.continuations import Continuation

_STEP = 64  # timed contexts are rounded to multiples of it, so that similar prompt sets share a cost profile
_SHORT = 1024  # up to it, attention is a small part of all costs
_FAR_APART = 2  # the factor between contexts that are timed apart


def mean_context(continuation: Continuation) -> float:
    """Return the mean number of positions in the cache while a continuation is decoded."""
    return len(continuation.prompt) + len(continuation.tokens) / 2


def timed_contexts(continuations: Sequence[Continuation]) -> list[int]:
    """Return the contexts at which costs of continuations are timed; see :func:`spread_contexts`."""
    return spread_contexts([mean_context(continuation) for continuation in continuations])


def spread_contexts(contexts: Sequence[float]) -> list[int]:
    """Return the contexts at which costs are timed, rising: the mean of short or similar ones.

    Others are timed at the longest, the median and the shortest context, as far as these are far apart. Three contexts also
    follow sliding windows, whose cost stops growing.
    """
    every = sorted(contexts)
    shortest, median, longest = every[0], statistics.median(every), every[-1]
    chosen = [statistics.fmean(every)]
    if longest > max(_SHORT, _FAR_APART * shortest):
        middle = [median] if longest > _FAR_APART * median and median > _FAR_APART * shortest else []
        chosen = [shortest, *middle, longest]
    return [_STEP * max(1, round(context / _STEP)) for context in chosen]


class ContextCosts:
    """The costs of decoding each of some continuations.

    Args:
        profile: measured at one or several contexts.
        continuations: what is decoded.

    Attributes:
        profile: as above.
        profiles: the profile at the context of each continuation.
        average: their mean over all tokens; ``profile`` itself if it has one context.
    """

    def __init__(self, profile: CostProfile, continuations: Sequence[Continuation]) -> None:
        self.profile, self.average = profile, profile
        self.profiles = [profile.at(mean_context(continuation)) for continuation in continuations]
        if profile.others:
            self.average = CostProfile.mean(self.profiles, [continuation.starts for continuation in continuations])

    def speedup(self, parts: Sequence[Counts], seconds: Callable[[CostProfile, Counts], float]) -> float:
        """Return the speedup over plain decoding; 1.0 if nothing is decoded.

        Args:
            parts: the counts of each continuation.
            seconds: returns the seconds of counts under a profile.
        """
        pairs = [(self.average, sum(parts, Counts()))]
        if self.profile.others:
            pairs = list(zip(self.profiles, parts, strict=True))
        plain = sum(counts.tokens * profile.verify_seconds[0] for profile, counts in pairs)
        return plain / sum(seconds(profile, counts) for profile, counts in pairs) if plain else 1.0
