"""Every drafter on the target, and the target's passes over 1 to 64 tokens, for ``searches.evaluate.gpu``."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from layerskip import Measurement, PromptSet, Sampling, Target, UnsupportedModel
from layerskip.costs.verify_timing import VerifyPass
from layerskip.decoding.tree import path_to
from layerskip.device.clock import now
from layerskip.measure.measure import Task, interleave
from layerskip.models.graph_capture import capture_seconds
from searches.benchmarking.contenders import BASELINE, build_contenders, fill_defaults
from searches.evaluate.gpu_device import floor_tokens_per_second
from searches.evaluate.gpu_worker import Known, Report, Row

_TIMINGS = 20  # of each pass, after a first one


def measure_drafters(config: DictConfig, known: Known, report: Report) -> None:
    """Report one row per contender, each decoded in turns with plain decoding, so that one cannot stop the others."""
    target: Target = instantiate(config.target)
    prompts: PromptSet = instantiate(config.prompts).take(config.measure.prompts)
    of_benchmark = {"config": None, "peers": {}, "allow_lossy": False, "tree": {"context": config.context}}
    config = DictConfig(OmegaConf.to_container(config))
    config.update(of_benchmark)
    fill_defaults(config, target)
    lengths = [len(target.encode(item.messages())) for item in prompts]
    context = statistics.mean(lengths) + config.measure.max_new_tokens / 2
    floor = floor_tokens_per_second(known, context, known["bandwidth"])
    for name in list(config.contenders):
        if config.contenders[name] is not None:
            report.attempt(str(name), functools.partial(_drafter, str(name), config, target, prompts, floor))


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
        "config": configs[name].to_dict(),
    }
    if lossless["verdict"] == "different":
        row["error"] = "its output is not that of plain decoding"
    return row


@torch.inference_mode()
def measure_verification(config: DictConfig, known: Known, report: Report) -> None:
    """Report the median seconds of the target's pass over each number of tokens, as a chain and as a binary tree.

    The tree is verified and its last branch moved into place in the cache, as after accepting it.
    """
    target: Target = instantiate(config.target)
    chains = {f"chain of {count}": functools.partial(_chain, count) for count in config.tokens}
    trees = {f"tree of {count}": functools.partial(_tree, count) for count in config.tokens if count > 1}
    passes = VerifyPass(target, config.context, max(config.tokens), seed=config.seed)
    capturing, runs = capture_seconds(), dict[str, Callable[[], None]]()
    for name, run in (chains | trees).items():  # the first passes, which capture and compile
        report.step(name)
        try:
            run(passes)
            runs[name] = functools.partial(run, passes)
        except UnsupportedModel as error:
            report.row(name, {"left_out": str(error)})
    captured, order, times = (
        capture_seconds() - capturing,
        random.Random(config.seed),
        {name: list[float]() for name in runs},
    )
    report.step("timing")
    for _ in range(_TIMINGS):
        for name in order.sample(list(runs), len(runs)):
            start = now(target.device)
            runs[name]()
            times[name].append(now(target.device) - start)
    one = statistics.median(times["chain of 1"])
    for name, found in times.items():
        shape, _, count = name.partition(" of ")
        seconds = statistics.median(found)
        report.row(name, {"shape": shape, "tokens": int(count), "seconds": seconds, "over_one_token": seconds / one})
    report.row("all", {"context": passes.context, "capture_seconds": captured})


def _chain(count: int, passes: VerifyPass) -> None:
    passes.chain(count - 1)


def _tree(count: int, passes: VerifyPass) -> None:
    parents = tuple(node // 2 - 1 for node in range(count - 1))
    passes.tree(parents, [0, *(node + 1 for node in path_to(count - 2, parents))])
