"""Measured trials as points of charts, with the colours of the drafters; ``report.png`` and ``report.html`` share them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from layerskip import SkipMask, SpeculativeConfig
from layerskip.mask import count_skipped
from searches.study.leaderboard import configuration, is_lossless
from searches.tracking.names import FIGURES, PREDICTED

COLORS = {
    "none": "#666666",
    "layer_skip": "#1f77b4",
    "prompt_lookup": "#ff7f0e",
    "retrieval": "#bcbd22",
    "token_recycling": "#9467bd",
    "lookahead": "#e377c2",
    "eagle": "#8c564b",
    "medusa": "#ffd700",
    "draft_model": "#2ca02c",
    "cross_tokenizer": "#17becf",
    "cascade": "#d62728",
}
OTHER = "#000000"
"""The colour of kinds that were registered since."""


@dataclass(frozen=True)
class Point:
    """A measured trial.

    Args:
        trial: its number.
        config: the configuration.
        complete: whether it was measured to the end.
        figures: of its measurement, as :meth:`layerskip.Measurement.to_dict` returns them.
        predicted: the speedup that was predicted before it ran; None without a prediction.
        load: throughput and latencies that the back end reports; empty for this library's decoder.
    """

    trial: int
    config: SpeculativeConfig
    complete: bool
    figures: dict[str, Any]
    predicted: float | None
    load: Mapping[str, float] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """The measured speedup over plain decoding."""
        return float(self.figures["speedup"])

    @property
    def may_lead(self) -> bool:
        """True if it was measured to the end and kept the output, or is lossy by choice."""
        return self.complete and (is_lossless(self.figures) or not self.config.lossless)


def points(trials: Iterable[FrozenTrial]) -> list[Point]:
    """Return the measured trials; those that were not run are left out."""
    return [
        Point(
            trial.number,
            configuration(trial),
            trial.state == TrialState.COMPLETE,
            trial.user_attrs["measurement"],
            trial.user_attrs.get(PREDICTED),
            trial.user_attrs.get(FIGURES, {}),
        )
        for trial in trials
        if "measurement" in trial.user_attrs
    ]


def skipped_speedups(measured: Sequence[Point], layers: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the mean speedup of the trials that skipped each sub-layer, and their number.

    Args:
        measured: the trials; those with another drafter than layer skipping are left out.
        layers: the number of decoder layers of the target.

    Returns:
        Both ``[2, layers]``, attention first. The mean is NaN where no trial skipped the sub-layer.
    """
    total, count = np.zeros((2, layers)), np.zeros((2, layers), dtype=np.int64)
    for point in measured:
        if point.config.kind == "layer_skip" and sum(count_skipped(point.config.mask)) > 0:
            mask = SkipMask.parse(point.config.mask, layers)
            skipped = np.array([mask.attention, mask.mlp])
            total[skipped] += point.speedup
            count[skipped] += 1
    return np.divide(total, count, out=np.full((2, layers), np.nan), where=count > 0), count
