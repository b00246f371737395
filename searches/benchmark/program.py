"""Benchmark of named configurations and transformers' own decoding methods, measured side by side.

All contenders are measured in one run, interleaved prompt by prompt; OpenVINO GenAI, vLLM and llama.cpp are among them where
they are installed. ``config=best.json`` adds an export and measures on held-out prompts only. Prints a table, writes JSON
and logs to MLflow. An interrupted benchmark keeps nothing.

The table has the bytes of the weights at fewer bits that self-drafts read. The record also has the peak memory of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from layerskip import Measurement, PromptSet, Sampling, SpeculativeConfig, Target
from layerskip.files import write_json
from layerskip.measure.measure import Contender, Task
from layerskip.measure.measurement import Sample, check_output
from searches.app.checks import check_seed
from searches.benchmark.contenders import BASELINE, build_contenders, check_rows, fill_defaults
from searches.benchmark.peers import Peer
from searches.engines.peer import EnginePeer, interleave_alive
from searches.report.tables import Row, as_markdown, category_speedup, conditions, empty_note, speedup_cells, with_interval
from searches.results import record_header
from searches.study.machine import read_gigabytes_per_second
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
    check_rows(config)
    target: Target = instantiate(config.target)
    check_prompts(prompts, target, measuring.max_new_tokens)
    fill_defaults(config, target)
    with contextlib.ExitStack() as opened:
        decoders, rivals, configs = build_contenders(config, target, prompts, sampling, opened)
        tracker = Tracker(config.tracking.uri, Path(config.outputs), config.tracking.experiment)
        reads = read_gigabytes_per_second(target.device)
        task, repeats = Task(sampling, measuring.max_new_tokens, config.seed), measuring.repeats
        with tqdm(total=len(prompts) * repeats, disable=None) as progress:
            rows, ended = interleave_alive(target, prompts, decoders, task, repeats, progress.update)
    decoders = {name: each for name, each in decoders.items() if name not in ended}
    rivals = {name: rival for name, rival in rivals.items() if rival in decoders}
    engines = {name: peer for name, peer in decoders.items() if isinstance(peer, EnginePeer)}
    check_output(row[BASELINE] for row in rows)
    record = record_header("layerskip.benchmark/1", target) | {
        "sampling": sampling.to_dict(),
        "max_new_tokens": task.max_new_tokens,
        "repeats": repeats,
        "prompts": {"name": prompts.name, "count": len(prompts), "digest": prompts.digest},
        "configs": {name: drafting.to_dict() for name, drafting in configs.items()},
        "results": {name: _result(rows, name, rivals.get(name), configs, each) for name, each in decoders.items()},
        "read_gigabytes_per_second": reads,
        "left_out": ended,
        "engines": {peer.engine: peer.version for peer in engines.values()},
        "engine_precision": {name: peer.precision for name, peer in engines.items()},
    }
    text, path = table(record), Path(config.record or Path(config.outputs) / "benchmark.json")
    print(text)
    write_json(path, record)
    print(f"wrote {path}")
    tracker.log_benchmark(record, {"benchmark.md": text, "config.yaml": OmegaConf.to_yaml(config, resolve=True)}, path)
    return record


def _result(
    rows: list[Mapping[str, Sample]],
    name: str,
    rival: str | None,
    configs: Mapping[str, SpeculativeConfig],
    contender: Contender,
) -> dict[str, Any]:
    """Return the metrics of a contender, its speedup over a rival, and over members that are contenders themselves.

    Outputs of peers are compared by the rounding of the data type in which they compute.
    """
    measured = Measurement.of(rows, BASELINE, name)
    result = measured.to_dict()
    if isinstance(contender, (Peer, EnginePeer)):
        dtype = contender.rounds_to if isinstance(contender, EnginePeer) else contender.target.model.dtype
        result["losslessness"] = measured.lossless.judged_in(dtype).to_dict()
    result["end_to_end_tokens_per_second"] = result["tokens"] / (result["prefill_seconds"] + result["decode_seconds"])
    if rival is not None:
        result["rival"] = {"name": rival} | _ratio(Measurement.of(rows, rival, name))
    members = configs[name].members if name in configs else ()
    against = {other: Measurement.of(rows, other, name) for other, config in configs.items() if config in members}
    if against:
        result["members"] = {other: _ratio(whole) for other, whole in against.items()}
    return result


def _ratio(measurement: Measurement) -> dict[str, float]:
    low, high = measurement.interval()
    return {"speedup": measurement.speedup, "low": low, "high": high}


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown: all prompts first, then by category and by the tokens of a round, then the conditions."""
    results = record["results"]
    lines = as_markdown([_row(name, result, record["configs"].get(name)) for name, result in results.items()])
    tables = [_columns(title, results, cells) for title, cells in _FURTHER_TABLES.items()]
    cascades = [
        {"cascade": name, "member": member, "speedup over the member": _interval(ratio)}
        for name, result in results.items()
        for member, ratio in result.get("members", {}).items()
    ]
    lines += [line for rows in tables for line in ("", *as_markdown(rows))]
    lines += [*empty_note(next(iter(results.values()))), *_near_ties(results)]
    lines += ["", *as_markdown(cascades)] if cascades else []
    return "\n".join([*lines, "", conditions(record)])


