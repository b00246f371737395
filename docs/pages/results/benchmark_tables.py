"""The tables of one benchmark, and the notes that follow from its figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pages.markdown import folded, table
from pages.results.figures import describe, percent, ranged
from pages.results.records import Record, conditions, link

Results = Mapping[str, Mapping[str, Any]]

EXPORT = "best-packed-smollm2-2-cores.json"
NOTABLE_LOSS = 0.03  # share of a member's speed; a cascade that loses more is named
FEWEST_PROMPTS = 8  # of a kind of work, for an interval to be worth showing


def benchmark(name: str, wrong: Sequence[str] = ()) -> list[str]:
    """A benchmark. Rows that its record is known to have ``wrong`` are left out."""
    record = Record(name)
    configs = record["configs"]
    results = {key: row for key, row in record["results"].items() if key not in wrong}
    kinds = sorted(results["plain"]["speedup_by_category"])
    few = min(results["plain"]["prompts_by_category"].values())
    by_kind = [[f"`{key}`", *(f"{row['speedup_by_category'][kind]:.2f}" for kind in kinds)] for key, row in results.items()]
    members = ((key, *pair) for key, row in results.items() for pair in row.get("members", {}).items())
    pairs = {f"`{key}` over `{member}`": ratio for key, member, ratio in members}
    ratios = []
    for pair, ratio in pairs.items():
        parts = [ratio["by_category"][kind] for kind in kinds]
        shown = [f"{part['speedup']:.2f}" if few < FEWEST_PROMPTS else ranged(part) for part in parts]
        ratios.append([pair, ranged(ratio), *shown])
    prompts = f"{record['prompts']['count']} prompts ({record['prompts']['name']})"
    return [
        *_decodings(results, configs),
        *folded("Speedup by kind of work", table(["decoding", *kinds], by_kind[1:])),
        *folded("A cascade over each of its members, by kind of work", table(["", "all", *kinds], ratios)),
        *folded("Configurations", [f"- `{key}`: {describe(config)}" for key, config in configs.items()]),
        *conditions(f"{prompts}, {record['max_new_tokens']} new tokens, greedy", record),
        *(f"- {note}" for note in (*_slow(results, pairs), *_bounds(record, results, few))),
    ]


def _decodings(results: Results, configs: Mapping[str, Any]) -> list[str]:
    """One row per decoding."""
    plain = results["plain"]["end_to_end_tokens_per_second"]
    rivals = any("rival" in row for row in results.values())
    rows = []
    for decoding, row in results.items():
        drafts = configs.get(decoding, {"kind": "none"})["kind"] != "none"
        cells = [
            f"`{decoding}`",
            f"{row['tokens_per_second']:.1f}",
            ranged(row, low="speedup_low", high="speedup_high") if decoding != "plain" else "1",
            f"{row['end_to_end_tokens_per_second'] / plain:.2f}",
            f"{row['acceptance_rate']:.2f}" if drafts else "",
            f"{row['tokens_per_round']:.2f}",
            percent(row["draft_share"]) if drafts else "",
            "" if row["drafter_bytes"] is None else f"{row['drafter_bytes'] / 2**20:.0f} MB",
            row["losslessness"]["verdict"].replace("_", "-"),
        ]
        if rivals:
            cells.append(ranged(row["rival"]) if row.get("rival", {}).get("name") in results else "")
        rows.append(cells)
    head = ["decoding", "tokens/s", "speedup (95 %)", "with prompt", "acceptance", "tokens/round"]
    head += ["time drafting", "memory", "output", *(["speedup over transformers' own"] if rivals else [])]
    return table(head, rows)


def _slow(results: Results, pairs: Results) -> Iterator[str]:
    """What is not faster than plain decoding, and cascades that are not faster than their members."""
    ours = {key: row for key, row in results.items() if key != "plain" and not key.startswith("transformers")}
    if slow := [f"`{key}`" for key, row in ours.items() if row["speedup_low"] <= 1]:
        yield f"Not shown to be faster than plain decoding, as the interval is not wholly above 1: {', '.join(slow)}."
    if level := [pair for pair, ratio in pairs.items() if ratio["low"] <= 1]:
        yield f"Cascades not shown to be faster than a member over all prompts: {', '.join(level)}."
    parts = {f"{pair} on {kind}": part for pair, ratio in pairs.items() for kind, part in ratio["by_category"].items()}
    if lost := [f"{at} {part['speedup']:.2f}" for at, part in parts.items() if part["speedup"] < 1 - NOTABLE_LOSS]:
        yield f"Cascades more than {percent(NOTABLE_LOSS)} slower than a member at a kind of work: {'; '.join(lost)}."


def _bounds(record: Record, results: Results, few: int) -> Iterator[str]:
    """What the figures rest on, how near ties are, which record the export is, and what verifying a tree costs."""
    yield f"Figures by kind of work rest on {few} prompts each{', so they are rough' if few < FEWEST_PROMPTS else ''}."
    checks = {key: row["losslessness"] for key, row in results.items() if row["losslessness"]["verdict"] == "near_tie"}
    if checks:
        key, widest = max(checks.items(), key=lambda pair: float(pair[1]["largest_margin"]))
        margin, tolerance = f"{widest['largest_margin']:.3g}", f"{widest['tolerance']:.3g}"
        yield f"The widest near-tie is {margin} of a logit (`{key}`); rounding explains up to {tolerance}."
    if record["configs"].get("export") == Record(EXPORT)["config"]:
        yield f"`export` is {link(EXPORT)}."
    if timing := record["verification"]:
        tree, chain, tokens = timing["tree_seconds"], timing["chain_seconds"], timing["tokens"]
        yield (
            f"Verifying a tree of {tokens} tokens takes {tree / chain:.2f} times as long as verifying a chain of {tokens}, "
            f"which takes {1000 * chain:.1f} ms after {timing['context']} tokens."
        )
