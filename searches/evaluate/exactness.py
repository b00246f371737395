"""Exactness of scans: every round that a scan predicts against every round of real decoding.

Scans random masks, or plans in which what is not skipped has random formats, over all tune prompts. Decodes with each of
them, with every draft length and stop threshold. Compares the rounds, their drafted and accepted tokens, and the output with
that of plain decoding. The exit code is 4 if anything differs, which must not happen in float32. Works on any target that
can be scanned. The same command resumes, mask by mask.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from layerskip import DraftPlan, Target
from layerskip.config import StopRule
from layerskip.decoding.checkpoint_settings import default_sampling
from layerskip.decoding.decode import decode
from layerskip.draft_plan import BITS
from layerskip.drafters.registry import build_drafter
from layerskip.models.environment import machine
from layerskip.models.packing import refuse_quantized
from layerskip.models.prefill import Prefill
from layerskip.scan.scan import Scanner
from layerskip.texts.continuations import continue_prompts
from searches.app.application import run
from searches.app.checks import InputError, check_list, check_number, check_whole
from searches.evaluate.criteria import Count, check_fields, conclude, resume
from searches.predict.mask_search import drafting_with
from searches.progress import counting
from searches.results import record_header


def exactness(config: DictConfig) -> None:
    """Compare scans with real decoding and write the record. See ``conf/exactness.yaml``."""
    check_fields(config, {"masks": 1, "lengths": 1} | ({} if config.count is None else {"count": 1}))
    check_whole("max_new_tokens", config.max_new_tokens, max(config.lengths) + 2)  # or no draft reaches this length
    for name in ("thresholds", "shares"):
        check_list(name, config[name], or_empty=False)
        for value in config[name]:
            check_number(name, value, maximum=1.0)
    check_list("formats", config.formats, tuple(BITS))
    tune, _ = instantiate(config.prompts).split()
    prompts, new = tune.take(config.count), config.max_new_tokens
    target: Target = instantiate(config.target)
    if config.formats and (reason := refuse_quantized(target.model)):
        raise InputError(f"formats: {reason}")
    masks = random_masks(target.layers, range(target.layers), config.masks, config.shares, config.seed, config.formats)
    if len(masks) < config.masks:
        raise InputError(f"masks: there are no {config.masks} different ones of {target.layers} layers with these shares")
    sampling = default_sampling(target)  # scans predict single rounds for greedy decoding only
    with counting(len(prompts), "prompts", "continuations") as count:
        folder = Path(config.outputs) / "continuations"
        continuations = continue_prompts(target, prompts, sampling, new, 0, folder, count)
    scanner = Scanner(target, continuations, sampling, depth=max(config.lengths))
    scanner.check()
    lengths, thresholds = list(config.lengths), list(config.thresholds)
    jobs = {mask.format(): partial(_compare, scanner, mask, lengths, thresholds) for mask in masks}
    identity = [target.digest, machine(target), prompts.digest, new, lengths, thresholds]
    rows = [{"mask": mask, **row} for mask, row in resume(config, "exactness", identity, jobs, "mask").items()]
    differing = [{"mask": row["mask"], **case} for row in rows for case in row.pop("differing")]
    record = record_header("layerskip.exactness/1", target) | {
        "prompts": {"count": len(prompts), "digest": prompts.digest},
        "max_new_tokens": new,
        "draft_lengths": lengths,
        "thresholds": thresholds,
        "masks": rows,
        "differing": differing,
    }
    decodings = sum(row["decodings"] for row in rows)
    counts = [Count("decodings that differ from their scans", len(differing), decodings, maximum=0)]
    conclude(config, "exactness.json", record, counts)


def _compare(scanner: Scanner, mask: DraftPlan, lengths: Sequence[int], thresholds: Sequence[float]) -> dict[str, Any]:
    """Decode every prompt with a mask and every setting; return the counts, and what differs from the scan."""
    stops = [StopRule("threshold", value) for value in thresholds]
    (scan,) = scanner.scan([mask], floor=min(thresholds))
    counted, differing = Counter[str](), []
    prefills = [Prefill.of(scanner.target, continuation.prompt) for continuation in scanner.continuations]
    for length, stop in itertools.product(lengths, stops):
        drafter = build_drafter(drafting_with(mask, length, stop), scanner.target)
        every = zip(scanner.continuations, prefills, scanner.rounds(scan, length, stop), strict=True)
        for continuation, prefill, predicted in every:
            result = decode(scanner.target, drafter, prefill, scanner.sampling, continuation.max_new_tokens)
            rounds, same = list(result.stats.rounds), tuple(result.tokens) == continuation.tokens
            counted.update(decodings=1, rounds=len(rounds))
            counted.update(drafted=sum(r.drafted for r in rounds), accepted=sum(r.accepted for r in rounds))
            if rounds != predicted or not same:
                case = {"prompt": continuation.prompt_id, "num_speculative_tokens": length, "threshold": stop.threshold}
                differing.append(case | {"output": same})
    return dict(counted) | {"differing": differing}


def random_masks(
    layers: int, skippable: Sequence[int], count: int, shares: Sequence[float], seed: int, formats: Sequence[str] = ()
) -> list[DraftPlan]:
    """Draw ``count`` different masks that skip something, or as many as are found; each skips one of some shares.

    With ``formats``, each sub-layer that is not skipped has one of them, and so has the output layer.
    """
    source, masks = random.Random(seed), dict[DraftPlan, None]()
    for _ in range(1000 * count):
        share = source.choice(shares)
        mask = DraftPlan.of(layers, *({layer for layer in skippable if source.random() < share} for _ in range(2)))
        if mask != DraftPlan.none(layers):
            if formats:
                attention, mlp = (tuple(BITS[source.choice(formats)] for _ in range(layers)) for _ in range(2))
                mask = replace(mask, attention_bits=attention, mlp_bits=mlp, head_bits=BITS[source.choice(formats)])
            masks[mask] = None
        if len(masks) == count:
            break
    return list(masks)


if __name__ == "__main__":
    run("exactness", exactness)
