"""Decoding on a GPU, measured in at most six minutes and written as one record.

- ``plain``: plain decoding of the target and of random Llamas of 1B, 3B and 8B, as a share of what the memory bandwidth
  allows, and beside transformers' ``generate``, with its dynamic and its compiled static cache.
- ``drafters``: every drafter on the target, beside plain decoding; and plain decoding with and without compiled layers.
- ``verification``: the target's pass over up to 64 tokens, as a chain and as a tree, beside a step of plain decoding.

Several parts are run one by one, each in a process of its own for at most its ``seconds``, so that one that hangs or crashes
leaves the others. Every finished row is kept. An error is written into the record, the other parts are run, and the exit
code is 1. Runs on a CPU, too.

A pass over one token reads every weight and the cache of all tokens before it. No pass is faster than this reading, at the
bandwidth that a large copy on the device reaches: the floor. No metric of a data sheet is used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from layerskip import Measurement, PromptSet, Sampling, SpeculativeConfig, Target
from layerskip.costs.timing import time_tree, time_verification
from layerskip.device.memory import is_out_of_memory, release_memory, total_bytes
from layerskip.device.transfer import now
from layerskip.files import read_json, write_json
from layerskip.measure.measure import Contender, Decoder, Task, interleave
from layerskip.models.cache import KVCache
from layerskip.models.compiled_layers import compile_mode, compiled_layers
from layerskip.models.forward import forward
from layerskip.models.graph_capture import capture_seconds
from layerskip.models.skip_view import decoding_view, shared_copy
from searches.app.application import BAD_INPUT, run
from searches.app.checks import check_list, check_number
from searches.app.composition import literal
from searches.benchmark.contenders import BASELINE, build_contenders, fill_defaults
from searches.benchmark.peers import Peer
from searches.evaluate.criteria import check_fields, random_target
from searches.results import record_header

Row = dict[str, Any]
_COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes of the copied buffer; beyond any cache
_COPIES = 20  # of a timing, so that reading the clock does not count
_PEERS = {"transformers": "plain", "transformers_static": "static"}


class Part:
    """A part that is run: its device, and the rows that it has reported."""

    def __init__(self, config: DictConfig, record: dict[str, Any], name: str, path: Path) -> None:
        self.config, self._record, self._path = config, record, path
        self.target: Target = instantiate(config.target)
        device = self.device = self.target.device
        cuda = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        self.bandwidth, self.rows = copy_bandwidth(device), dict[str, Row]()
        record |= record_header("layerskip.gpu/1", self.target) | {"parts": {name: {"rows": self.rows}}}
        record["device"] = {
            "type": device.type,
            "device": str(device),
            "bandwidth": self.bandwidth,
            "dtype": self.target.dtype,
            "name": cuda.name if cuda else platform.machine(),
            "processors": os.cpu_count(),
            "memory_bytes": cuda.total_memory if cuda else total_bytes(),
        }

    def attempt(self, name: str, measure: Callable[[], Row]) -> None:
        """Measure one row, print it and write the record. An error becomes the row, and what it held is freed."""
        print(f"{name} ...", flush=True)
        row: Row | None = None
        try:
            row = measure()
        except Exception as error:
            line = f"{type(error).__name__}: {' '.join(str(error).split())}"
            failed = {"left_out": "out of memory"} if is_out_of_memory(error) else {"error": line[:300]}
            traceback.print_exc()  # the record has one line of it
        if row is None:
            row = failed
            release_memory()  # after the except block, because the error keeps its frames
        numbers = {key: value for key, value in row.items() if isinstance(value, float)}
        row = self.rows[name] = row | {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        print(f"{name}: {', '.join(f'{key} {_shown(value)}' for key, value in row.items())}", flush=True)
        write_json(self._path, self._record)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@torch.inference_mode()
def copy_bandwidth(device: torch.device) -> float:
    """Return the memory bandwidth in bytes per second: that of the fastest large copy, with reads and writes counted."""
    source = torch.zeros(_COPIED.get(device.type, _COPIED["cuda"]), dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    copy.copy_(source)  # the first touch of the pages is slower
    fastest = math.inf
    for _ in range(5):
        start = now(device)
        for _ in range(_COPIES):
            copy.copy_(source)
        fastest = min(fastest, (now(device) - start) / _COPIES)
    return 2 * source.nbytes / fastest


@torch.inference_mode()
def floor_of(target: Target) -> Row:
    """Return the bytes that a pass over one token reads: ``weight_bytes``, and ``cache_bytes`` per token before it.

    An input embedding that is not the output layer, too, is not counted, because a pass reads one row of it.
    """
    model: Any = target.model
    cache = KVCache(target.layers, 1, device=target.device)
    forward(model, torch.zeros(1, dtype=torch.int64, device=target.device), cache, last=1)
    embedding = model.get_input_embeddings().weight
    unread = 0 if embedding is model.get_output_embeddings().weight else embedding.nbytes
    return {"weight_bytes": sum(weight.nbytes for weight in model.parameters()) - unread, "cache_bytes": cache.nbytes}


def floor_tokens_per_second(floor: Mapping[str, float], context: float, bandwidth: float) -> float:
    """Return the tokens per second of plain decoding at which reading alone takes all the time.

    ``context`` is the mean number of tokens in the cache, ``bandwidth`` in bytes per second.
    """
    return bandwidth / (floor["weight_bytes"] + floor["cache_bytes"] * context)


def measure_plain(part: Part) -> None:
    """Report one row per model and decoding: tokens/s, share of the floor, start-up, and speed over our plain decoding.

    Speed does not depend on the values of weights, so the random models need no download.
    """
    config, rates = part.config, dict[str, float]()
    shapes: Any = {} if config.shapes is None else OmegaConf.to_container(config.shapes)
    shapes = {name: shape for name, shape in shapes.items() if shape is not None}
    if part.device.type == "cpu":  # which takes minutes for larger ones
        shapes = {name: shape for name, shape in shapes.items() if shape["hidden_size"] < config.large}
    for stage in (("layerskip", "transformers"), ("transformers_static",)):  # compilation takes longest and comes last
        for name, shape in {"target": None, **shapes}.items():
            made = functools.cache(partial(_model, part, shape))  # within the first row, which then has the error
            for decoding in stage:
                part.attempt(f"{name} {decoding}", partial(_plain, part, name, made, decoding, rates))
            del made
            torch.compiler.reset()  # else a second model of the same class is compiled for varying shapes
            release_memory()


def _model(part: Part, shape: Mapping[str, Any] | None) -> tuple[Target, list[int]]:
    """Return a random Llama, or without a shape the target, with the prompt that it continues."""
    if shape is None:
        return part.target, part.target.encode(next(iter(instantiate(part.config.prompts))).messages())
    target = random_target(shape, part.target.dtype, part.device, part.config.seed)
    return target, [token % target.vocabulary for token in range(part.config.context)]


def _plain(
    part: Part, name: str, made: Callable[[], tuple[Target, list[int]]], decoding: str, rates: dict[str, float]
) -> Row:
    """Return the row of a decoding of a model; ``rates`` holds our tokens/s by model."""
    target, prompt = made()
    ours, task = decoding not in _PEERS, Task(Sampling(), part.config.measure.max_new_tokens, part.config.seed)
    contender: Contender = Decoder.of(target, SpeculativeConfig()) if ours else Peer(target, _PEERS[decoding])

    def timed() -> tuple[int, float]:
        """Decode once; return the tokens after the first one, and their seconds without capturing and compiling."""
        known: list[tuple[float, int]] = []
        result = contender(prompt, task, lambda count: known.append((now(target.device) - capture_seconds(), count)))
        ((start, count),) = known
        return len(result.tokens) - count, now(target.device) - capture_seconds() - start

    capturing, start = capture_seconds(), now(target.device)
    timed()
    first = now(target.device) - start
    captured, start = capture_seconds() - capturing, now(target.device)
    timings = [timed() for _ in range(part.config.measure.repeats)]
    usual = (now(target.device) - start) / len(timings)
    tokens, seconds = (sum(column) for column in zip(*timings, strict=True))
    if not tokens:
        raise ValueError("measure.max_new_tokens: the output ends after its first token, which is not timed")
    floor, context = floor_of(target), len(prompt) + tokens / len(timings) / 2
    rate, maximum = tokens / seconds, floor_tokens_per_second(floor, context, part.bandwidth)
    if ours:
        rates[name] = rate
    return {
        "model": name,
        "decoding": decoding,
        **floor,
        "tokens_per_second": rate,
        "floor_tokens_per_second": maximum,
        "share_of_floor": rate / maximum,
        "context": context,
        "over_plain": rate / rates[name] if name in rates else None,
        "startup_seconds": max(0.0, first - usual),
        "capture_seconds": captured,
    }


def measure_drafters(part: Part) -> None:
    """Report one row per contender, each decoded in turns with plain decoding, so that one cannot stop the others.

    One more row compares plain decoding with and without compiled layers.
    """
    target, config = part.target, DictConfig(OmegaConf.to_container(part.config))
    prompts: PromptSet = instantiate(part.config.prompts).take(config.measure.prompts)
    config.update({"config": None, "peers": {}, "allow_lossy": False})
    fill_defaults(config, target)
    if compile_mode(target.model) != "off":
        row, other = ("plain_uncompiled", "off") if compiled_layers(target.model) is not None else ("plain_compiled", "on")
        part.attempt(row, partial(_compilation, part, prompts, row, other))
    for name in config.contenders:
        if config.contenders[name] is not None:
            part.attempt(str(name), partial(_drafter, part, prompts, config, str(name)))


def _compilation(part: Part, prompts: PromptSet, name: str, mode: str) -> Row:
    """Return the row of plain decoding with its layers as they are if they are compiled, else with compiled ones."""
    other = dataclasses.replace(part.target, model=shared_copy(part.target.model), compile=mode)
    pair = {BASELINE: Decoder.of(part.target, SpeculativeConfig()), name: Decoder.of(other, SpeculativeConfig())}
    row = _in_turns(part, prompts, pair)
    compiled = other if mode == "on" else part.target
    failed = compiled_layers(decoding_view(compiled.model)) is None
    return {"left_out": "its layers could not be compiled"} if failed else row


def _drafter(part: Part, prompts: PromptSet, config: DictConfig, name: str) -> Row:
    contender = config.contenders[name]
    if missing := [of for of in ("draft_model", "head") if contender.get(of, "") is None]:
        return {"left_out": f"it has no {missing[0]}"}
    alone = config.copy()
    alone.contenders = {name: contender}
    decoders, _, configs = build_contenders(alone, part.target, prompts, Sampling(), config.context)
    if name not in decoders:
        return {"left_out": "it cannot draft for this target"}
    return _in_turns(part, prompts, {key: decoders[key] for key in (BASELINE, name)}) | {"config": configs[name].to_dict()}


def _in_turns(part: Part, prompts: PromptSet, pair: Mapping[str, Contender]) -> Row:
    """Return the row of the second contender, decoded in turns with the first, plain decoding."""
    target, measure, (_, name) = part.target, part.config.measure, pair
    task, capturing = Task(Sampling(), measure.max_new_tokens, part.config.seed), capture_seconds()
    for _ in interleave(target, prompts.take(1), pair, task):
        pass  # captures and compiles the passes of most widths
    measured = Measurement.of(list(interleave(target, prompts, pair, task, measure.repeats)), BASELINE, name)
    low, high = measured.interval()
    verdict = measured.lossless.verdict
    context = statistics.mean(len(target.encode(item.messages())) for item in prompts) + measure.max_new_tokens / 2
    return {
        "tokens_per_second": measured.tokens_per_second,
        "plain_tokens_per_second": measured.baseline_tokens_per_second,
        "over_plain": measured.speedup,
        "over_plain_low": low,
        "over_plain_high": high,
        "share_of_floor": measured.tokens_per_second / floor_tokens_per_second(floor_of(target), context, part.bandwidth),
        "mean_acceptance_length": measured.stats.mean_acceptance_length,
        "acceptance_rate": measured.stats.acceptance_rate,
        "draft_share": measured.draft_share,
        "capture_seconds": capture_seconds() - capturing,
        "output": verdict,
        "losslessness": measured.lossless.to_dict(),
        **({"error": "its output is not that of plain decoding"} if verdict == "different" else {}),
    }


def measure_verification(part: Part) -> None:
    """Report the median seconds of verifying each number of drafted tokens, as a chain and as a binary tree."""
    for count in part.config.tokens:
        part.attempt(f"{count} drafted", partial(_verification, part, count))


def _verification(part: Part, count: int) -> Row:
    context, seed = part.config.context, part.config.seed
    (step,) = time_verification(part.target, context, 0, seed=seed)
    found = time_tree(part.target, context, count, seed=seed)
    over_step = {"chain_over_step": found.chain_seconds / step, "tree_over_step": found.tree_seconds / step}
    return found.to_dict() | {"step_seconds": step} | over_step


PARTS: Mapping[str, Callable[[Part], None]] = {
    "plain": measure_plain,
    "drafters": measure_drafters,
    "verification": measure_verification,
}


def measure_gpu(config: DictConfig) -> None:
    """Run the parts and write the record. See ``conf/gpu.yaml``.

    Raises:
        InputError: the configuration is wrong.
        SystemExit: a part or one of its rows ended with an error; exit code 1.
    """
    check_list("parts", config.parts, list(PARTS), or_empty=False)
    for name in PARTS:
        check_number(f"seconds.{name}", config.seconds[name])
    check_fields(config, {"context": 1, "tokens": 1})
    path, start = Path(config.record or Path(config.outputs) / "gpu.json"), time.monotonic()
    record: dict[str, Any] = {"parts": {}}
    if len(config.parts) == 1:
        (name,) = config.parts
        PARTS[name](Part(config, record, name, path))
    for name in config.parts if len(config.parts) > 1 else ():
        own, begun = path.with_suffix(f".{name}.json"), time.monotonic()
        own.unlink(missing_ok=True)
        print(f"{name}: at most {config.seconds[name]:g} s", flush=True)
        error = _run_alone([*sys.argv[1:], f"parts=[{name}]", f"record={literal(str(own))}"], config.seconds[name])
        found = read_json(own) or {"parts": {name: {"rows": {}}}}
        own.unlink(missing_ok=True)
        part = found["parts"][name] | {"seconds": time.monotonic() - begun} | ({} if error is None else {"error": error})
        record = found | record | {"parts": record["parts"] | {name: part}}  # the header is that of the first part
        write_json(path, record)
    record |= {"config": OmegaConf.to_container(config, resolve=True), "seconds": time.monotonic() - start}
    write_json(path, record)
    print(f"wrote {path}")
    if errors := [name for name, part in record["parts"].items() if has_error(part)]:
        print(f"errors in: {', '.join(errors)}")
        sys.exit(1)


def _run_alone(overrides: Sequence[str], seconds: float) -> str | None:
    """Run this program in a process of its own, end it and all that it started after some seconds; return an error.

    Raises:
        SystemExit: it refused its input, and said why.
    """
    command = [sys.executable, "-m", "searches.evaluate.gpu", *overrides]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"{seconds:g} seconds were over"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if code == BAD_INPUT:
        sys.exit(code)
    return None if code in (0, 1) else f"the process ended with code {code}"


def has_error(part: Mapping[str, Any]) -> bool:
    """Return whether a part of a record, or one of its rows, has an error."""
    return "error" in part or any("error" in row for row in part["rows"].values())


if __name__ == "__main__":
    run("gpu", measure_gpu, resumable=False)
