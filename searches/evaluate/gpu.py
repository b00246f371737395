"""The speed of a GPU in one record, most informative rows first: kernels, passes, verification, decoding, a study, tests.

Decoding is measured as a share of what the memory bandwidth allows, with the target and random Llamas of 1B, 3B and 8B,
beside transformers' ``generate`` with its compiled static and its dynamic cache; and the target with and without compiled
layers. A call takes at most six minutes, and the next one with the same settings measures the rows that are missing. Every
row is written as it comes. A row that fails has its error, the others are measured, and the exit code is 1. A row that hangs
ends the program, and counts as failed. Runs on a CPU, too, without the random models and the kernels. ``searches.benchmark``
compares all drafters.

A pass over one token reads every weight and the cache of all tokens before it. No pass is faster than this reading, at the
bandwidth that a large copy on the device reaches: the floor. No metric of a data sheet is used.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import itertools
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from layerskip import Measurement, PromptSet, Sampling, SpeculativeConfig, Target, UnsupportedModel
from layerskip.costs.parts import ROWS, time_kernels, time_pass
from layerskip.costs.timing import seconds_of, time_drafting, time_verification
from layerskip.device.memory import is_out_of_memory, release_memory
from layerskip.draft_plan import BITS
from layerskip.files import digest, read_json, write_json
from layerskip.measure.measure import Contender, Decoder, Task, interleave
from layerskip.measure.measurement import check_output
from layerskip.models.cache import KVCache
from layerskip.models.compiled_layers import compiled_layers
from layerskip.models.environment import machine
from layerskip.models.forward import forward
from layerskip.models.graph_capture import capture_seconds
from layerskip.models.skip_view import decoding_view, shared_copy
from searches.app.application import run
from searches.app.checks import check_number, check_seed, check_whole
from searches.benchmark.peers import Peer
from searches.evaluate.criteria import random_target
from searches.results import RESULTS_VERSION, record_header
from searches.study.bench import BASELINE

Row = dict[str, Any]
_COPIES = 20  # of a timing, so that reading the clock does not count
_PEERS = {"transformers_static": "static", "transformers": "plain"}
_VERIFIED = (1, 2, 4, 8, 16, 32, 64)  # tokens
_LAST_ROW_SECONDS = 40  # of a row that begins at the end
_LATE = {"left_out": "no time was left"}


class Rows:
    """The rows of a record, each of which is measured, printed and written by itself; those of an earlier call are kept."""

    def __init__(self, config: DictConfig) -> None:
        self.config, self.path = config, Path(config.record or Path(config.outputs) / "gpu.json")
        self.deadline = monotonic() + config.seconds
        self.target: Target = instantiate(config.target)
        self.prompts: PromptSet = instantiate(config.prompts).take(config.measure.prompts)
        self.bandwidth = copy_bandwidth(self.target.device)
        self._made: tuple[str, Target] | None = None
        settings: Any = OmegaConf.to_container(config, resolve=True)
        parts = {name: value for name, value in settings.items() if name not in ("seconds", "outputs", "record")}
        identity = digest([RESULTS_VERSION, parts, self.target.digest, self.prompts.digest, machine(self.target)])
        before = read_json(self.path) or {}
        kept = before["rows"] if before.get("identity") == identity else {}
        self.rows: dict[str, Row] = {name: row for name, row in kept.items() if row != _LATE}
        header = record_header("layerskip.gpu/3", self.target)
        self._record = header | {"identity": identity, "bandwidth": self.bandwidth, "config": settings, "rows": self.rows}

    def attempt(self, name: str, measure: Callable[[], Row]) -> None:
        """Measure one row that is missing. An error becomes the row, and what it held is freed."""
        if name in self.rows:
            return
        self._write(name, {"error": "it did not end"})
        try:
            row = measure() if monotonic() < self.deadline else _LATE
        except UnsupportedModel as error:
            row = {"left_out": str(error)}
        except Exception as error:
            traceback.print_exc()  # the record has one line of it
            line = f"{type(error).__name__}: {' '.join(str(error).split())}"
            row = {"left_out": "out of memory"} if is_out_of_memory(error) else {"error": line[:300]}
        except BaseException:  # the next call measures it
            self._write(name, _LATE)
            raise
        release_memory()  # after the except block, because the error keeps its frames
        self._write(name, row)
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in row.items())}", flush=True)

    def _write(self, name: str, row: Row) -> None:
        self.rows[name] = row
        write_json(self.path, self._record)

    def model(self, name: str) -> Target:
        """Return the target, or the random Llama of a shape, of which the last one is kept."""
        if name == "target":
            return self.target
        if self._made is None or self._made[0] != name:
            self._made = None
            release_memory()
            # Speed does not depend on the values of weights.
            made = random_target(self.config.shapes[name], self.target.dtype, self.target.device, self.config.seed)
            self._made = name, dataclasses.replace(made, tokenizer=self.target.tokenizer)
        return self._made[1]

    def compare(self, target: Target, prompts: PromptSet, contenders: Mapping[str, Contender]) -> Row:
        """Return the row of the last contender, decoded in turns with the first, plain decoding."""
        measure, (*_, name) = self.config.measure, contenders
        task, capturing = Task(Sampling(), measure.max_new_tokens, self.config.seed), capture_seconds()
        list(interleave(target, prompts.take(1), contenders, task))  # captures and compiles the passes
        rows = list(interleave(target, prompts, contenders, task, measure.repeats))
        check_output(row[BASELINE] for row in rows)
        measured = Measurement.of(rows, BASELINE, name)
        low, high = measured.interval()
        read = statistics.fmean(len(target.encode(item.messages())) for item in prompts) + measure.max_new_tokens / 2
        floor = floor_tokens_per_second(target, read, self.bandwidth)
        row = {
            "tokens_per_second": measured.tokens_per_second,
            "plain_tokens_per_second": measured.baseline_tokens_per_second,
            "over_plain": measured.speedup,
            "over_plain_low": low,
            "over_plain_high": high,
            "share_of_floor": measured.tokens_per_second / floor,
            "plain_share_of_floor": measured.baseline_tokens_per_second / floor,
            "capture_seconds": capture_seconds() - capturing,
            "losslessness": measured.lossless.to_dict(),
        }
        # Random weights have more near-ties than rounding explains.
        if measured.lossless.verdict == "different" and target is self.target:
            row["error"] = "its output is not that of plain decoding"
        return row


@torch.inference_mode()
def copy_bandwidth(device: torch.device) -> float:
    """Return the memory bandwidth in bytes per second: that of the fastest large copy, with reads and writes counted."""
    source = torch.zeros(2**26 if device.type == "cpu" else 2**30, dtype=torch.uint8, device=device)  # beyond any cache
    copy = torch.empty_like(source)

    def copies() -> None:
        for _ in range(_COPIES):
            copy.copy_(source)

    # The first touch of the pages is slower.
    return 2 * source.nbytes * _COPIES / min(seconds_of(device, copies) for _ in range(5))


@torch.inference_mode()
def floor_tokens_per_second(target: Target, context: float, bandwidth: float) -> float:
    """Return the tokens/s at which reading weights and a cache of ``context`` tokens takes all the time.

    An input embedding that is not the output layer, too, is not counted, because a pass reads one row of it.
    """
    model: Any = target.model
    cache = KVCache(target.layers, 1, device=target.device)
    forward(model, torch.zeros(1, dtype=torch.int64, device=target.device), cache, last=1)
    embedding = model.get_input_embeddings().weight
    unread = 0 if embedding is model.get_output_embeddings().weight else embedding.nbytes
    return float(bandwidth / (sum(weight.nbytes for weight in model.parameters()) - unread + cache.nbytes * context))


def compare_compilation(rows: Rows, name: str) -> Row:
    """Return the row of plain decoding with its layers as they are beside compiled ones."""
    other = dataclasses.replace(rows.target, model=shared_copy(rows.target.model), compile="off")
    pair = {BASELINE: Decoder.of(rows.target, SpeculativeConfig()), name: Decoder.of(other, SpeculativeConfig())}
    row = rows.compare(rows.target, rows.prompts, pair)
    failed = compiled_layers(decoding_view(rows.target.model)) is None
    return {"left_out": "its layers could not be compiled"} if failed else row


def compare_peer(rows: Rows, name: str, peer: str) -> Row:
    """Return the row of transformers beside plain decoding, with the target or the random Llama of a shape."""
    target = rows.model(name)
    pair: dict[str, Contender] = {BASELINE: Decoder.of(target, SpeculativeConfig()), peer: Peer(target, _PEERS[peer])}
    try:
        return rows.compare(target, rows.prompts.take(1), pair)
    finally:
        torch.compiler.reset()  # else a second model of the same class is compiled for varying shapes


def compare_drafter(rows: Rows, name: str, drafter: str) -> Row:
    """Return the row of a drafter beside plain decoding; with random weights, of what its rounds cost."""
    target = rows.model(name)
    fields: Any = OmegaConf.to_object(rows.config.drafters[drafter])
    half = {"mask": f"layers:{target.layers // 2}-{target.layers - 1}"} if fields["method"] == "layer_skip" else {}
    configs = {BASELINE: SpeculativeConfig(), drafter: SpeculativeConfig.from_dict({**half, **fields})}
    prompts = rows.prompts if target is rows.target else rows.prompts.take(1)
    return rows.compare(target, prompts, {each: Decoder.of(target, config) for each, config in configs.items()})


def time_parts(rows: Rows, name: str, count: int, captured: bool) -> Row:
    """Return the row of a pass over some tokens, and of its parts."""
    return time_pass(rows.model(name), count, rows.config.context, captured)


def time_draft(rows: Rows, name: str, weights: str) -> Row:
    """Return the row of a draft's pass over weights of fewer bits, in passes of the target."""
    config = SpeculativeConfig.from_dict({"method": "quantized", "weights": weights})
    return {"cost": time_drafting(rows.model(name), config, rows.config.context)}


