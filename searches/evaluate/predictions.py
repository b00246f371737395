"""Accuracy of predicted speedups: predictions against real decoding, over many masks or plans and draft lengths.

Scans masks of several kinds, or with ``space.methods=[quantized]`` plans of all formats. Decodes with each of them at
several draft lengths on the same prompts, and compares. Reports Spearman's rank correlation, because a search needs the
order, and the median absolute error. Works on any target that can be scanned. The same command resumes. The exit code is 4
if a criterion is missed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from scipy.stats import spearmanr

from layerskip import DraftPlan, Measurement, PromptSet, StopRule
from layerskip.draft_plan import BITS, KEEP
from layerskip.models.packing import refuse_quantized
from layerskip.scan.replay import Counts, count
from searches.app.application import run
from searches.app.checks import InputError
from searches.evaluate.criteria import Count, Parts, check_fields, conclude, resume
from searches.evaluate.exactness import random_masks
from searches.predict.mask_search import drafting_with
from searches.predict.mask_search import run as contiguous
from searches.predict.preparation import Preparation
from searches.predict.scan_predictor import SCANNED_MASKS
from searches.results import record_header
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, ModelBench

_SHARES = (0.05, 0.1, 0.2, 0.4)  # of sub-layers that random masks skip
_FROM_REAL = "predicted_from_real_rounds"


def compare_predictions(config: DictConfig) -> None:
    """Compare predictions with measurements and write the record. See ``conf/predictions.yaml``."""
    check_fields(config, {"masks": 2, "lengths": 1}, ("min_correlation", "max_error", "max_trials"))
    parts, lengths, outputs = Parts(config), sorted(config.lengths), Path(config.outputs)
    if "quantized" in parts.space.available_methods and (reason := refuse_quantized(parts.target.model)):
        raise InputError(f"space.methods: quantized: {reason}")
    ends = lengths[0], lengths[-1]
    space = parts.space.narrowed(["layer_skip", "quantized"], num_speculative_tokens=ends, stop=("length",))
    preparation, new = Preparation(parts.target, parts.sampling, outputs), parts.measuring.max_new_tokens
    predictor = preparation.predictor(parts.prompts, new, space, parts.scanning, outputs / "predictions", config.seed)
    if predictor is None:
        raise InputError("target: it cannot be scanned, so there is nothing to compare")
    masks = _masks(space, config.masks, config.seed)
    predictor.predict(masks)
    measure = partial(measure_lengths, parts.bench, parts.prompts, parts.measuring.repeats, config.seed)
    jobs = {f"{mask.format()} {lengths}": partial(measure, mask, lengths) for mask in masks}
    points: list[dict[str, Any]] = []
    trial_seconds: list[float] = []
    measured_masks = resume(config, "predictions", [*parts.identity, config.seed], jobs, "mask").values()
    for mask, measured in zip(masks, measured_masks, strict=True):
        for length, (speedup, rounds, seconds) in zip(lengths, measured, strict=True):
            drafting = drafting_with(mask, length)
            trial_seconds.append(seconds)
            # The prediction with the real rounds: its remaining error is that of the cost profile.
            from_real_rounds = predictor.profile.speedup(Counts(*rounds), mask, StopRule())
            found = {"measured": speedup, "predicted": predictor.speedup(drafting), _FROM_REAL: from_real_rounds}
            points.append({"mask": mask.format(), "num_speculative_tokens": length, **found})
    true, predicted, timed = (np.array([point[name] for point in points]) for name in ("measured", "predicted", _FROM_REAL))
    spearman = float(np.nan_to_num(spearmanr(predicted, true).statistic))  # NaN if all predictions are equal
    error, timed_error = (float(np.median(np.abs(guess / true - 1))) for guess in (predicted, timed))
    trial = statistics.fmean(trial_seconds)
    trials = SCANNED_MASKS * (predictor.scan_seconds or 0.0) / trial
    record = record_header("layerskip.foretold/1", parts.target) | {
        "prompts": {"count": len(parts.prompts), "digest": parts.prompts.digest},
        "max_new_tokens": new,
        "profile": predictor.profile.to_dict(),
        "scan": {"masks": len(masks), "seconds_per_mask": predictor.scan_seconds, "trials": trials},
        "trial_seconds": trial,
        "points": points,
        "spearman": spearman,
        "median_absolute_error": error,
        "median_absolute_error_from_real_rounds": timed_error,
    }
    counts = [
        Count("rank correlation", spearman, minimum=config.min_correlation),
        Count("median absolute error", error, maximum=config.max_error),
        Count("the same, with the real rounds", timed_error),
        Count(f"{SCANNED_MASKS} scans, in trials", trials, maximum=config.max_trials),
    ]
    conclude(config, "predictions.json", record, counts)


def measure_lengths(
    bench: ModelBench, prompts: PromptSet, repeats: int, seed: int, mask: DraftPlan, lengths: Sequence[int]
) -> list[Any]:
    """Return the speedup, the round counts and the seconds of a trial of every draft length of a mask."""
    configs = {str(length): drafting_with(mask, length) for length in lengths}
    rows = list(bench.compare(configs, prompts, repeats, seed))
    metrics = []
    for length in configs:
        measured = Measurement.of(rows, BASELINE, length)
        seconds = sum(s.prefill_seconds + s.decode_seconds for s in (*measured.baseline, *measured.candidate))
        metrics.append([measured.speedup, astuple(count(measured.stats.rounds)), seconds])
    return metrics


def _masks(space: SearchSpace, count: int, seed: int) -> list[DraftPlan]:
    """Return masks of several kinds in turn: empty, contiguous runs of layers, and random ones.

    If drafts of fewer bits are searched, they are followed by plans: of one format, and with formats and skips by chance.
    """
    source, layers, skippable = random.Random(seed), space.layers, list(space.skippable)
    runs = [contiguous(layers, first, n) for first in skippable for n in range(1, skippable[-1] - first + 2)]
    kinds: list[list[DraftPlan]] = []
    if "layer_skip" in space.available_methods:
        kinds += [[DraftPlan.none(layers)], source.sample(runs, len(runs))]
        kinds.append(random_masks(layers, skippable, count, _SHARES, seed))
    if "quantized" in space.available_methods:
        kinds.append([DraftPlan.uniform(layers, BITS[name]) for name in space.formats])
        kinds[-1] += random_masks(layers, skippable, count, _SHARES, seed, (KEEP, *space.formats))
    in_turn = [masks[turn] for turn in range(count) for masks in kinds if turn < len(masks)]
    return list(dict.fromkeys(in_turn))[:count]


if __name__ == "__main__":
    run("predictions", compare_predictions)
