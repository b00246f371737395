"""The interface of speedup predictors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from layerskip import SkipMask, SpeculativeConfig
from layerskip.costs.cost_model import CostProfile

SCREENED_TOGETHER = 8  # by one process


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

    def agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        """Return how often the first drafted token of each mask is the target's, on few positions: the cheapest estimate."""

    def predict(self, masks: Sequence[SkipMask]) -> list[Prediction]:
        """Predict each mask's best speedup, from all positions."""

    def can_predict(self, config: SpeculativeConfig) -> bool:
        """Return whether the speedup of a configuration, with its draft length and stop rule, can be predicted."""

    def speedup(self, config: SpeculativeConfig) -> float:
        """Predict the speedup of a configuration for which :meth:`can_predict` is true."""