def time_widths(rows: Rows, name: str) -> Row:
    """Return the row of verifications: the milliseconds of each number of tokens."""
    seconds = time_verification(rows.model(name), rows.config.context, _VERIFIED[-1] - 1, repeats=4, seed=rows.config.seed)
    return {str(count): 1e3 * seconds[count - 1] for count in _VERIFIED}


def run_command(rows: Rows, command: str) -> Row:
    """Return the row of another program: the last lines of its output."""
    left = max(1.0, rows.deadline - monotonic() + _LAST_ROW_SECONDS / 2)
    arguments = shlex.split(command.replace("{python}", sys.executable))
    if shutil.which(arguments[0]) is None:
        return {"left_out": f"there is no {arguments[0]}"}
    environment = os.environ | {"LAYERSKIP_TEST_DEVICE": rows.target.device.type}
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=left, env=environment)
    except subprocess.TimeoutExpired:
        return _LATE
    return {"error" if done.returncode else "output": "\n".join((done.stdout + done.stderr).splitlines()[-8:])}


def rows_of(rows: Rows) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the rows of a record by name, each with its measurement."""
    config, target, shapes = rows.config, rows.target, rows.config.shapes or {}
    on_gpu = target.device.type == "cuda"
    large = [name for name in reversed([*shapes]) if shapes[name] is not None and on_gpu]  # the largest first
    yield "card", partial(run_command, rows, config.card)
    for name in ("target", *large[:1]) if on_gpu else ():
        fields = target.model.config.get_text_config(decoder=True).to_dict() if name == "target" else shapes[name]
        for kernel, measure in time_kernels(fields, target.model.dtype, target.device):
            yield f"{name}, {kernel}", measure
    for name in ("target", *large[:1]):
        for count, captured in itertools.product(ROWS, (True, False) if on_gpu else (False,)):
            kind = f"{'captured ' if captured else ''}pass of {count}"
            yield f"{name}, {kind}", partial(time_parts, rows, name, count, captured)
        yield f"{name}, verification", partial(time_widths, rows, name)
    for name in (*large[:1], "target", *large[1:]):
        if name == "target" and compiled_layers(target.model) is not None:
            yield "plain_uncompiled", partial(compare_compilation, rows, "plain_uncompiled")
        for peer in _PEERS:
            yield f"{name}, {peer}", partial(compare_peer, rows, name, peer)
        for drafter in config.drafters if name == "target" else config.large_drafters:
            yield f"{name}, {drafter}", partial(compare_drafter, rows, name, drafter)
        for weights in (name for name, bits in BITS.items() if bits):
            yield f"{name}, draft of {weights}", partial(time_draft, rows, name, weights)
    for name, command in (config.programs or {}).items():
        yield name, partial(run_command, rows, command)


def measure_gpu(config: DictConfig) -> None:
    """Measure and write the record; exit with code 1 if a row ended with an error. See ``conf/gpu.yaml``."""
    check_number("seconds", config.seconds)
    check_seed(config.seed)
    check_whole("context", config.context, 1)
    # Its file is the standard error, whatever replaces it in Python.
    faulthandler.dump_traceback_later(config.seconds + _LAST_ROW_SECONDS, exit=True, file=2)
    try:
        rows = Rows(config)
        for name, measure in rows_of(rows):
            rows.attempt(name, measure)
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(f"wrote {rows.path}")
    if late := [name for name, row in rows.rows.items() if row == _LATE]:
        print(f"the same command measures what is missing: {', '.join(late)}")
    if errors := [name for name, row in rows.rows.items() if "error" in row]:
        print(f"errors in: {', '.join(errors)}")
        sys.exit(1)


if __name__ == "__main__":
    run("gpu", measure_gpu)
