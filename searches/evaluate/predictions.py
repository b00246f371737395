"""Accuracy of predicted speedups: predictions against real decoding, over many masks and draft lengths.

Scans masks of several kinds, decodes with each of them at several draft lengths on the same prompts, and compares. Reports
Spearman's rank correlation, because a search needs the order, and the median absolute error. Works on any target that can be
scanned.

The same command resumes: measurements are kept until the program changes. The exit code is 4 if a criterion is missed.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from scipy.stats import spearmanr
from tqdm import tqdm

from layerskip import Measurement, SkipMask, SpeculativeConfig
from layerskip.files import digest
from layerskip.measure.measurement import Sample
from layerskip.models.environment import machine
from layerskip.scan.replay import Counts, count
from searches.app.application import run
from searches.app.checks import InputError, check_number
from searches.evaluate.criteria import Count, Parts, check_fields, conclude
from searches.evaluate.exactness import random_masks
from searches.predict.mask_search import flip, published_masks
from searches.predict.mask_search import run as contiguous
from searches.predict.preparation import Preparation
from searches.predict.scan_predictor import SCANNED_MASKS
from searches.results import RESULTS_VERSION, ResultLog, record_header
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE

_SHARES = (0.05, 0.1, 0.2, 0.4)  # of sub-layers that random masks skip
AGAIN = "again"  # plain decoding, measured a second time


def compare_predictions(config: DictConfig) -> None:
    """Compare predictions with measurements and write the record. See ``conf/predictions.yaml``."""
    for name in ("min_correlation", "max_error", "max_trials"):
        if config[name] is not None:
            check_number(name, config[name], or_zero=True)
    check_fields(config, {"masks": 1, "lengths": 1})
    parts, lengths = Parts(config), sorted(config.lengths)
    target, prompts, measuring = parts.target, parts.prompts, parts.measuring
    ends = lengths[0], lengths[-1]
    space = parts.space.narrowed(["layer_skip"], num_speculative_tokens=ends, stop=("length",), siblings=(0, 0))
    outputs, new = Path(config.outputs), measuring.max_new_tokens
    folder = outputs / "predictions" / digest(RESULTS_VERSION)[:12]
    preparation = Preparation(target, parts.sampling, outputs)
    predictor = preparation.predictor(prompts, new, space, parts.scanning, folder, config.seed)
    if predictor is None:
        raise InputError("target: it cannot be scanned, so there is nothing to compare")
    predictor.sharpen()
    identity = [target.digest, prompts.digest, parts.sampling.to_dict(), dataclasses.asdict(measuring), machine(target)]
    log = ResultLog(folder / f"measured-{digest(identity)[:12]}.jsonl")
    masks = _masks(space, config.masks, config.seed)
    predictor.predict(masks)
    points: list[dict[str, Any]] = []
    trial_seconds: list[float] = []
    for mask in tqdm(masks, unit="mask", desc="decoding", disable=None):
        configs = {str(length): SpeculativeConfig("layer_skip", length, mask=mask.format()) for length in lengths}
        name = f"{mask.format()} {lengths}"
        if name not in log:
            both = configs | {AGAIN: SpeculativeConfig()}
            rows = list(parts.bench.compare(both, prompts, measuring.repeats, config.seed))
            log.add(name, measured_metrics(rows, list(configs)))
        for length, drafting in configs.items():
            speedup, rounds, seconds = log[name][length]
            trial_seconds.append(seconds)
            # The prediction with the real rounds: its remaining error is that of the cost profile.
            from_real_rounds = predictor.profile.speedup(Counts.from_list(rounds), mask, drafting.stop)
            predicted = {"predicted": predictor.speedup(drafting), "predicted_from_real_rounds": from_real_rounds}
            points.append({"mask": mask.format(), "num_speculative_tokens": int(length), "measured": speedup} | predicted)
    errors, trial = prediction_error(points), statistics.fmean(trial_seconds)
    scanned = {"masks": len(masks), "seconds_per_mask": predictor.scan_seconds, "max_rows": predictor.max_rows}
    if predictor.scan_seconds is not None:
        scanned["trials"] = SCANNED_MASKS * predictor.scan_seconds / trial
    record = record_header("layerskip.foretold/1", target) | {
        "prompts": {"count": len(prompts), "digest": prompts.digest},
        "max_new_tokens": new,
        "profile": predictor.profile.to_dict(),
        "scan": scanned,
        "trial_seconds": trial,
        "points": points,
        **errors,
    }
    known = errors["median_absolute_error_from_real_rounds"]
    print(f"{len(points)} predictions; with the real rounds, the median absolute error is {known:.1%}")
    counts = [
        Count("rank correlation", errors["spearman"], minimum=config.min_correlation),
        Count("median absolute error", errors["median_absolute_error"], maximum=config.max_error),
        Count(f"{SCANNED_MASKS} scans, in trials", scanned.get("trials") or 0.0, maximum=config.max_trials),
    ]
    conclude(config, "predictions.json", record, counts)


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


def measured_metrics(rows: Sequence[Mapping[str, Sample]], lengths: Sequence[str]) -> dict[str, list[Any]]:
    """Return the speedup, the round counts and the seconds of a trial of every draft length.

    All lengths are compared with the same plain decoding, so an error in its time affects them all. It is therefore measured
    twice, and speedups are relative to the mean of both times.
    """
    mean_baseline = statistics.fmean([1.0, 1 / Measurement.of(rows, BASELINE, AGAIN).speedup])  # over the first time
    metrics = {}
    for length in lengths:
        measured = Measurement.of(rows, BASELINE, length)
        counts = count([one_round for sample in measured.candidate for one_round in sample.stats.rounds])
        seconds = sum(s.prefill_seconds + s.decode_seconds for s in (*measured.baseline, *measured.candidate))
        metrics[length] = [measured.speedup * mean_baseline, counts.to_list(), seconds]
    return metrics


def _masks(space: SearchSpace, count: int, seed: int) -> list[SkipMask]:
    """Return masks of several kinds in turn: empty, single sub-layers, contiguous runs, published and random ones."""
    source, layers, skippable = random.Random(seed), space.layers, list(space.skippable)
    empty = SkipMask.none(layers)
    singles = [flip(empty, kind, layer) for layer in skippable for kind in ("attention", "mlp")]
    runs = [contiguous(layers, first, n) for first in skippable for n in range(2, skippable[-1] - first + 2)]
    fixed = (source.sample(masks, len(masks)) for masks in (singles, runs, published_masks(layers, skippable)))
    kinds = [[empty], *fixed, random_masks(layers, skippable, count, _SHARES, seed)]
    in_turn = [masks[turn] for turn in range(count) for masks in kinds if turn < len(masks)]
    return list(dict.fromkeys(in_turn))[:count]


if __name__ == "__main__":
    run("predictions", compare_predictions)