def _columns(title: str, results: Mapping[str, Any], cells: Callable[[Mapping[str, Any]], Row]) -> list[Row]:
    """Return a row per contender, with a column for each cell that any contender has."""
    found = {name: cells(result) for name, result in results.items()}
    columns = dict.fromkeys(column for row in sorted(found.values(), key=len, reverse=True) for column in row)
    return [{title: name} | {column: row.get(column, "") for column in columns} for name, row in found.items()]


def _length_cells(result: Mapping[str, Any]) -> Row:
    """Return how many rounds committed so many tokens, and how likely a round with one token fewer went so far."""
    counts = result["acceptance_length_histogram"]
    rates = result["conditional_acceptance_rate"].items()
    return {length: f"{counts.get(length, 0)} ({rate:.2f})" for length, rate in rates}


def _category_cells(result: Mapping[str, Any], name: str) -> Row:
    return {category: f"{value:.2f}" for category, value in result[name].items()}


_FURTHER_TABLES: Mapping[str, Callable[[Mapping[str, Any]], Row]] = {
    "speedup by category": lambda result: {name: category_speedup(result, name) for name in result["speedup_by_category"]},
    "tokens/round by category": lambda result: _category_cells(result, "mean_acceptance_length_by_category"),
    "Spec-Bench's speedup": lambda result: (
        {"overall": f"{result['spec_bench_speedup']:.2f}"} | _category_cells(result, "spec_bench_speedup_by_category")
    ),
    "rounds by tokens (conditional acceptance)": _length_cells,
}


def _row(name: str, result: Mapping[str, Any], config: Mapping[str, Any] | None) -> Row:
    """Return the row of a contender in the table of all prompts."""
    drafts = config is not None and config["method"] != "none"
    return {
        "decoding": name,
        "tokens/s": f"{result['tokens_per_second']:.1f}",
        **speedup_cells(result, 2),
        "acceptance": f"{result['acceptance_rate']:.2f}" if drafts else "",
        "tokens/round": f"{result['mean_acceptance_length']:.2f}",
        "drafting": f"{result['draft_share']:.0%}" if drafts else "",
        "copies": f"{result['copies_bytes'] / 1e6:.0f} MB" if result["copies_bytes"] else "",
        "output": result["losslessness"]["verdict"].replace("_", "-"),
        "speedup over transformers": _interval(result["rival"]) if "rival" in result else "",
    }


def _interval(ratio: Mapping[str, float]) -> str:
    return with_interval(ratio["speedup"], ratio["low"], ratio["high"])


def _near_ties(results: Mapping[str, Any]) -> list[str]:
    """Return a line about the widest near-tie: the margin between the target's logits, and what rounding explains."""
    checks = [(name, result["losslessness"]) for name, result in results.items()]
    ties = [(name, check) for name, check in checks if check["verdict"] == "near_tie"]
    if not ties:
        return []
    name, widest = max(ties, key=lambda tie: float(tie[1]["largest_margin"]))
    margin = f"at most {widest['largest_margin']:.3g} of a logit ({name}); rounding explains {widest['tolerance']:.3g}"
    return ["", f"near-tie: outputs differ only where the target's best tokens are tied up to rounding, by {margin}."]
