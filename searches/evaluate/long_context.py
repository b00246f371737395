"""Memory and time of long contexts on small random models, and predictions between measured contexts.

Reads prompts of several lengths and decodes plainly after each. Peak memory is that of all tensors beside the weights, the
cache included; memory inside kernels is not seen. Then a cost profile of two contexts predicts speedups of layer skipping at
a third one, from the rounds of real decoding, so that the remaining error is that of the costs. Random weights suffice:
neither memory nor time depends on them. The exit code is 4 if a predicted speedup is wrong by more than ``max_error``.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from layerskip import Sampling, SkipMask, SpeculativeConfig, Target, build_drafter
from layerskip.costs.profile import Repeats, profile_costs
from layerskip.decoding.decode import decode
from layerskip.decoding.stats import DecodeStats
from layerskip.device.memory import AllocationCounter, release_memory
from layerskip.device.transfer import now
from layerskip.models.prefill import Prefill
from layerskip.scan.replay import count
from searches.app.application import run
from searches.app.checks import InputError, check_list
from searches.evaluate.criteria import Count, check_fields, conclude, random_target
from searches.predict.preparation import PROFILE_ERROR
from searches.results import record_header


def measure_long_contexts(config: DictConfig) -> None:
    """Measure and write the record. See ``conf/long_context.yaml``."""
    fields = ("new_tokens", "repeats", "predicted", "num_speculative_tokens", "lengths", "profiled")
    check_fields(config, dict.fromkeys(fields, 1), ("max_error",))
    check_list("masks", config.masks, or_empty=False)
    if not min(config.profiled) < config.predicted < max(config.profiled):
        raise InputError(f"predicted: {config.predicted} is not between the contexts of profiled")
    given: Any = OmegaConf.to_container(config, resolve=True)
    targets = []
    for name, model in given["models"].items():
        made = random_target(given["sizes"] | model, config.dtype, config.device, config.seed)
        targets.append(replace(made, name=name, pack_weights=True))
    rows = {target.name: [_measured(target, length, config) for length in sorted(config.lengths)] for target in targets}
    points = {target.name: _predictions(target, config) for target in targets}
    errors = [abs(point["predicted"] / point["measured"] - 1) for found in points.values() for point in found]
    counts = [Count("greatest error of a predicted speedup", max(errors), maximum=config.max_error)]
    record = record_header("layerskip.long_context/1", targets[0]) | {
        "new_tokens": config.new_tokens,
        "repeats": config.repeats,
        "num_speculative_tokens": config.num_speculative_tokens,
        "rows": rows,
        "predicted_context": config.predicted,
        "profiled_contexts": given["profiled"],
        "points": points,
    }
    conclude(config, "long-context.json", record, counts)


def _prompt(target: Target, length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, target.vocabulary), k=length)


def _measured(target: Target, length: int, config: DictConfig) -> dict[str, Any]:
    """Return the seconds of reading a prompt and of a step after it, and the peak memory of both."""
    prompt = _prompt(target, length, config.seed)
    release_memory()
    with AllocationCounter([target.model]) as counter:
        start = now(target.device)
        prefill = Prefill.of(target, prompt)
        seconds = now(target.device) - start
    steps = [_decoded(target, prefill, SpeculativeConfig(), config.new_tokens)[0] for _ in range(config.repeats)]
    step = statistics.median(steps) / config.new_tokens
    memory = f"{counter.peak / 2**20:.0f} MiB"
    print(f"{target.name}, {length} tokens: read in {seconds:.2f} s, then {step * 1000:.2f} ms per new token; {memory}")
    return {"tokens": length, "prefill_seconds": seconds, "step_seconds": step, "peak_bytes": counter.peak}


def _decoded(target: Target, prefill: Prefill, drafting: SpeculativeConfig, tokens: int) -> tuple[float, DecodeStats]:
    """Return the seconds of decoding tokens after the first one, which belongs to the prompt, and the rounds."""
    drafter, began = build_drafter(drafting, target), list[float]()
    result = decode(target, drafter, prefill, Sampling(), tokens + 1, callback=lambda _: began.append(now(target.device)))
    return now(target.device) - began[0], result.stats


def _predictions(target: Target, config: DictConfig) -> list[dict[str, Any]]:
    """Return measured and predicted speedups of every mask after a prompt of ``predicted`` tokens."""
    length, repeats = config.num_speculative_tokens, Repeats(error=PROFILE_ERROR)
    shortest, *others = (profile_costs(target, context, length, repeats=repeats) for context in sorted(config.profiled))
    costs = replace(shortest, others=tuple(others)).at(config.predicted + config.new_tokens / 2)
    prefill = Prefill.of(target, _prompt(target, config.predicted, config.seed))
    contenders = {mask: SpeculativeConfig("layer_skip", length, mask=mask) for mask in config.masks}
    contenders["plain"] = SpeculativeConfig()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    rounds: dict[str, DecodeStats] = {}
    order = random.Random(config.seed)
    for repeat in range(config.repeats + 1):
        for name in order.sample(list(contenders), len(contenders)):
            taken, rounds[name] = _decoded(target, prefill, contenders[name], config.new_tokens)
            if repeat:  # the first repeat warms up
                seconds[name].append(taken)
    points = []
    for name in config.masks:
        counts, mask = count(rounds[name].rounds), SkipMask.parse(name, target.layers)
        predicted = costs.speedup(counts, mask, contenders[name].stop)
        measured = statistics.median(seconds["plain"]) / statistics.median(seconds[name])
        print(f"{target.name}, {name}: measured {measured:.3f}, predicted {predicted:.3f}")
        points.append({"mask": name, "measured": measured, "predicted": predicted})
    return points


if __name__ == "__main__":
    run("long_context", measure_long_contexts, resumable=False)
