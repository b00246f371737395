"""Errors of predicted speedups against measured ones, and the cost of the scans that they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
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


def scan_cost(record: Mapping[str, Any]) -> float | None:
    """Return how many trials cost as much as scanning :data:`SCANNED_MASKS` masks; None if nothing was scanned."""
    seconds = record["scan"].get("seconds_per_mask") if "scan" in record else None
    return None if seconds is None else float(SCANNED_MASKS * seconds / record["trial_seconds"])


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Save a plot of predicted against measured speedups."""
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    points = record["points"]
    for length in sorted({point["draft_length"] for point in points}):
        some = [point for point in points if point["draft_length"] == length]
        axes.scatter([p["measured"] for p in some], [p["predicted"] for p in some], s=14, label=f"draft length {length}")
    limits = [0.0, 1.05 * max(max(point["measured"], point["predicted"]) for point in points)]
    axes.plot(limits, limits, color="0.6", lw=0.8)
    title = f"Spearman {record['spearman']:.3f}, median absolute error {record['median_absolute_error']:.1%}"
    axes.set(xlabel="measured speedup", ylabel="predicted speedup", title=title)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
