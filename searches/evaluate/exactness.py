"""Are scans exact? Every round that a scan foretells against every round of the real decoder.

``python -m searches.evaluate.exactness`` scans random masks over all tune prompts, decodes each of them with every draft length and
stop threshold, and compares rounds, drafted and accepted tokens one by one, and the output with plain decoding's. In float32
no round may differ, or the exit code is 4. It works on any target that can be scanned; every prompt of a mask is kept as it
ends, as long as program, versions and machine stay as they are, and the same command goes on, also twice at once: each
process takes masks that no other is at.
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

from layerskip import Sampling, SkipMask, SpeculativeConfig, Target
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.stats import Round
from layerskip.drafters.registry import build_drafter
from layerskip.files import digest, write_json
from layerskip.models.environment import machine
from layerskip.models.prefill import Prefill
from layerskip.rules import StopRule
from layerskip.scan.scan import Scanner, floor_of
from layerskip.texts.continuations import continue_prompts
from searches.app.application import NOT_SHOWN, run
from searches.app.checks import InputError, check_list, check_number, check_seed, check_whole
from searches.app.file_lock import share_work
from searches.app.record_header import program_sources, record_header
from searches.app.resume_log import ResultLog

_COUNTS = ("decodings", "rounds", "drafted", "accepted")

Pair = tuple[int, StopRule]


def exactness(config: DictConfig) -> dict[str, Any]:
    """Compare scans with the real decoder, round by round; see ``conf/exactness.yaml``."""
    _check(config)
    pairs = list(itertools.product(config.lengths, [StopRule("threshold", value) for value in config.thresholds]))
    tune, _ = instantiate(config.prompts).split()
    prompts = tune if config.count is None else tune.take(config.count)
    target: Target = instantiate(config.target)
    masks = random_masks(target.layers, config.masks, config.shares, config.seed)
    outputs, new = Path(config.outputs), config.max_new_tokens
    # Single rounds are known for greedy decoding only.
    with tqdm(total=len(prompts), unit="prompt", desc="continuations", disable=None) as bar:
        continuations = continue_prompts(target, prompts, Sampling(), new, 0, outputs / "continuations", bar.update)
    scanner = Scanner(target, continuations, Sampling(), depth=max(config.lengths))
    scanner.check()
    asked = [
        program_sources(),  # what another program compared says nothing of this one
        target.digest,
        machine(target),
        prompts.digest,
        new,
        [(length, stop.to_dict()) for length, stop in pairs],
    ]
    folder = outputs / "exactness" / digest(asked)[:12]
    files = {mask: folder / f"{digest(mask.format())[:16]}.jsonl" for mask in masks}
    with tqdm(total=len(masks) * len(continuations), unit="prompt", desc="decoding", disable=None) as bar:
        found = share_work(files, lambda mask: _compare(scanner, mask, pairs, ResultLog(files[mask]), bar))
    record = record_header("layerskip.exactness/1", target) | {
        "prompts": {"count": len(prompts), "digest": prompts.digest},
        "max_new_tokens": new,
        "draft_lengths": list(config.lengths),
        "thresholds": list(config.thresholds),
        "masks": [{"mask": m.format()} | {name: sum(row[name] for row in found[m]) for name in _COUNTS} for m in masks],
        "differing": [{"mask": m.format()} | case for m in masks for row in found[m] for case in row["differing"]],
    }
    path = Path(config.record or outputs / "exactness.json")
    write_json(path, record)
    decodings, rounds, drafted, accepted = (sum(row[name] for row in record["masks"]) for name in _COUNTS)
    every = f"{len(masks)} masks, {len(pairs)} pairs of draft length and threshold, {len(continuations)} prompts"
    print(f"{every}: {decodings} decodings of {rounds} rounds, {drafted} drafted and {accepted} accepted tokens")
    print(f"{len(record['differing'])} of the decodings differ from their scans")
    print(f"wrote {path}")
    if record["differing"]:
        sys.exit(NOT_SHOWN)
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
                check_whole("max_new_tokens", config.max_new_tokens, value + 2)  # else no draft is as long
            else:
                check_number(name, value, most=1.0)


def _compare(scanner: Scanner, mask: SkipMask, pairs: Sequence[Pair], kept: ResultLog, bar: tqdm) -> list[dict[str, Any]]:
    """What decoding every continuation with a mask took, and where that is not what its scan says; kept continuation by continuation."""
    every = range(len(scanner.continuations))
    missing = [index for index in every if str(index) not in kept]
    bar.update(len(every) - len(missing))
    if missing:
        (scan,) = scanner.scan([mask], floor=floor_of(stop for _, stop in pairs))
        foretold = {pair: scanner.rounds(scan, *pair) for pair in pairs}
        configs = {pair: SpeculativeConfig("layer_skip", pair[0], mask=mask.format(), stop=pair[1]) for pair in pairs}
        drafters = {pair: build_drafter(drafting, scanner.target) for pair, drafting in configs.items()}
        for index in missing:
            kept.add(
                str(index), _decode(scanner, index, {pair: rounds[index] for pair, rounds in foretold.items()}, drafters)
            )
            bar.update()
    return [kept[str(index)] for index in every]


def _decode(
    scanner: Scanner, index: int, foretold: Mapping[Pair, list[Round]], drafters: Mapping[Pair, Drafter]
) -> dict[str, Any]:
    """Decode one continuation really, with every pair of draft length and stop rule."""
    continuation, rounds, differing = scanner.continuations[index], list[Round](), []
    target, new, prefill = scanner.target, continuation.max_new_tokens, Prefill.of(scanner.target, continuation.prompt)
    for (length, stop), drafter in drafters.items():
        out = decode(target, drafter, continuation.prompt, scanner.sampling, new, prefill=prefill)
        rounds += out.stats.rounds
        same = tuple(out.tokens) == continuation.tokens
        if list(out.stats.rounds) != foretold[length, stop] or not same:
            differing.append(
                {"prompt": continuation.prompt_id, "draft_length": length, "threshold": stop.threshold, "output": same}
            )
    counts = len(drafters), len(rounds), sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    return dict(zip(_COUNTS, counts, strict=True)) | {"differing": differing}


def random_masks(layers: int, count: int, shares: Sequence[float], seed: int) -> list[SkipMask]:
    """Different masks that skip something, each sub-layer of a mask with the same chance out of ``shares``.

    Raises:
        InputError: so many are not found.
    """
    source, found = random.Random(seed), dict[SkipMask, None]()
    for _ in range(1000 * count):
        share = source.choice(shares)
        mask = SkipMask(*(tuple(source.random() < share for _ in range(layers)) for _ in range(2)))
        if mask != SkipMask.none(layers):
            found[mask] = None
        if len(found) == count:
            return list(found)
    raise InputError(f"masks: no {count} different ones of {layers} layers were found with shares {list(shares)}")


if __name__ == "__main__":
    run("exactness", exactness)
