"""Every drafter on the target, and the target's passes over 1 to 64 tokens, for ``searches.evaluate.gpu``."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from layerskip import Measurement, PromptSet, Sampling, SpeculativeConfig, Target
from layerskip.costs.verify_timing import VerifyPass
from layerskip.decoding.tree import path_to
from layerskip.device.clock import now
from layerskip.measure.measure import Contender, Decoder, Task, interleave
from layerskip.models.compiled_layers import compile_mode, compiled_layers
from layerskip.models.graph_capture import capture_seconds
from layerskip.models.skip_view import decoding_view, shared_copy
from searches.benchmarking.contenders import BASELINE, build_contenders, fill_defaults
from searches.evaluate.gpu_device import floor_tokens_per_second
from searches.evaluate.gpu_worker import Known, Report, Row

_TIMINGS = 20  # of each pass, after a first one


def measure_drafters(config: DictConfig, known: Known, report: Report) -> None:
    """Report one row per contender, each decoded in turns with plain decoding, so that one cannot stop the others.

    One more row compares plain decoding with and without compiled layers.
    """
    target: Target = instantiate(config.target)
    prompts: PromptSet = instantiate(config.prompts).take(config.measure.prompts)
    of_benchmark = {"config": None, "peers": {}, "allow_lossy": False, "tree": {"context": config.context}}
    config = DictConfig(OmegaConf.to_container(config))
    config.update(of_benchmark)
    fill_defaults(config, target)
    lengths = [len(target.encode(item.messages())) for item in prompts]
    context = statistics.mean(lengths) + config.measure.max_new_tokens / 2
    floor = floor_tokens_per_second(known, context, known["bandwidth"])
    if (other := _other_compilation(target)) is not None:
        row, changed = other
        report.attempt(row, functools.partial(_compilation, row, changed, config, target, prompts, floor))
    for name in list(config.contenders):
        if config.contenders[name] is not None:
            report.attempt(str(name), functools.partial(_drafter, str(name), config, target, prompts, floor))


def _other_compilation(target: Target) -> tuple[str, Target] | None:
    """Return the target with its layers as they are if they are compiled, else with compiled ones, and the name of its row.

    None where compiling is off.
    """
    if compile_mode(target.model) == "off":
        return None
    name, mode = ("plain_compiled", "on") if compiled_layers(target.model) is None else ("plain_uncompiled", "off")
    return name, dataclasses.replace(target, model=shared_copy(target.model), compile=mode)


def _compilation(name: str, other: Target, config: DictConfig, target: Target, prompts: PromptSet, floor: float) -> Row:
    capturing = capture_seconds()
    pair = {BASELINE: Decoder.of(target, SpeculativeConfig()), name: Decoder.of(other, SpeculativeConfig())}
    row = _measured(name, pair, config, target, prompts, floor, capturing)
    compiled = other if other.compile == "on" else target
    if compiled_layers(decoding_view(compiled.model)) is None:
        return {"left_out": "its layers could not be compiled"}
    return row


def _drafter(name: str, config: DictConfig, target: Target, prompts: PromptSet, floor: float) -> Row:
    contender = config.contenders[name]
    if missing := [part for part in ("draft", "head") if contender.get(part, "") is None]:
        return {"left_out": f"it has no {missing[0]}"}
    alone = config.copy()
    alone.contenders = {name: contender}
    capturing = capture_seconds()
    decoders, _, configs = build_contenders(alone, target, prompts, Sampling())
    if name not in decoders:
        return {"left_out": "it cannot draft for this target"}
    pair = {key: decoders[key] for key in (BASELINE, name)}
    return _measured(name, pair, config, target, prompts, floor, capturing) | {"config": configs[name].to_dict()}


def _measured(
    name: str,
    pair: Mapping[str, Contender],
    config: DictConfig,
    target: Target,
    prompts: PromptSet,
    floor: float,
    capturing: float,
) -> Row:
    """Return the row of a contender, decoded in turns with plain decoding.

    Args:
        name: of the contender.
        pair: plain decoding and the contender by name.
        config: configuration ``conf/gpu.yaml``.
        target: decodes plainly.
        prompts: at least one.
        floor: tokens per second that the bandwidth allows.
        capturing: seconds of capturing before the contender was built.
    """
    task = Task(Sampling(), config.measure.max_new_tokens, config.seed)
    for _ in interleave(target, prompts.take(1), pair, task):
        pass  # captures and compiles the passes of most widths
    measured = Measurement.of(list(interleave(target, prompts, pair, task, config.measure.repeats)), BASELINE, name)
    low, high = measured.interval()
    stats, lossless = measured.stats, measured.lossless.to_dict()
    row = {
        "tokens_per_second": measured.tokens_per_second,
        "plain_tokens_per_second": measured.baseline_tokens_per_second,
        "over_plain": measured.speedup,
        "over_plain_low": low,
        "over_plain_high": high,
        "share_of_floor": measured.tokens_per_second / floor,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance_rate": stats.acceptance_rate,
        "draft_share": measured.draft_share,
        "capture_seconds": capture_seconds() - capturing,
        "losslessness": lossless,
    }
    if lossless["verdict"] == "different":
        row["error"] = "its output is not that of plain decoding"
    return row


@torch.inference_mode()
def measure_verification(config: DictConfig, known: Known, report: Report) -> None:
    """Report the median seconds of the target's pass over each number of tokens, as a chain and as a binary tree.

    Each is timed in turns with the pass over one token. The tree is verified and its last branch moved into place in the
    cache, as after accepting it.
    """
    target: Target = instantiate(config.target)
    passes = VerifyPass(target, config.context, max(config.tokens), seed=config.seed)
    for count in sorted(config.tokens):
        report.attempt(f"chain of {count}", functools.partial(_pass, passes, "chain", count, target.device))
        if count > 1:
            report.attempt(f"tree of {count}", functools.partial(_pass, passes, "tree", count, target.device))


def _pass(passes: VerifyPass, shape: str, count: int, device: torch.device) -> Row:
    parents = tuple(node // 2 - 1 for node in range(count - 1))

    def run() -> None:
        if shape == "chain":
            passes.chain(count - 1)
        else:
            passes.tree(parents, [0, *(node + 1 for node in path_to(count - 2, parents))])

    runs: tuple[Callable[[], None], ...] = (run, functools.partial(passes.chain, 0))
    capturing, times = capture_seconds(), (list[float](), list[float]())
    for turn in range(_TIMINGS + 1):  # the first one captures and compiles
        for found, verify in zip(times, runs, strict=True):
            start = now(device)
            verify()
            if turn:
                found.append(now(device) - start)
    seconds, one = map(statistics.median, times)
    return {
        "shape": shape,
        "tokens": count,
        "seconds": seconds,
        "over_one_token": seconds / one,
        "context": passes.context,
        "capture_seconds": capture_seconds() - capturing,
    }
