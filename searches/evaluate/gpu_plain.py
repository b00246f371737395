"""Plain decoding of the target and of random Llamas, beside transformers' ``generate`` and the floor of the bandwidth.

Speed does not depend on the values of weights, so models of any size need no download. They are made on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM, LlamaConfig

from layerskip import Sampling, SpeculativeConfig, Target
from layerskip.device.clock import now
from layerskip.device.memory import release_memory
from layerskip.measure.measure import Contender, Decoder, Task
from layerskip.models.graph_capture import capture_seconds
from layerskip.models.loading import DTYPES
from searches.benchmarking.peers import Peer
from searches.evaluate.gpu_device import floor_of, floor_tokens_per_second
from searches.evaluate.gpu_worker import Known, Report, Row

Make = Callable[[], tuple[Target, list[int]]]
"""Makes a model and the prompt that it continues."""

OURS, EAGER, COMPILED = "layerskip", "transformers", "transformers_static"
_STAGES = ((OURS, EAGER), (COMPILED,))
"""What is measured of every model, stage by stage: compilation takes longest and comes last."""
_COUNTED = 8  # passes whose kernels are counted
_LARGE: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama_1b": _LARGE
    | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "llama_3b": _LARGE
    | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "head_dim": 128, "tie_word_embeddings": True,
    },
    "llama_8b": _LARGE
    | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shapes of Llama 3.2 1B, Llama 3.2 3B and Llama 3.1 8B."""


def measure_plain(config: DictConfig, known: Known, report: Report) -> None:
    """Report one row per model and decoding: tokens/s, share of the floor, start-up, and speed over our plain decoding."""
    models: dict[str, Make] = {"target": functools.cache(functools.partial(_target, config))}  # loading takes seconds
    shapes = config.shapes
    if shapes is None:
        shapes = SHAPES if known["type"] == "cuda" else {}  # a CPU takes minutes for them
    for name, shape in shapes.items():
        if shape is not None:
            fields: Any = OmegaConf.to_container(shape) if isinstance(shape, DictConfig) else shape
            models[str(name)] = functools.partial(_random, config, known, fields)
    ours: dict[str, float] = {}
    for stage in _STAGES:
        for name, make in models.items():
            _measure_model(name, stage, make, config, known, report, ours)
            torch.compiler.reset()  # else a second model of the same class is compiled for varying shapes
            release_memory()


def _measure_model(
    name: str, stage: Sequence[str], make: Make, config: DictConfig, known: Known, report: Report, ours: dict[str, float]
) -> None:
    """Make a model and measure some decodings of it; it is freed on return. ``ours`` holds our tokens/s by model."""
    made = functools.cache(make)  # within the first row, which then has the error

    def measure(decoding: str) -> Row:
        row: Row = {"model": name, "decoding": decoding} | _row(*made(), decoding, config, known)
        if decoding == OURS:
            ours[name] = row["tokens_per_second"]
        return row | {"over_plain": row["tokens_per_second"] / ours[name] if name in ours else None}

    for decoding in stage:
        report.attempt(f"{name} {decoding}", functools.partial(measure, decoding))


def _target(config: DictConfig) -> tuple[Target, list[int]]:
    """Return the configured target and the first prompt, whose answer is long."""
    target: Target = instantiate(config.target)
    return target, target.encode(next(iter(instantiate(config.prompts))).messages())


def _random(config: DictConfig, known: Known, shape: Mapping[str, Any]) -> tuple[Target, list[int]]:
    target = random_llama(shape, known["dtype"], torch.device(known["device"]), config.seed)
    return target, [token % target.vocabulary for token in range(config.context)]


def random_llama(shape: Mapping[str, Any], dtype: str, device: torch.device, seed: int = 0) -> Target:
    """Make a Llama with random weights directly on a device. It never ends an output by itself.

    Args:
        shape: fields of transformers' ``LlamaConfig``.
        dtype: as in :func:`layerskip.load_target`.
        device: where the weights are made.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, **ends), dtype=DTYPES[dtype])
    return Target(model.eval(), name="random Llama", pack_weights=False)


def _row(target: Target, prompt: list[int], decoding: str, config: DictConfig, known: Known) -> Row:
    contender: Contender
    if decoding == OURS:
        contender = Decoder.of(target, SpeculativeConfig())
    else:
        contender = Peer(target, "plain" if decoding == EAGER else "static")
    task = Task(Sampling(), config.measure.max_new_tokens, config.seed)
    capturing, start = capture_seconds(), now(target.device)
    _timed(contender, prompt, task, target.device)
    first = now(target.device) - start
    captured, start = capture_seconds() - capturing, now(target.device)
    timings = [_timed(contender, prompt, task, target.device) for _ in range(config.measure.repeats)]
    usual = (now(target.device) - start) / len(timings)
    tokens, seconds = sum(tokens for tokens, _ in timings), sum(seconds for _, seconds in timings)
    if not tokens:
        raise ValueError("measure.max_new_tokens: the output ends after its first token, which is not timed")
    floor = floor_of(target)
    context = len(prompt) + tokens / len(timings) / 2
    rate, most = tokens / seconds, floor_tokens_per_second(floor, context, known["bandwidth"])
    return floor | {
        "tokens_per_second": rate,
        "floor_tokens_per_second": most,
        "share_of_floor": rate / most,
        "startup_seconds": max(0.0, first - usual),
        "capture_seconds": captured,
        "context": context,
        "new_tokens": int(tokens / len(timings)),
        "layers": target.layers,
        "launches": _launches(contender, prompt, config.seed, target),
    }


def _launches(contender: Contender, prompt: list[int], seed: int, target: Target) -> float | None:
    """Return the kernels of a pass per layer, those around the layers included; None on a CPU.

    The kernels of the prompt are left out, as those of another decoding of one token.
    """
    if target.device.type != "cuda":
        return None
    kernels: list[int] = []
    for tokens in (1, 1 + _COUNTED):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            contender(prompt, Task(Sampling(), tokens, seed), lambda count: None)
            now(target.device)
        kernels.append(sum(event.device_type == torch._C._autograd.DeviceType.CUDA for event in profile.events()))
    return (kernels[1] - kernels[0]) / _COUNTED / target.layers


def _timed(contender: Contender, prompt: list[int], task: Task, device: torch.device) -> tuple[int, float]:
    """Decode once; return the tokens after the first one, and their seconds without capturing and compiling."""
    known: list[tuple[float, int]] = []

    def clock() -> float:
        return now(device) - capture_seconds()

    result = contender(prompt, task, lambda count: known.append((clock(), count)))
    end = clock()
    ((start, count),) = known
    return len(result.tokens) - count, end - start
