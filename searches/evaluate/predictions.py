"""Accuracy of predicted speedups: predictions against real decoding, over many masks and draft lengths.

Usage: ``python -m searches.evaluate.predictions [field=value]``

Scans masks of several kinds, decodes with each of them at several draft lengths on the same prompts, and compares. Reports
Spearman's rank correlation, as a search needs the order, and the median absolute error. Works on any target that can be
scanned.

The same command resumes: measurements are kept until the program changes. The exit code is 4 if a criterion is missed.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from layerskip import Measurement, PromptSet, Sampling, SkipMask, SpeculativeConfig, Target
from layerskip.files import digest, write_json
from layerskip.measure.measurement import Sample
from layerskip.models.environment import machine
from layerskip.scan.replay import Counts, count
from searches.app.application import NOT_CONFIRMED, run
from searches.app.checks import InputError, check_list, check_number, check_seed, check_whole
from searches.app.earlier_names import PREDICTIONS_SCHEMA
from searches.app.record_header import program_sources, record_header
from searches.app.resume_log import ResultLog
from searches.backends.layerskip import LayerskipBackend
from searches.predict.mask_search import flip, published_masks
from searches.predict.mask_search import run as contiguous
from searches.predict.prediction_error import SCANNED_MASKS, draw, prediction_error, scan_cost
from searches.predict.predictor import SpeedupPredictor
from searches.predict.preparation import ScanSettings, prepare_predictor
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, ModelBench
from searches.study.objective import MeasureSettings

AGAIN = "again"  # plain decoding, measured a second time
_CRITERIA = ("least_correlation", "most_error", "most_trials")
_AT_ONCE = 8  # masks between two steps of the progress bar


def compare_predictions(config: DictConfig) -> dict[str, Any]:
    """Compare predictions with measurements and return the record. See ``conf/predictions.yaml``."""
    for name in _CRITERIA:
        if config[name] is not None:
            check_number(name, config[name], or_zero=True)
    _check(config)
    measuring: MeasureSettings = instantiate(config.measure)
    scanning: ScanSettings = instantiate(config.scan)
    sampling: Sampling = instantiate(config.sampling)
    tune, _ = instantiate(config.prompts).split()
    prompts: PromptSet = tune.take(measuring.prompts)
    lengths = tuple(sorted(config.lengths))
    target: Target = instantiate(config.target)
    fixed = {"skip_length": (lengths[0], lengths[-1]), "stops": ["length"], "siblings": 0}
    space: SearchSpace = instantiate(config.space, layers=target.layers, **fixed)
    if space.bridged:
        raise InputError(
            "space.bridges, space.draft_heads: only empty skips are compared; searches.bridges compares bridges"
        )
    outputs = Path(config.outputs)
    folder = outputs / "predictions" / digest(program_sources())[:12]
    predictor = prepare_predictor(
        target, prompts, sampling, measuring.max_new_tokens, space, scanning, outputs, folder, config.seed
    )
    if predictor is None:
        raise InputError("target: it cannot be scanned, so there is nothing to compare")
    bench = ModelBench(LayerskipBackend(target), sampling, measuring.max_new_tokens)
    identity = [target.digest, prompts.digest, sampling.to_dict(), dataclasses.asdict(measuring), machine(target)]
    log = ResultLog(folder / f"measured-{digest(identity)[:12]}.jsonl")
    points = []
    masks = _masks(predictor, space, config.masks, config.seed)
    with tqdm(total=len(masks), unit="mask", desc="scan", disable=None) as bar:
        for first in range(0, len(masks), _AT_ONCE):
            bar.update(len(predictor.predict(masks[first : first + _AT_ONCE])))
    trial_seconds = []
    for mask in tqdm(masks, unit="mask", desc="decoding", disable=None):
        configs = {str(length): SpeculativeConfig("layer_skip", length, mask=mask.format()) for length in lengths}
        contenders = configs | {AGAIN: SpeculativeConfig()}
        name = f"{mask.format()} {lengths}"
        if name not in log:
            rows = list(bench.compare(contenders, prompts, measuring.repeats, config.seed))
            log.add(name, measured_figures(rows, list(configs)))
        for length, drafting in configs.items():
            speedup, rounds, seconds = log[name][length]
            trial_seconds.append(seconds)
            point = {"mask": mask.format(), "draft_length": int(length), "measured": speedup}
            # The prediction with the real rounds: its remaining error is that of the cost profile.
            from_real_rounds = predictor.profile.speedup(Counts.from_list(rounds), mask, drafting.stop)
            points.append(point | {"predicted": predictor.speedup(drafting), "predicted_from_real_rounds": from_real_rounds})
    record = (
        record_header(PREDICTIONS_SCHEMA, target)
        | {
            "prompts": {"count": len(prompts), "digest": prompts.digest},
            "max_new_tokens": measuring.max_new_tokens,
            "profile": predictor.profile.to_dict(),
            "scan": {"masks": len(masks), "seconds_per_mask": predictor.scan_seconds, "max_rows": predictor.max_rows},
            "trial_seconds": statistics.fmean(trial_seconds),
            "points": points,
        }
        | prediction_error(points)
    )
    print(_summary(record))
    if (cost := scan_cost(record)) is not None:
        record["scan"]["trials"] = cost
        print(
            f"scanning a mask takes {predictor.scan_seconds:.2f} s; {SCANNED_MASKS} scans cost as much as {cost:.1f} trials"
        )
    _save(record, Path(config.record or outputs / "predictions.json"))
    _judge(record, config)
    return record


def _check(config: DictConfig) -> None:
    check_seed(config.seed)
    check_whole("masks", config.masks)
    check_list("lengths", config.lengths, or_empty=False)
    for length in config.lengths:
        check_whole("lengths", length)


def _judge(record: Mapping[str, Any], config: DictConfig) -> None:
    """End the process with exit code 4 if a criterion is missed; null disables a criterion."""
    least_correlation, most_error, most_trials = (config[name] for name in _CRITERIA)
    missed = []
    if least_correlation is not None and not record["spearman"] >= least_correlation:  # NaN if all points are the same
        missed.append(f"a rank correlation of at least {least_correlation}")
    if most_error is not None and record["median_absolute_error"] > most_error:
        missed.append(f"a median absolute error of at most {most_error:.1%}")
    if most_trials is not None and record.get("scan", {}).get("trials", 0.0) > most_trials:
        missed.append(f"{SCANNED_MASKS} scans for at most {most_trials} trials")
    for criterion in missed:
        print(f"MISSED: {criterion}")
    if missed:
        sys.exit(NOT_CONFIRMED)


def _summary(record: Mapping[str, Any]) -> str:
    return (
        f"{len(record['points'])} predictions: Spearman's correlation {record['spearman']:.3f}, median absolute error "
        f"{record['median_absolute_error']:.1%}, mean error {record['mean_error']:+.1%}; with the real rounds, "
        f"median absolute error {record['median_absolute_error_from_real_rounds']:.1%}"
    )


def _save(record: Mapping[str, Any], path: Path) -> None:
    write_json(path, record)
    draw(record, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png')}")


def measured_figures(rows: Sequence[Mapping[str, Sample]], lengths: Sequence[str]) -> dict[str, list[Any]]:
    """Return the speedup, the round counts and the seconds of a trial of every draft length.

    All lengths are compared with the same plain decoding, so an error in its time affects them all. It is therefore measured
    twice, and speedups are relative to the mean of both times.
    """
    mean_baseline = statistics.fmean([1.0, 1 / Measurement.of(rows, BASELINE, AGAIN).speedup])  # over the first time
    measurements = {length: Measurement.of(rows, BASELINE, length) for length in lengths}
    return {
        length: [measurement.speedup * mean_baseline, _counts(measurement).to_list(), _trial_seconds(measurement)]
        for length, measurement in measurements.items()
    }


def _counts(measurement: Measurement) -> Counts:
    return count([one_round for sample in measurement.candidate for one_round in sample.stats.rounds])


def _trial_seconds(measurement: Measurement) -> float:
    """Return the seconds of decoding with one configuration and with plain decoding."""
    return sum(s.prefill_seconds + s.decode_seconds for s in (*measurement.baseline, *measurement.candidate))


def _masks(predictor: SpeedupPredictor, space: SearchSpace, count: int, seed: int) -> list[SkipMask]:
    """Return masks of several kinds in turn: empty, single sub-layers, contiguous runs, published and random ones."""
    source = random.Random(seed)
    layers, skippable = predictor.layers, list(space.skippable)
    empty = SkipMask.none(layers)
    parts = [(kind, layer) for layer in skippable for kind in ("attention", "mlp")]
    singles = [flip(empty, *part) for part in source.sample(parts, len(parts))]
    starts = [(first, length) for first in skippable for length in range(2, skippable[-1] - first + 2)]
    runs = [contiguous(layers, *pair) for pair in source.sample(starts, len(starts))]
    published = published_masks(layers, skippable)
    published = source.sample(published, len(published))
    scattered = []
    for number in range(count):
        mask = empty
        for part in source.sample(parts, 1 + number * len(parts) // (2 * count)):
            mask = flip(mask, *part)
        scattered.append(mask)
    kinds = [[empty], singles, runs, scattered, scattered[::-1], published]
    in_turn = [masks[turn] for turn in range(count) for masks in kinds if turn < len(masks)]
    return list(dict.fromkeys(in_turn))[:count]


if __name__ == "__main__":
    run("predictions", compare_predictions)
