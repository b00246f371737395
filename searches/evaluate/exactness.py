"""Exactness of scans: every round that a scan predicts against every round of real decoding.

Usage: ``python -m searches.evaluate.exactness [field=value]``

Scans random masks over all tune prompts and decodes with each of them, with every draft length and stop threshold. Compares
the rounds, their drafted and accepted tokens, and the output with that of plain decoding. The exit code is 4 if anything
differs, which must not happen in float32. Works on any target that can be scanned.

The same command resumes: results are kept prompt by prompt until program, versions or machine change. Several processes with
the same command share the masks.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from layerskip import SkipMask, SpeculativeConfig, Target
from layerskip.decoding.checkpoint_settings import default_sampling
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.stats import Round
from layerskip.drafters.registry import build_drafter
from layerskip.files import digest, write_json
from layerskip.models.environment import machine
from layerskip.models.prefill import Prefill
from layerskip.rules import StopRule
from layerskip.scan.scan import Scanner, lowest_threshold
from layerskip.texts.continuations import continue_prompts
from searches.app.application import NOT_CONFIRMED, run
from searches.app.checks import InputError, check_list, check_number, check_seed, check_whole
from searches.app.file_lock import share_work
from searches.app.record_header import program_sources, record_header
from searches.app.resume_log import ResultLog

_COUNTS = ("decodings", "rounds", "drafted", "accepted")

Setting = tuple[int, StopRule]
"""Draft length and stop rule."""


def exactness(config: DictConfig) -> dict[str, Any]:
    """Compare scans with real decoding and return the record. See ``conf/exactness.yaml``."""
    _check(config)
    settings = list(itertools.product(config.lengths, [StopRule("threshold", value) for value in config.thresholds]))
    tune, _ = instantiate(config.prompts).split()
    prompts = tune if config.count is None else tune.take(config.count)
    target: Target = instantiate(config.target)
    masks = random_masks(target.layers, config.masks, config.shares, config.seed)
    outputs, new = Path(config.outputs), config.max_new_tokens
    sampling = default_sampling(target)  # scans predict single rounds for greedy decoding only
    with tqdm(total=len(prompts), unit="prompt", desc="continuations", disable=None) as bar:
        continuations = continue_prompts(target, prompts, sampling, new, 0, outputs / "continuations", bar.update)
    scanner = Scanner(target, continuations, sampling, depth=max(config.lengths))
    scanner.check()
    identity = [
        program_sources(),
        target.digest,
        machine(target),
        prompts.digest,
        new,
        [(length, stop.to_dict()) for length, stop in settings],
    ]
    folder = outputs / "exactness" / digest(identity)[:12]
    files = {mask: folder / f"{digest(mask.format())[:16]}.jsonl" for mask in masks}
    with tqdm(total=len(masks) * len(continuations), unit="prompt", desc="decoding", disable=None) as bar:
        results = share_work(files, lambda mask: _compare(scanner, mask, settings, ResultLog(files[mask]), bar))
    record = record_header("layerskip.exactness/1", target) | {
        "prompts": {"count": len(prompts), "digest": prompts.digest},
        "max_new_tokens": new,
        "draft_lengths": list(config.lengths),
        "thresholds": list(config.thresholds),
        "masks": [{"mask": m.format()} | {name: sum(row[name] for row in results[m]) for name in _COUNTS} for m in masks],
        "differing": [{"mask": m.format()} | case for m in masks for row in results[m] for case in row["differing"]],
    }
    path = Path(config.record or outputs / "exactness.json")
    write_json(path, record)
    decodings, rounds, drafted, accepted = (sum(row[name] for row in record["masks"]) for name in _COUNTS)
    sizes = f"{len(masks)} masks, {len(settings)} pairs of draft length and threshold, {len(continuations)} prompts"
    print(f"{sizes}: {decodings} decodings with {rounds} rounds, {drafted} drafted and {accepted} accepted tokens")
    print(f"{len(record['differing'])} of the decodings differ from their scans")
    print(f"wrote {path}")
    if record["differing"]:
        sys.exit(NOT_CONFIRMED)
    return record


def _check(config: DictConfig) -> None:
    check_seed(config.seed)
    check_whole("masks", config.masks)
    check_whole("max_new_tokens", config.max_new_tokens, 2)
    if config.count is not None:
        check_whole("count", config.count)
    for name in ("lengths", "thresholds", "shares"):
        check_list(name, config[name], or_empty=False)
        for value in config[name]:
            if name == "lengths":
                check_whole(name, value)
                check_whole("max_new_tokens", config.max_new_tokens, value + 2)  # or no draft reaches this length
            else:
                check_number(name, value, most=1.0)


def _compare(
    scanner: Scanner, mask: SkipMask, settings: Sequence[Setting], log: ResultLog, bar: tqdm
) -> list[dict[str, Any]]:
    """Compare the scan of one mask with decoding, and return one result per continuation. Finished ones are in ``log``."""
    indices = range(len(scanner.continuations))
    missing = [index for index in indices if str(index) not in log]
    bar.update(len(indices) - len(missing))
    if missing:
        (scan,) = scanner.scan([mask], floor=lowest_threshold(stop for _, stop in settings))
        predicted = {setting: scanner.rounds(scan, *setting) for setting in settings}
        drafters = {
            (length, stop): build_drafter(
                SpeculativeConfig("layer_skip", length, mask=mask.format(), stop=stop), scanner.target
            )
            for length, stop in settings
        }
        for index in missing:
            rounds = {setting: predicted[setting][index] for setting in settings}
            log.add(str(index), _decode(scanner, index, rounds, drafters))
            bar.update()
    return [log[str(index)] for index in indices]


def _decode(
    scanner: Scanner, index: int, predicted: Mapping[Setting, list[Round]], drafters: Mapping[Setting, Drafter]
) -> dict[str, Any]:
    """Decode one prompt with every drafter, and count the rounds and the differences from the prediction."""
    continuation, rounds, differing = scanner.continuations[index], list[Round](), []
    target, new, prefill = scanner.target, continuation.max_new_tokens, Prefill.of(scanner.target, continuation.prompt)
    for (length, stop), drafter in drafters.items():
        result = decode(target, drafter, continuation.prompt, scanner.sampling, new, prefill=prefill)
        rounds += result.stats.rounds
        same = tuple(result.tokens) == continuation.tokens
        if list(result.stats.rounds) != predicted[length, stop] or not same:
            differing.append(
                {"prompt": continuation.prompt_id, "draft_length": length, "threshold": stop.threshold, "output": same}
            )
    counts = len(drafters), len(rounds), sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    return dict(zip(_COUNTS, counts, strict=True)) | {"differing": differing}


def random_masks(layers: int, count: int, shares: Sequence[float], seed: int) -> list[SkipMask]:
    """Draw ``count`` different masks that skip something.

    Args:
        layers: number of layers.
        count: number of masks.
        shares: probabilities of skipping a sub-layer; every mask uses one of them.
        seed: seed of the draw.

    Raises:
        InputError: there are not enough different masks.
    """
    source, masks = random.Random(seed), dict[SkipMask, None]()
    for _ in range(1000 * count):
        share = source.choice(shares)
        mask = SkipMask(*(tuple(source.random() < share for _ in range(layers)) for _ in range(2)))
        if mask != SkipMask.none(layers):
            masks[mask] = None
        if len(masks) == count:
            return list(masks)
    raise InputError(f"masks: there are no {count} different masks of {layers} layers with shares {list(shares)}")


if __name__ == "__main__":
    run("exactness", exactness)
