"""Errors of predicted speedups against measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

SCANNED_MASKS = 64  # masks whose scans are expressed in whole trials


def prediction_error(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return rank correlation and errors of predictions; errors are relative to the measurements.

    Points have ``predicted``, ``predicted_from_real_rounds`` and ``measured`` speedups.
    """
    names = ("predicted", "predicted_from_real_rounds", "measured")
    predicted, timed, measured = (np.array([point[name] for point in points]) for name in names)
    errors = predicted / measured - 1
    return {
        "spearman": float(spearmanr(predicted, measured).statistic) if len(points) > 2 else 0.0,
        "median_absolute_error": float(np.median(np.abs(errors))),
        "mean_error": float(np.mean(errors)),
        "median_absolute_error_from_real_rounds": float(np.median(np.abs(timed / measured - 1))),
    }
