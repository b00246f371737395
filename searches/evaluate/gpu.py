"""Plain decoding on a GPU as a share of what its memory bandwidth allows, in at most six minutes and as one record.

Measures the target and random Llamas of 1B, 3B and 8B, beside transformers' ``generate`` with its dynamic and its compiled
static cache; and the target with and without compiled layers. Every finished row is kept. A row that fails has its error,
the others are measured, and the exit code is 1. After ``seconds`` no further row begins, and a row that hangs ends the
program. Runs on a CPU, too, without the random models. ``searches.benchmark`` compares drafters.

A pass over one token reads every weight and the cache of all tokens before it. No pass is faster than this reading, at the
bandwidth that a large copy on the device reaches: the floor. No metric of a data sheet is used.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from layerskip import Measurement, PromptSet, Sampling, SpeculativeConfig, Target
from layerskip.costs.timing import seconds_of
from layerskip.device.memory import is_out_of_memory, release_memory
from layerskip.files import write_json
from layerskip.measure.measure import Contender, Decoder, Task, interleave
from layerskip.measure.measurement import check_output
from layerskip.models.cache import KVCache
from layerskip.models.compiled_layers import compiled_layers
from layerskip.models.forward import forward
from layerskip.models.graph_capture import capture_seconds
from layerskip.models.skip_view import decoding_view, shared_copy
from searches.app.application import run
from searches.app.checks import check_number, check_seed
from searches.benchmark.peers import Peer
from searches.evaluate.criteria import random_target
from searches.results import record_header
from searches.study.bench import BASELINE

Row = dict[str, Any]
_COPIES = 20  # of a timing, so that reading the clock does not count
_PEERS = {"transformers": "plain", "transformers_static": "static"}  # compilation takes longest and comes last
_LAST_ROW_SECONDS = 40  # of a row that begins at the end


class Rows:
    """The rows of a record, each of which is measured, printed and written by itself."""

    def __init__(self, config: DictConfig) -> None:
        self.config, self.path = config, Path(config.record or Path(config.outputs) / "gpu.json")
        self._deadline, self.rows = monotonic() + config.seconds, dict[str, Row]()
        self.target: Target = instantiate(config.target)
        self.prompts: PromptSet = instantiate(config.prompts).take(config.measure.prompts)
        self.bandwidth = copy_bandwidth(self.target.device)
        self._record = record_header("layerskip.gpu/2", self.target) | {
            "bandwidth": self.bandwidth,
            "config": OmegaConf.to_container(config, resolve=True),
            "rows": self.rows,
        }

    def attempt(self, name: str, measure: Callable[[], Row]) -> None:
        """Measure one row. An error becomes the row, and what it held is freed."""
        try:
            row = measure() if monotonic() < self._deadline else {"left_out": "no time was left"}
        except Exception as error:
            traceback.print_exc()  # the record has one line of it
            line = f"{type(error).__name__}: {' '.join(str(error).split())}"
            row = {"left_out": "out of memory"} if is_out_of_memory(error) else {"error": line[:300]}
        release_memory()  # after the except block, because the error keeps its frames
        self.rows[name] = row
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in row.items())}", flush=True)
        write_json(self.path, self._record)

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


def compare_peer(rows: Rows, shape: Mapping[str, Any] | None, peer: str) -> Row:
    """Return the row of transformers beside plain decoding, with a random Llama, or without a shape with the target."""
    target = rows.target
    if shape is not None:  # speed does not depend on the values of weights
        made = random_target(shape, target.dtype, target.device, rows.config.seed)
        target = dataclasses.replace(made, tokenizer=target.tokenizer)
    pair: dict[str, Contender] = {BASELINE: Decoder.of(target, SpeculativeConfig()), peer: Peer(target, _PEERS[peer])}
    return rows.compare(target, rows.prompts.take(1), pair)


def measure_gpu(config: DictConfig) -> None:
    """Measure and write the record; exit with code 1 if a row ended with an error. See ``conf/gpu.yaml``."""
    check_number("seconds", config.seconds)
    check_seed(config.seed)
    # Its file is the standard error, whatever replaces it in Python.
    faulthandler.dump_traceback_later(config.seconds + _LAST_ROW_SECONDS, exit=True, file=2)
    try:
        rows = Rows(config)
        target, shapes = rows.target, config.shapes or {}
        if compiled_layers(target.model) is not None:
            rows.attempt("plain_uncompiled", partial(compare_compilation, rows, "plain_uncompiled"))
        for peer in _PEERS:
            for name, shape in {"target": None, **shapes}.items():
                if name == "target" or (shape is not None and target.device.type != "cpu"):
                    rows.attempt(f"{name} {peer}", partial(compare_peer, rows, shape, peer))
                    torch.compiler.reset()  # else a second model of the same class is compiled for varying shapes
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(f"wrote {rows.path}")
    if errors := [name for name, row in rows.rows.items() if "error" in row]:
        print(f"errors in: {', '.join(errors)}")
        sys.exit(1)


if __name__ == "__main__":
    run("gpu", measure_gpu, resumable=False)
