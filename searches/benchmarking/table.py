"""How does the record of a benchmark read? As tables: who is how fast, at which kind of work, and what was told besides.

A line says how near the ties are where outputs part in half precision: the margin between the target's own logits, beside
what rounding explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerskip.costs.tree_timing import TreeTiming


def table(record: Mapping[str, Any]) -> str:
    """A record as Markdown: all prompts, then kind of work by kind of work, then the conditions."""
    lines = [
        "| decoding | tokens/s | x plain | 95 % interval | acceptance | tokens/round | drafting | drafter's memory | output "
        "| x rival (transformers) |",
        "|" + "---|" * 10,
    ]
    results = record["results"]
    for name, found in results.items():
        rival = found.get("rival")
        against = f"{rival['speedup']:.2f} ({rival['low']:.2f} to {rival['high']:.2f})" if rival else ""
        drafts = record["configs"].get(name, {"kind": "none"})["kind"] != "none"
        acceptance = f"{found['acceptance_rate']:.2f}" if drafts else ""
        drafting = f"{found['draft_share']:.0%}" if drafts else ""
        output = found["losslessness"]["verdict"].replace("_", "-") if found["lossless"] else "lossy"
        lines.append(
            f"| {name} | {found['tokens_per_second']:.1f} | {found['speedup']:.2f} "
            f"| {found['speedup_low']:.2f} to {found['speedup_high']:.2f} | {acceptance} "
            f"| {found['tokens_per_round']:.2f} | {drafting} | {_memory(found)} "
            f"| {output} | {against} |"
        )
    kinds = sorted({kind for found in results.values() for kind in found["speedup_by_category"]})
    lines += ["", f"| x plain, by kind of work | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for name, found in results.items():
        shown = [f"{found['speedup_by_category'][kind]:.2f}" for kind in kinds]
        lines.append(f"| {_marked(name, found)} | {' | '.join(shown)} |")
    lines += _near_ties(results) + _rounds(results, kinds) + _cascades(results, kinds)
    if (found := record.get("verification")) is not None:  # older records have none
        timing = TreeTiming(**found)
        lines += [
            "",
            f"Verifying a tree of {timing.tokens} tokens takes {timing.ratio:.2f} times what a chain of as many takes, "
            f"{timing.chain_seconds * 1000:.1f} ms behind {timing.context} tokens.",
        ]
    where, versions = record["environment"], record["environment"]["versions"]
    prompts = record["prompts"]
    lines += [
        "",
        f"{record['target']['name']} in {record['target']['dtype']} on {where['device']} ({where['device_name']}, "
        f"{where['threads']} threads), {prompts['count']} prompts ({prompts['name']}) x {record['repeats']}, "
        f"{record['max_new_tokens']} new tokens, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"{record['date']}.",
    ]
    return "\n".join(lines)


def _memory(found: Mapping[str, Any]) -> str:
    """What a drafter holds beside the target, and on CUDA how far memory rises in decoding; older records know neither."""
    if "drafter_bytes" not in found:
        return ""
    risen = "" if found["decoding_bytes"] is None else f", {found['decoding_bytes'] / 2**20:.0f} MB to decode"
    return f"+{found['drafter_bytes'] / 2**20:.0f} MB{risen}"


def _marked(name: str, found: Mapping[str, Any]) -> str:
    return name if found["lossless"] else f"{name} (lossy)"


def _near_ties(results: Mapping[str, Any]) -> list[str]:
    """How near ties are, by the widest of them; older records do not say what rounding explains."""
    checks = {name: found["losslessness"] for name, found in results.items()}
    ties = {name: found for name, found in checks.items() if found["verdict"] == "near_tie" and "tolerance" in found}
    if not ties:
        return []
    name, widest = max(ties.items(), key=lambda pair: float(pair[1]["largest_margin"]))
    said = f"{widest['largest_margin']:.3g} of a logit apart ({name}), of {widest['tolerance']:.3g} that rounding explains"
    return ["", f"near-tie: outputs part where the target's own choices are a tie up to rounding, at most {said}."]


def _rounds(results: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """Tokens per round, which hang on the drafter and the prompts, not on the machine; older records do not say."""
    rows = []
    for name, found in results.items():
        if (counts := found.get("tokens_per_round_by_category")) and found["tokens_per_round"] > 1:
            rows.append(f"| {_marked(name, found)} | {' | '.join(f'{counts[kind]:.2f}' for kind in kinds)} |")
    return ["", f"| tokens per round | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|", *rows] if rows else []


def _cascades(results: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """How many times as fast as its members a cascade is, prompt beside prompt."""

    def said(ratio: Mapping[str, float]) -> str:
        return f"{ratio['speedup']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"

    rows = []
    for name, found in results.items():
        for member, against in found.get("members", {}).items():
            shown = [said(against), *(said(against["by_category"][kind]) for kind in kinds)]
            rows.append(f"| {name} x {member} | {' | '.join(shown)} |")
    head = ["", f"| a cascade x its member | all | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|"]
    return [*head, *rows] if rows else []
