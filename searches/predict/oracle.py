"""What may a search ask before it decodes? How fast a mask would be, alone or with any of several lengths and stop rules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from layerskip import SkipMask, SpeculativeConfig, StopRule
from layerskip.costs.cost_model import Aids, CostProfile
from layerskip.scan.scan import floor_of
from layerskip.scan.trace import Branching


@dataclass(frozen=True)
class Prediction:
    """What is foretold of a mask.

    Args:
        config: the mask with the draft length and stop rule that suit it best.
        speedup: over plain decoding.
        agreement: how often the first drafted token is the target's, where a mask was asked about.
    """

    config: SpeculativeConfig
    speedup: float
    agreement: float


class Oracle(Protocol):
    """Foretells speedups, of layer skipping above all."""

    @property
    def layers(self) -> int:
        """How many decoder layers a mask has."""
        ...

    @property
    def prompts(self) -> Collection[str]:
        """The ids of the prompts that speedups are foretold on."""
        ...

    @property
    def profile(self) -> CostProfile:
        """What everything costs."""
        ...

    def agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        """How often the first drafted token is the target's, from few positions: the cheapest question of all."""
        ...

    def predict(self, masks: Sequence[SkipMask]) -> list[Prediction]:
        """The best that each mask can do, from all positions."""
        ...

    def foretells(self, config: SpeculativeConfig) -> bool:
        """Whether a configuration's drafter, draft length and stop rule are among those that are foretold."""
        ...

    def speedup(self, config: SpeculativeConfig) -> float:
        """What is foretold of a configuration that :meth:`foretells` affirms."""
        ...

    def aids(self, mask: SkipMask) -> Aids:
        """What a mask's draft has beside the sub-layers that it keeps."""
        ...

    def knows(self, config: SpeculativeConfig) -> bool:
        """Whether a self-draft has the bridges and the draft head that this foretells."""
        ...


Choice = tuple[int, StopRule, Branching]


@dataclass(frozen=True)
class Choices:
    """The draft lengths, stop rules and numbers of siblings to choose from."""

    lengths: tuple[int, int]
    stops: tuple[StopRule, ...] = (StopRule(),)
    siblings: tuple[int, ...] = (0,)

    @property
    def floor(self) -> float | None:
        """How far scans follow drafts for these rules; None where none asks."""
        return floor_of(self.stops)

    def every(self, depth: int, verified: int) -> Iterator[tuple[int, Choice]]:
        """Each of them, behind the number of its stop rule.

        Long drafts and low thresholds come first: what a scan has followed for them, it need not follow for the others.

        Args:
            depth: the longest draft that a scan looks at.
            verified: the most tokens whose verification was measured.
        """
        shortest, longest = self.lengths
        rules = sorted(enumerate(self.stops), key=lambda pair: pair[1].threshold)
        for length in range(min(longest, depth), shortest - 1, -1):
            for number, stop in rules:
                for siblings in self.siblings:
                    if length * (1 + siblings) <= verified:
                        yield number, (length, stop, Branching(siblings))
