"""How well are speedups foretold? Predictions against real decoding, over many masks and draft lengths.

``python -m searches.evaluate.predictions`` scans masks of every make, decodes with each at several draft lengths on the same prompts,
and compares: Spearman's rank correlation, as a search needs the order, and the median absolute error. It works on any target
that can be scanned; what is measured is kept, and the same command goes on. ``records=[a.json,b.json]`` takes earlier runs
together. It ends with exit code 4 where a bar is missed.
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
from searches.app.application import NOT_SHOWN, run
from searches.app.checks import InputError, check_list, check_number, check_seed, check_whole
from searches.app.record_header import program_sources, record_header
from searches.app.resume_log import ResultLog
from searches.predict.mask_search import flip, published_masks
from searches.predict.mask_search import run as contiguous
from searches.predict.oracle import Oracle
from searches.predict.prediction_error import SCANNED, SCHEMA, agreement, draw, scan_cost, together
from searches.predict.preparation import ScanSettings, prepare_oracle
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, ModelBench
from searches.study.objective import MeasureSettings

AGAIN = "again"
_BARS = ("least_correlation", "most_error", "most_trials")
_AT_ONCE = 8  # masks between two steps of the progress bar


def foretell(config: DictConfig) -> dict[str, Any]:
    """Compare predictions with measurements; see ``conf/foretell.yaml``."""
    for bar in _BARS:
        if config[bar] is not None:
            check_number(bar, config[bar], or_zero=True)
    if config.records:
        return _taken_together(config)
    _check(config)
    measuring: MeasureSettings = instantiate(config.measure)
    scanning: ScanSettings = instantiate(config.scan)
    sampling: Sampling = instantiate(config.sampling)
    tune, _ = instantiate(config.prompts).split()
    prompts: PromptSet = tune.take(measuring.prompts)
    lengths = tuple(sorted(config.lengths))
    target: Target = instantiate(config.target)
    only = {"skip_length": (lengths[0], lengths[-1]), "stops": ["length"], "siblings": 0}
    space: SearchSpace = instantiate(config.space, layers=target.layers, **only)
    if space.bridged:
        raise InputError("space.bridges, space.draft_heads: this program skips emptily; searches.bridges has bridges")
    outputs = Path(config.outputs)
    folder = outputs / "foretold" / digest(program_sources())[:12]  # another version may count and measure otherwise
    oracle = prepare_oracle(
        target, prompts, sampling, measuring.max_new_tokens, space, scanning, outputs, folder, config.seed
    )
    if oracle is None:
        raise InputError("target: it cannot be scanned, so there is nothing to compare")
    bench = ModelBench(target, sampling, measuring.max_new_tokens)
    asked = [target.digest, prompts.digest, sampling.to_dict(), dataclasses.asdict(measuring), machine(target)]
    measured = ResultLog(folder / f"measured-{digest(asked)[:12]}.jsonl")
    points = []
    masks = _masks(oracle, space, config.masks, config.seed)
    with tqdm(total=len(masks), unit="mask", desc="scan", disable=None) as bar:
        for first in range(0, len(masks), _AT_ONCE):
            bar.update(len(oracle.predict(masks[first : first + _AT_ONCE])))
    trial_seconds = []
    for mask in tqdm(masks, unit="mask", desc="decoding", disable=None):
        configs = {str(length): SpeculativeConfig("layer_skip", length, mask=mask.format()) for length in lengths}
        contenders = configs | {AGAIN: SpeculativeConfig()}
        name = f"{mask.format()} {lengths}"
        if name not in measured:
            rows = list(bench.compare(contenders, prompts, measuring.repeats, config.seed))
            measured.add(name, figures(rows, list(configs)))
        for length, drafting in configs.items():
            speedup, rounds, seconds = measured[name][length]
            trial_seconds.append(seconds)
            point = {"mask": mask.format(), "draft_length": int(length), "measured": speedup}
            # What the prediction would have been, had it known the rounds: what is left of its error is the profile's.
            timed = oracle.profile.speedup(Counts.from_list(rounds), mask, drafting.stop)
            points.append(point | {"predicted": oracle.speedup(drafting), "predicted_from_real_rounds": timed})
    record = (
        record_header(SCHEMA, target)
        | {
            "prompts": {"count": len(prompts), "digest": prompts.digest},
            "max_new_tokens": measuring.max_new_tokens,
            "profile": oracle.profile.to_dict(),
            "scan": {"masks": len(masks), "seconds_per_mask": oracle.scan_seconds, "max_rows": oracle.max_rows},
            "trial_seconds": statistics.fmean(trial_seconds),
            "points": points,
        }
        | agreement(points)
    )
    print(_told(record))
    if (cost := scan_cost(record)) is not None:
        record["scan"]["trials"] = cost
        print(f"scanning a mask took {oracle.scan_seconds:.2f} s; {SCANNED} of them cost as much as {cost:.1f} real trials")
    _save(record, Path(config.record or outputs / "foretold.json"))
    _judge(record, config)
    return record


def _check(config: DictConfig) -> None:
    check_seed(config.seed)
    check_whole("masks", config.masks)
    check_list("lengths", config.lengths, or_empty=False)
    for length in config.lengths:
        check_whole("lengths", length)


def _judge(found: Mapping[str, Any], config: DictConfig) -> None:
    """End the process with 4 where a bar is missed; null is none."""
    least, most, dearest = (config[bar] for bar in _BARS)
    missed = []
    if least is not None and not found["spearman"] >= least:  # where all are the same there is no correlation
        missed.append(f"a rank correlation of at least {least}")
    if most is not None and found["median_absolute_error"] > most:
        missed.append(f"a median absolute error of at most {most:.1%}")
    if dearest is not None and found.get("scan", {}).get("trials", 0.0) > dearest:
        missed.append(f"{SCANNED} scans for at most {dearest} real trials")
    for bar in missed:
        print(f"MISSED: {bar}")
    if missed:
        sys.exit(NOT_SHOWN)


def _taken_together(config: DictConfig) -> dict[str, Any]:
    record = together(config.records)
    for found in record["runs"]:
        alone, beside = (found[name]["median_absolute_error"] for name in ("by_itself", "beside_the_mean"))
        print(f"{found['date']}: median absolute error {alone:.1%}, {beside:.1%} against the mean of all measurements")
    print(f"measured twice, a speedup differed by {record['median_difference']:.1%} in the median")
    print(_told(record))
    _save(record, Path(config.record or Path(config.outputs) / "foretold-together.json"))
    _judge(record, config)
    return record


def _told(found: Mapping[str, Any]) -> str:
    return (
        f"{len(found['points'])} predictions: Spearman's correlation {found['spearman']:.3f}, median absolute error "
        f"{found['median_absolute_error']:.1%}, mean error {found['mean_error']:+.1%}; had the rounds been known, "
        f"median absolute error {found['median_absolute_error_from_real_rounds']:.1%}"
    )


def _save(record: Mapping[str, Any], path: Path) -> None:
    write_json(path, record)
    draw(record, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png')}")


def figures(rows: Sequence[Mapping[str, Sample]], lengths: Sequence[str]) -> dict[str, list[Any]]:
    """Speedup, rounds and seconds of every draft length.

    All of them stand against plain decoding, and what disturbs a reading of it disturbs them all: it is read twice.
    """
    both = statistics.fmean([1.0, 1 / Measurement.of(rows, BASELINE, AGAIN).speedup])  # mean seconds, over the first's
    found = {length: Measurement.of(rows, BASELINE, length) for length in lengths}
    return {length: [part.speedup * both, _counts(part).to_list(), _seconds(part)] for length, part in found.items()}


def _counts(measurement: Measurement) -> Counts:
    return count([found for sample in measurement.candidate for found in sample.stats.rounds])


def _seconds(measurement: Measurement) -> float:
    """What a trial of one configuration takes: its decodings and the baseline's."""
    return sum(s.prefill_seconds + s.decode_seconds for s in (*measurement.baseline, *measurement.candidate))


def _masks(oracle: Oracle, space: SearchSpace, count: int, seed: int) -> list[SkipMask]:
    """Masks of every make, in turn: nothing, single skips, runs, published ones, and random ones of many sizes."""
    source = random.Random(seed)
    layers, skippable = oracle.layers, list(space.skippable)
    nothing = SkipMask.none(layers)
    parts = [(kind, layer) for layer in skippable for kind in ("attention", "mlp")]
    singles = [flip(nothing, *part) for part in source.sample(parts, len(parts))]
    starts = [(first, length) for first in skippable for length in range(2, skippable[-1] - first + 2)]
    runs = [contiguous(layers, *pair) for pair in source.sample(starts, len(starts))]
    published = source.sample(found := published_masks(layers, skippable), len(found))
    scattered = []
    for number in range(count):
        mask = nothing
        for part in source.sample(parts, 1 + number * len(parts) // (2 * count)):
            mask = flip(mask, *part)
        scattered.append(mask)
    makes = [[nothing], singles, runs, scattered, scattered[::-1], published]
    turns = [make[turn] for turn in range(count) for make in makes if turn < len(make)]
    return list(dict.fromkeys(turns))[:count]


if __name__ == "__main__":
    run("foretell", foretell)
