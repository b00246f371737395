"""Markdown tables of a benchmark record: speed of every contender, by category, and the conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerskip.costs.tree_timing import TreeTiming
from searches.study.empty_outputs import empty_note, speedup_cells


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown: all prompts first, then by category, then the conditions."""
    lines = [
        "| decoding | tokens/s | speedup | 95 % interval | acceptance | tokens/round | drafting | drafter's memory | output "
        "| speedup over transformers |",
        "|" + "---|" * 10,
    ]
    results = record["results"]
    for name, result in results.items():
        rival = _interval(result["rival"]) if "rival" in result else ""
        drafts = record["configs"].get(name, {"kind": "none"})["kind"] != "none"
        acceptance = f"{result['acceptance_rate']:.2f}" if drafts else ""
        draft_share = f"{result['draft_share']:.0%}" if drafts else ""
        output = result["losslessness"]["verdict"].replace("_", "-") if result["lossless"] else "lossy"
        lines.append(
            f"| {name} | {result['tokens_per_second']:.1f} | {speedup_cells(result, 2)} | {acceptance} "
            f"| {result['tokens_per_round']:.2f} | {draft_share} | {_memory(result)} | {output} | {rival} |"
        )
    categories = sorted({category for result in results.values() for category in result["speedup_by_category"]})
    marked = {name if result["lossless"] else f"{name} (lossy)": result for name, result in results.items()}
    speedups = {name: result["speedup_by_category"] for name, result in marked.items()}
    drafting = {name: result for name, result in marked.items() if result["tokens_per_round"] > 1}
    rounds = {name: result["tokens_per_round_by_category"] for name, result in drafting.items()}
    lines += _by_category("speedup by category", categories, speedups)
    lines += [line for result in list(results.values())[:1] for line in empty_note(result)]
    lines += _near_ties(results)
    lines += _by_category("tokens per round", categories, rounds)
    lines += _cascades(results, categories)
    if record["verification"] is not None:
        timing = TreeTiming(**record["verification"])
        lines += [
            "",
            f"Verifying a tree of {timing.tokens} tokens takes {timing.ratio:.2f} times as long as a chain of as many, "
            f"{timing.chain_seconds * 1000:.1f} ms after {timing.context} tokens.",
        ]
    machine, versions = record["environment"], record["environment"]["versions"]
    prompts = record["prompts"]
    engines = "".join(f"{engine} {version}, " for engine, version in record.get("engines", {}).items())
    lines += [
        "",
        f"{record['target']['name']} in {record['target']['dtype']} on {machine['device']} ({machine['device_name']}, "
        f"{machine['threads']} threads), {prompts['count']} prompts ({prompts['name']}) x {record['repeats']}, "
        f"{record['max_new_tokens']} new tokens, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"{engines}{record['date']}.",
    ]
    return "\n".join(lines)


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['speedup']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _memory(result: Mapping[str, Any]) -> str:
    """Return the memory of the drafter without the target and, on CUDA, the further memory of decoding."""
    peak = "" if result["decoding_bytes"] is None else f", {result['decoding_bytes'] / 2**20:.0f} MB to decode"
    return "" if result["drafter_bytes"] is None else f"+{result['drafter_bytes'] / 2**20:.0f} MB{peak}"


def _by_category(title: str, categories: Sequence[str], rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a table of one figure per category; nothing without rows."""
    lines = [
        f"| {name} | {' | '.join(f'{row[category]:.2f}' if category in row else '' for category in categories)} |"
        for name, row in rows.items()
    ]
    return ["", f"| {title} | {' | '.join(categories)} |", "|---" * (1 + len(categories)) + "|", *lines] if lines else []


def _near_ties(results: Mapping[str, Any]) -> list[str]:
    """Return a line about the widest near-tie: the margin between the target's logits, and what rounding explains."""
    checks = {name: result["losslessness"] for name, result in results.items()}
    ties = {name: check for name, check in checks.items() if check["verdict"] == "near_tie"}
    if not ties:
        return []
    name, widest = max(ties.items(), key=lambda pair: float(pair[1]["largest_margin"]))
    margin = f"at most {widest['largest_margin']:.3g} of a logit ({name}); rounding explains {widest['tolerance']:.3g}"
    return ["", f"near-tie: outputs differ only where the target's best tokens are tied up to rounding, by {margin}."]


def _cascades(results: Mapping[str, Any], categories: Sequence[str]) -> list[str]:
    """Return a table of the paired speedup of each cascade over its members; nothing without cascades."""
    rows = []
    for name, result in results.items():
        for member, ratio in result.get("members", {}).items():
            cells = [_interval(ratio), *(_interval(ratio["by_category"][category]) for category in categories)]
            rows.append(f"| {name} / {member} | {' | '.join(cells)} |")
    head = [
        "",
        f"| speedup of a cascade over its member | all | {' | '.join(categories)} |",
        "|---" * (2 + len(categories)) + "|",
    ]
    return [*head, *rows] if rows else []
