"""The interface of speedup predictors, and the draft lengths, stop rules and siblings that they choose from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from layerskip import SkipMask, SpeculativeConfig, StopRule
from layerskip.costs.cost_model import CostProfile, DraftExtras
from layerskip.scan.replay import Branching
from layerskip.scan.scan import lowest_threshold


@dataclass(frozen=True)
class Prediction:
    """A predicted speedup.

    Args:
        config: the configuration; for a mask, with its best draft length and stop rule.
        speedup: over plain decoding.
        agreement: the share of positions whose first drafted token is the target's; 0 if no mask was scanned.
    """

    config: SpeculativeConfig
    speedup: float
    agreement: float


@dataclass(frozen=True)
class Limits:
    """What ends a search for masks early.

    Args:
        is_over: returns whether time has run out.
        to_beat: the measured speedup below which masks are of no use; 0 if nothing was measured.
        report: takes a sentence on what was left out.
    """

    is_over: Callable[[], bool] = lambda: False
    to_beat: float = 0.0
    report: Callable[[str], object] = lambda _: None


SCREENED_TOGETHER = 8  # by one process


class SpeedupPredictor(Protocol):
    """Predictor of speedups before anything is decoded, above all those of layer skipping."""

    @property
    def layers(self) -> int:
        """The number of decoder layers of a mask."""

    @property
    def prompts(self) -> Collection[str]:
        """The ids of the prompts that speedups are predicted for."""

    @property
    def profile(self) -> CostProfile:
        """The cost profile."""

    @property
    def screened_together(self) -> int:
        """The number of masks to ask :meth:`agreements` for at once."""

    def sharpen(self) -> None:
        """Measure the costs well, where the choice of a mask depends on them; do nothing if they are known."""
        return

    def agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        """Return how often the first drafted token of each mask is the target's, on few positions: the cheapest estimate."""

    def predict(self, masks: Sequence[SkipMask]) -> list[Prediction]:
        """Predict each mask's best speedup, from all positions."""

    def can_predict(self, config: SpeculativeConfig) -> bool:
        """Return whether the speedup of a configuration, with its draft length and stop rule, can be predicted."""

    def speedup(self, config: SpeculativeConfig) -> float:
        """Predict the speedup of a configuration for which :meth:`can_predict` is true."""

    def extras(self, mask: SkipMask) -> DraftExtras:
        """Return the bridges and the draft head of a mask's draft, as costs count them."""

    def matches(self, config: SpeculativeConfig) -> bool:
        """Return whether a self-draft has the bridges and the draft head that predictions assume."""


DraftChoice = tuple[int, StopRule, Branching]


@dataclass(frozen=True)
class DraftChoices:
    """The draft lengths, stop rules and numbers of siblings to choose from.

    Args:
        lengths: the shortest and the longest draft.
        stops: the stop rules.
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
            depth: the longest draft of a scan.
            verified: the most tokens for which verification was measured.
        """
        shortest, longest = self.lengths
        rules = sorted(enumerate(self.stops), key=lambda pair: pair[1].threshold)
        for length in range(min(longest, depth), shortest - 1, -1):
            for number, stop in rules:
                for siblings in self.siblings:
                    if length * (1 + siblings) <= verified:
                        yield number, (length, stop, Branching(siblings))
