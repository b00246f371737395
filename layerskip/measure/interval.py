"""The confidence interval of a speedup: of a ratio of totals over prompts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

RESAMPLES = 2000
LEAST_RESAMPLED = 5  # prompts; resamples of fewer say next to nothing about a new prompt
CONFIDENCE = 0.95


def interval_of_ratio(table: NDArray[np.float64], seed: int, confidence: float) -> tuple[float, float]:
    """Return a confidence interval of a speedup: on either side the wider of Student's t and the studentized bootstrap.

    Both are computed for the logarithm, with the standard error of a ratio of totals (the delta method). The t interval
    accounts for a small number of prompts, the bootstrap for skewed speedups. With fewer than five prompts only the t
    interval is used, as too many resamples repeat a single prompt. Prompts are resampled with replacement.

    Args:
        table: ``[prompts, 4]``, at least two: tokens and seconds of the baseline, tokens and seconds of the candidate.
        seed: of the resampling.
        confidence: the share of such intervals that contain the long-run speedup.
    """
    prompts = len(table)
    ratio, error = _log_ratio(table)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    # The quantile of one degree of freedom, the fewest possible, bounds the deviations of nearly equal prompts.
    student, most = (float(stdtrit(freedom, tails[1])) for freedom in (prompts - 1, 1))
    if prompts < LEAST_RESAMPLED:
        return float(np.exp(ratio - student * error)), float(np.exp(ratio + student * error))
    chosen = np.random.default_rng(seed).integers(prompts, size=(RESAMPLES, prompts))
    ratios, errors = _log_ratio(table[chosen])
    varied = errors > 1e-6 * error  # a resample of a single prompt has no error to divide by
    deviations = np.clip((ratios[varied] - ratio) / errors[varied], -most, most)
    below, above = np.quantile(deviations, tails) if len(deviations) else (-student, student)
    low, high = ratio - max(above, student) * error, ratio - min(below, -student) * error
    return float(np.exp(low)), float(np.exp(high))


def _log_ratio(tables: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the log speedup and its standard error for each ``[prompts, 4]`` table of totals, in ``[..., prompts, 4]``."""
    sums, prompts = tables.sum(axis=-2), tables.shape[-2]
    signs = np.array([-1.0, 1.0, 1.0, -1.0])
    influence = np.einsum("...pk,...k->...p", tables, signs / sums)
    error = np.sqrt(np.square(influence).sum(axis=-1) * prompts / (prompts - 1))
    return np.log(sums) @ signs, error
