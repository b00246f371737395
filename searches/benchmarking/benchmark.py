"""Benchmark of named configurations and transformers' own decoding methods, measured side by side.

Body of ``python -m searches.benchmark``. All contenders are measured in one run, interleaved prompt by prompt; OpenVINO
GenAI and vLLM are among them where they are installed.
``config=best.json`` adds an export and measures on held-out prompts only. Prints a table, writes JSON and logs to MLflow. An
interrupted benchmark prints a table of the finished measurements and keeps nothing.

The memory of a drafter is that of its weights, caches and tables, without what it shares with the target. Memory-mapped
files and the caches of transformers' methods are not counted; that of engines is unknown. On CUDA the table also has the
peak memory of decoding, beyond everything that is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from layerskip import Measurement, PromptSet, Sampling, SpeculativeConfig, Target, UnsupportedModel
from layerskip.costs.tree_timing import TreeTiming, time_tree
from layerskip.files import write_json
from layerskip.measure.measure import Task, interleave
from layerskip.measure.measurement import Sample, check_output
from searches.app.checks import check_flag, check_seed, check_whole
from searches.app.interrupt import is_interrupt
from searches.app.record_header import record_header
from searches.benchmarking.contenders import BASELINE, build_contenders, check_rows, close_engines, fill_defaults
from searches.benchmarking.engine_peers import EnginePeer
from searches.benchmarking.table import table
from searches.study.objective import MeasureSettings
from searches.study.plan import check_prompts
from searches.tracking.tracker import Tracker


def benchmark(config: DictConfig) -> dict[str, Any]:
    """Measure all contenders and return the record. See ``conf/benchmark.yaml``."""
    sampling: Sampling = instantiate(config.sampling)
    measuring: MeasureSettings = instantiate(config.measure)
    prompts: PromptSet = instantiate(config.prompts)
    if config.config is not None:  # the export was chosen on the other prompts
        _, prompts = prompts.split()
    prompts = prompts.take(measuring.prompts)
    check_seed(config.seed)
    check_flag("allow_lossy", config.allow_lossy)
    check_whole("tree.tokens", config.tree.tokens, 0)
    check_whole("tree.context", config.tree.context)
    check_rows(config)
    target: Target = instantiate(config.target)
    check_prompts(prompts, target, measuring.max_new_tokens)
    fill_defaults(config, target)
    decoders, rivals, configs = build_contenders(config, target, prompts, sampling)
    tracker = Tracker(config.tracking.uri, Path(config.outputs), config.tracking.experiment)
    timing = _time_tree(config, target, sampling)
    task = Task(sampling, measuring.max_new_tokens, config.seed)
    rows: list[Mapping[str, Sample]] = []
    memory: dict[str, int | None] = dict.fromkeys(decoders, 0)
    repeats = measuring.repeats

    def record_of(repeats: int, count: int) -> dict[str, Any]:
        return record_header("layerskip.benchmark/1", target) | {
            "sampling": sampling.to_dict(),
            "max_new_tokens": task.max_new_tokens,
            "repeats": repeats,
            "prompts": {"name": prompts.name, "count": count, "digest": prompts.digest},
            "configs": {name: drafting.to_dict() for name, drafting in configs.items()},
            "results": {
                name: _result(rows, name, rivals.get(name), _members(name, configs))
                | {"lossless": name not in configs or configs[name].lossless, "drafter_bytes": memory[name]}
                for name in decoders
            },
            "verification": None if timing is None else timing.to_dict(),
            "engines": {peer.engine: peer.version for peer in decoders.values() if isinstance(peer, EnginePeer)},
        }

    try:
        with tqdm(total=len(prompts) * repeats, unit="prompt", disable=None) as bar:
            for row in interleave(target, prompts, decoders, task, repeats):
                rows.append(row)
                memory |= {name: _larger(memory[name], decoder.memory_bytes()) for name, decoder in decoders.items()}
                bar.update()
    except BaseException as error:
        if is_interrupt(error) and rows:
            partial = record_of(-(-len(rows) // len(prompts)), min(len(rows), len(prompts)))
            total = len(prompts) * repeats
            print(f"{table(partial)}\n\nInterrupted after {len(rows)} of {total} measurements; no record is written.")
        raise
    finally:
        close_engines(decoders)
    check_output(row[BASELINE] for row in rows)
    record = record_of(repeats, len(prompts))
    text = table(record)
    print(text)
    path = Path(config.record or Path(config.outputs) / "benchmark.json")
    write_json(path, record)
    print(f"wrote {path}")
    tracker.log_benchmark(record, {"benchmark.md": text, "config.yaml": OmegaConf.to_yaml(config, resolve=True)}, path)
    return record


def _larger(one: int | None, other: int | None) -> int | None:
    """Return the larger of two numbers of bytes, None if one is unknown."""
    return None if one is None or other is None else max(one, other)


def _time_tree(config: DictConfig, target: Target, sampling: Sampling) -> TreeTiming | None:
    """Time the verification of a tree; None if it is disabled or the target cannot verify trees."""
    if not config.tree.tokens:
        return None
    try:
        return time_tree(target, config.tree.context, config.tree.tokens, sampling, seed=config.seed)
    except UnsupportedModel as error:
        print(f"tree: left out: {error}")
        return None


def _members(name: str, configs: Mapping[str, SpeculativeConfig]) -> list[str]:
    """Return the members of a cascade that are contenders themselves."""
    return [other for other, config in configs.items() if name in configs and config in configs[name].members]


def _result(rows: list[Mapping[str, Sample]], name: str, rival: str | None, members: Sequence[str]) -> dict[str, Any]:
    result = Measurement.of(rows, BASELINE, name).to_dict()
    seconds = result["prefill_seconds"] + result["decode_seconds"]
    result["end_to_end_tokens_per_second"] = result["tokens"] / seconds
    peaks = [peak for row in rows if (peak := row[name].decoding_bytes) is not None]
    result["decoding_bytes"] = max(peaks, default=None)
    if rival is not None:
        result["rival"] = {"name": rival} | _ratio(Measurement.of(rows, rival, name))
    if members:
        result["members"] = {other: _ratio_by_category(Measurement.of(rows, other, name)) for other in members}
    return result


def _ratio(measurement: Measurement) -> dict[str, float]:
    low, high = measurement.interval()
    return {"speedup": measurement.speedup, "low": low, "high": high}


def _ratio_by_category(measurement: Measurement) -> dict[str, Any]:
    return _ratio(measurement) | {"by_category": {kind: _ratio(part) for kind, part in measurement.by_category.items()}}
