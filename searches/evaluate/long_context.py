"""Memory and time of long contexts on small random models.

Reads prompts of several lengths and decodes plainly after each. Peak memory is that of all tensors beside the weights, the
cache included; memory inside kernels is not seen. Random weights suffice: neither memory nor time depends on them.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from layerskip import Sampling, SpeculativeConfig, Target, build_drafter
from layerskip.decoding.decode import decode
from layerskip.device.memory import AllocationCounter, release_memory
from layerskip.device.transfer import now
from layerskip.models.prefill import Prefill
from searches.app.application import run
from searches.evaluate.criteria import check_fields, conclude, random_target
from searches.results import record_header


def measure_long_contexts(config: DictConfig) -> None:
    """Measure and write the record. See ``conf/long_context.yaml``."""
    check_fields(config, dict.fromkeys(("new_tokens", "repeats", "lengths"), 1))
    given: Any = OmegaConf.to_container(config, resolve=True)
    targets = []
    for name, model in given["models"].items():
        made = random_target(given["sizes"] | model, config.dtype, config.device, config.seed)
        targets.append(replace(made, name=name, pack_weights=True))
    rows = {target.name: [_measured(target, length, config) for length in sorted(config.lengths)] for target in targets}
    sizes = {"new_tokens": config.new_tokens, "repeats": config.repeats}
    record = record_header("layerskip.long_context/1", targets[0]) | sizes | {"rows": rows}
    conclude(config, "long-context.json", record, [])


def _measured(target: Target, length: int, config: DictConfig) -> dict[str, Any]:
    """Return the seconds of reading a prompt and of a step after it, and the peak memory of both."""
    prompt = random.Random(config.seed).choices(range(3, target.vocabulary), k=length)
    release_memory()
    with AllocationCounter([target.model]) as counter:
        start = now(target.device)
        prefill = Prefill.of(target, prompt)
        seconds = now(target.device) - start
    step = statistics.median(_decode(target, prefill, config.new_tokens) for _ in range(config.repeats)) / config.new_tokens
    memory = f"{counter.peak / 2**20:.0f} MiB"
    print(f"{target.name}, {length} tokens: read in {seconds:.2f} s, then {step * 1000:.2f} ms per new token; {memory}")
    return {"tokens": length, "prefill_seconds": seconds, "step_seconds": step, "peak_bytes": counter.peak}


def _decode(target: Target, prefill: Prefill, tokens: int) -> float:
    """Return the seconds of decoding tokens after the first one, which belongs to the prompt."""
    drafter, began = build_drafter(SpeculativeConfig(), target), list[float]()
    decode(target, drafter, prefill, Sampling(), tokens + 1, callback=lambda _: began.append(now(target.device)))
    return now(target.device) - began[0]


if __name__ == "__main__":
    run("long_context", measure_long_contexts, resumable=False)
