"""Markdown tables of a record of ``searches.evaluate.gpu``, one per part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
Row = Mapping[str, Any]

_FIGURES = (
    ("tokens_per_second", "{:.1f} tokens/s"),
    ("share_of_floor", "{:.0%} of the floor"),
    ("over_plain", "{:.2f} x plain"),
    ("tokens_per_round", "{:.2f} tokens/round"),
    ("over_one_token", "{:.2f} x one token"),
    ("capture_seconds", "{:.1f} s capturing"),
    ("startup_seconds", "{:.1f} s more at first"),
    ("passed", "{} passed"),
    ("failed", "{} failed"),
    ("skipped", "{} skipped"),
    ("bandwidth", "{:.4g} bytes/s"),
)


def describe_row(name: str, row: Row) -> str:
    """Return a row in one line."""
    if "error" in row:
        return f"{name}: ERROR: {row['error']}"
    if "left_out" in row:
        return f"{name}: left out: {row['left_out']}"
    figures = [text.format(row[field]) for field, text in _FIGURES if row.get(field) is not None]
    return f"{name}: {', '.join(figures)}" if figures else name


def table(record: Record) -> str:
    """Return all parts of a record as Markdown, and the conditions."""
    device, versions = record["device"], record["environment"]["versions"]
    conditions = (
        f"{record['target']['name']} in {device['dtype']} on {record['environment']['device_name']}, "
        f"{device['bandwidth'] / 1e9:.0f} GB/s, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"{record['date']}."
    )
    return "\n".join([*tables(record), "", conditions])


def tables(record: Record) -> list[str]:
    """Return all parts of a record as lines of Markdown, with what was left out, errors and warnings below each."""
    lines: list[str] = []
    for name, part in record["parts"].items():
        bad = [describe_row(key, row) for key, row in part["rows"].items() if row.keys() & {"error", "left_out"}]
        bad += [f"ERROR: {part['error']}"] if "error" in part else []
        bad += part.get("log", [])
        found = _TABLES[name](part["rows"])
        for block in (found, [f"- {name}: {line}" for line in bad]):
            lines += ["", *block] if block else []
    return lines


def rates(rows: Mapping[str, Row]) -> list[str]:
    """Return the table of plain decoding: one line per model, with transformers' decodings beside ours."""
    lines = [
        "| model | tokens/s | share of the floor | bytes per token | start-up | x transformers | x its static cache |",
        "|" + "---|" * 7,
    ]
    models = dict.fromkeys(row["model"] for row in rows.values() if "model" in row)
    for model in models:
        ours, eager, static = (rows.get(f"{model} {decoding}", {}) for decoding in _DECODINGS)
        cells = ["", "", "", ""]
        if "tokens_per_second" in ours:
            size = ours["weight_bytes"] + ours["cache_bytes"] * ours["context"]
            cells = [f"{ours['tokens_per_second']:.1f}", f"{100 * ours['share_of_floor']:.0f} %", f"{size / 1e9:.3f} GB"]
            cells.append(f"{ours['startup_seconds']:.1f} s")
        cells += [f"{1 / row['over_plain']:.2f}" if row.get("over_plain") else "" for row in (eager, static)]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return lines if models else []


def drafters(rows: Mapping[str, Row]) -> list[str]:
    """Return the table of drafters."""
    lines = ["| drafter | tokens/s | x plain | 95 % interval | tokens/round | acceptance | output |", "|" + "---|" * 7]
    for name, row in rows.items():
        if "tokens_per_second" in row:
            lines.append(
                f"| {name} | {row['tokens_per_second']:.1f} | {row['over_plain']:.2f} | {_interval(row)} "
                f"| {row['tokens_per_round']:.2f} "
                f"| {row['acceptance_rate']:.2f} | {row['losslessness']['verdict'].replace('_', '-')} |"
            )
    return lines if len(lines) > 2 else []


def _interval(row: Row) -> str:
    limits = row["over_plain_low"], row["over_plain_high"]
    return " to ".join("unknown" if limit is None else f"{limit:.2f}" for limit in limits)


def verification(rows: Mapping[str, Row]) -> list[str]:
    """Return the table of passes: milliseconds and multiples of a pass over one token, by number of tokens."""
    timed = [row for row in rows.values() if "over_one_token" in row]
    counts = list(dict.fromkeys(row["tokens"] for row in timed))
    lines = [f"| tokens of a pass | {' | '.join(map(str, counts))} |", "|" + "---|" * (1 + len(counts))]
    for shape in dict.fromkeys(row["shape"] for row in timed):
        found = {row["tokens"]: row for row in timed if row["shape"] == shape}
        cells = [
            f"{1000 * found[n]['seconds']:.2f} ms ({found[n]['over_one_token']:.2f} x)" if n in found else "" for n in counts
        ]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return lines if timed else []


def lines_of(rows: Mapping[str, Row]) -> list[str]:
    """Return one line per row."""
    return [f"- {describe_row(name, row)}" for name, row in rows.items() if not row.keys() & {"error", "left_out"}]


_DECODINGS = ("layerskip", "transformers", "transformers_static")
_TABLES = {"tests": lines_of, "plain": rates, "drafters": drafters, "verification": verification, "study": lines_of}
