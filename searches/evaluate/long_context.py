"""Memory and time of long contexts on small random models, and predictions between measured contexts.

Reads prompts of several lengths and decodes plainly after each. Peak memory is that of all tensors beside the weights, the
cache included; memory inside kernels is not seen. Then a cost profile of two contexts predicts speedups of layer skipping at
a third one, from the rounds of real decoding, so that the remaining error is that of the costs. Random weights suffice:
neither memory nor time depends on them. The exit code is 4 if a predicted speedup is wrong by more than ``max_error``.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from layerskip import Sampling, SkipMask, SpeculativeConfig, Target, build_drafter
from layerskip.costs.profile import Repeats, profile_costs
from layerskip.decoding.decode import Stops, decode
from layerskip.decoding.stats import DecodeStats
from layerskip.device.memory import AllocationCounter, release_memory
from layerskip.device.transfer import now
from layerskip.models.prefill import Prefill
from layerskip.scan.replay import count
from searches.app.application import run
from searches.app.checks import InputError, check_fraction, check_list
from searches.evaluate.criteria import Count, check_fields, conclude, random_target
from searches.predict.preparation import PROFILE_ERROR
from searches.results import record_header

_RECORDED = ("models", "sizes", "new_tokens", "repeats", "num_speculative_tokens")


def measure_long_contexts(config: DictConfig) -> None:
    """Measure and write the record. See ``conf/long_context.yaml``."""
    fields = ("new_tokens", "repeats", "predicted", "num_speculative_tokens", "lengths", "profiled")
    check_fields(config, dict.fromkeys(fields, 1))
    check_fraction("max_error", config.max_error)
    check_list("masks", config.masks, or_empty=False)
    if not min(config.profiled) < config.predicted < max(config.profiled):
        raise InputError(f"predicted: {config.predicted} is not between the contexts of profiled")
    given: Any = OmegaConf.to_container(config, resolve=True)
    targets = {
        name: random_target(given["sizes"] | model, config.dtype, config.device, config.seed, name, pack_weights=True)
        for name, model in given["models"].items()
    }
    lengths = sorted(config.lengths)
    rows = {name: [_measured(target, length, config) for length in lengths] for name, target in targets.items()}
    points = {name: _predictions(target, config) for name, target in targets.items()}
    errors = [abs(point["predicted"] / point["measured"] - 1) for name in points for point in points[name]]
    counts = [Count("greatest error of a predicted speedup", max(errors), maximum=config.max_error)]
    record = record_header("layerskip.long_context/1", next(iter(targets.values()))) | {
        **{name: given[name] for name in _RECORDED},
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
    steps = [_decoded(target, prompt, prefill, SpeculativeConfig(), config)[0] for _ in range(config.repeats)]
    step = statistics.median(steps) / config.new_tokens
    memory = f"{counter.peak / 2**20:.0f} MiB"
    print(f"{target.name}, {length} tokens: read in {seconds:.2f} s, then {step * 1000:.2f} ms per new token; {memory}")
    return {"tokens": length, "prefill_seconds": seconds, "step_seconds": step, "peak_bytes": counter.peak}


def _decoded(
    target: Target, prompt: Sequence[int], prefill: Prefill, drafting: SpeculativeConfig, config: DictConfig
) -> tuple[float, DecodeStats]:
    """Return the seconds of decoding after the prompt, and the rounds."""
    began: list[float] = []
    result = decode(
        target,
        build_drafter(drafting, target),
        prefill,
        Sampling(),
        config.new_tokens + 1,
        stops=Stops(frozenset()),
        callback=lambda _: began.append(now(target.device)),
    )
    return now(target.device) - began[0], result.stats


def _predictions(target: Target, config: DictConfig) -> list[dict[str, Any]]:
    """Return measured and predicted speedups of every mask after a prompt of ``predicted`` tokens."""
    length, repeats = config.num_speculative_tokens, Repeats(error=PROFILE_ERROR)
    contexts = sorted(config.profiled)
    shortest, *others = (profile_costs(target, context, length, repeats=repeats) for context in contexts)
    costs = replace(shortest, others=tuple(others)).at(config.predicted + config.new_tokens / 2)
    prompt = _prompt(target, config.predicted, config.seed)
    prefill = Prefill.of(target, prompt)
    contenders = {"": SpeculativeConfig()} | {
        mask: SpeculativeConfig("layer_skip", length, mask=mask) for mask in config.masks
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    rounds: dict[str, DecodeStats] = {}
    order = random.Random(config.seed)
    for repeat in range(config.repeats + 1):
        for name in order.sample(list(contenders), len(contenders)):
            taken, rounds[name] = _decoded(target, prompt, prefill, contenders[name], config)
            if repeat:  # the first repeat warms up
                seconds[name].append(taken)
    plain = statistics.median(seconds.pop(""))
    points = []
    for name, times in seconds.items():
        counts, mask, stop = count(rounds[name].rounds), SkipMask.parse(name, target.layers), contenders[name].stop
        predicted, from_shortest = (profile.speedup(counts, mask, stop) for profile in (costs, shortest))
        measured = plain / statistics.median(times)
        print(f"{target.name}, {name}: measured {measured:.3f}, predicted {predicted:.3f}")
        points.append({"mask": name, "measured": measured, "predicted": predicted, "from_shortest": from_shortest})
    return points


if __name__ == "__main__":
    run("long_context", measure_long_contexts, resumable=False)
