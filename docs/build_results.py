"""Writes the tables of ``docs/results.md`` from ``notebooks/records``; with ``--check``, says whether the page is stale.

The text of the page is written by hand. ``docs/results.toml`` describes each table. A table is generated between the lines
``<!-- name -->`` and ``<!-- end -->`` of the page.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RECORDS = DOCS.parent / "notebooks" / "records"


class Row(dict[str, Any]):
    """Values of a record, and what follows from them.

    ``range`` is a speedup with its interval. ``<name>_ms`` and ``<name>_mb`` are ``<name>_seconds`` and ``<name>_bytes``.
    """

    def __missing__(self, key: str) -> Any:
        name, _, unit = key.rpartition("_")
        if key == "range":
            name = next(name for name in ("speedup", "ratio", "value", "over_plain", "") if name in self or not name)
            low, high = (self.get(f"{name}_{limit}", self.get(limit)) for limit in ("low", "high"))
            return f"{self[name]:.2f} ({low:.2f} to {high:.2f})"
        if unit == "ms":
            return 1000 * self[f"{name}_seconds"]
        if unit == "mb":
            return self[f"{name}_bytes"] / 2**20
        raise KeyError(key)

    def text(self, template: str) -> str:
        """A format string over the values; empty where one is missing."""
        try:
            return re.sub(r"(?<=\d)%", " %", template.format_map(self)).replace("_tie", "-tie")
        except (KeyError, TypeError, IndexError, ValueError):
            return ""


class Record(Row):
    """The content of a record, and the name of its file."""

    def __init__(self, file: str) -> None:
        super().__init__(json.loads((RECORDS / file).read_text(encoding="utf-8"), object_hook=Row))
        self.file = file

    def machine(self) -> list[str]:
        """Device, threads, data type, packing of weights, and versions, as far as they are recorded."""
        where = self.get("environment", Row())
        versions = where.get("versions", self.get("versions", {}))
        named = [
            f"{name} {versions[name].partition('+')[0]}" for name in ("torch", "transformers", "numpy") if name in versions
        ]
        packing = {True: "", False: "weights not packed", None: "packing not recorded"}[where.get("packed_weights")]
        threads = where.text("threads: {threads}")
        known = [where.text("{device_name}"), threads, self.text("{target[dtype]}"), packing if threads else "", *named]
        return list(filter(None, known)) or ["device and versions not recorded"]

    def source(self) -> str:
        """Date and commit."""
        date = self.get("date", "date not recorded").partition(" ")[0] if "date" in self else "date not recorded"
        commit = self.text("commit {environment[git_commit]:.7}") or "commit not recorded"
        return f"{date}, {commit}"


def entries(records: Sequence[Record], path: str) -> Iterator[Mapping[str, Any]]:
    """The rows at a path of each record. Those of a mapping have their key as ``name``."""
    for record in records:
        if path == "record":
            yield {"file": record.file, **record}
            continue
        node: Any = record
        for key in path.split("."):
            node = node[key]
        named = node.items() if isinstance(node, Mapping) else [(row["name"], row) for row in node]
        for name, value in named:
            yield from ({"name": name, **row} for row in (value if isinstance(value, list) else [value]))


def members(records: Sequence[Record]) -> Iterator[Mapping[str, Any]]:
    """Each cascade of a benchmark over each of its members."""
    for name, row in records[0]["results"].items():
        yield from ({"name": name, "member": member, **ratio} for member, ratio in row.get("members", {}).items())


def replays(records: Sequence[Record]) -> Iterator[Mapping[str, Any]]:
    """Counts of scans that were compared with decoding, and their sums."""
    counts = ("decodings", "rounds", "drafted", "accepted", "differ")
    found = []
    for record in records:
        sums = {count: sum(mask[count] for mask in record["masks"]) for count in counts[:-1]}
        found.append({"name": ", ".join(map(str, record["draft_lengths"])), **sums, "differ": len(record["differing"])})
    yield from [*found, {"name": "all"} | {count: sum(row[count] for row in found) for count in counts}]


def compiled(records: Sequence[Record]) -> Iterator[Mapping[str, Any]]:
    """Plain decoding with compiled layers beside the same without."""
    for record in records:
        packed = "yes" if record["environment"]["packed_weights"] else "no"
        yield {"packed": packed, **record["parts"]["drafters"]["rows"]["plain_compiled"]}


def contexts(records: Sequence[Record]) -> Iterator[Mapping[str, Any]]:
    """Speedups at a long context, with the error of their predictions."""
    for row in entries(records, "points"):
        yield {**row, "error": row["predicted"] / row["measured"] - 1, "size": abs(row["predicted"] / row["measured"] - 1)}


def strategies(records: Sequence[Record]) -> Iterator[Mapping[str, Any]]:
    """The searches of a race by strategy. ``share`` is that of its seconds after which this project's is as good."""
    for name in ("ours", "swift", "draft_verify", "random", "tpe"):
        searches = [search for search in records[0]["searches"] if search["strategy"] == name]
        if not searches:
            continue
        finals = {search["seed"]: f"{search['curve'][-1]['held_out_speedup']:.2f}" for search in searches}
        shares = [found["share_of_its_seconds"] for found in records[0]["verdict"] if found["strategy"] == name]
        row = {"name": name, "finals": ", ".join(finals[seed] for seed in sorted(finals))}
        yield row | {"spent": max(search["spent"] for search in searches), "share": max(shares, default=None)}


def agreements(records: Sequence[Record]) -> Iterator[Mapping[str, Any]]:
    """How often drafts with each kind of bridge are right, by skipped run of layers."""
    for record in records:
        points = [point for point in record["points"] if point["tokens"] is None]
        for mask in sorted({point["mask"] for point in points}):
            yield {"name": record["target"]["name"], "mask": mask} | {p["bridge"]: p for p in points if p["mask"] == mask}


def bridged(records: Sequence[Record]) -> Iterator[Mapping[str, Any]]:
    """Decodings with and without bridges; ``exported`` is that of the winner."""
    for record in records:
        for name, row in record["measured"].items():
            found = {**row, "name": name, "model": record["target"]["name"], "over": record["over_empty"].get(name)}
            yield found | ({"exported": found} if row["config"] == record["winner"] else {})


def scenarios(records: Sequence[Record]) -> Iterator[Mapping[str, Any]]:
    """Studies of several workers, their faults, and the criteria that they miss."""
    for name, row in records[0]["scenarios"].items():
        met = [count["passed"] for count in records[0]["counts"] if count["name"].startswith(f"{name}:")]
        faults = [f"{count} {fault.replace('_', ' ')}" for fault, count in row["faults"].items()]
        faults += ["clock an hour ahead"] if row["settings"].get("hours_ahead") else []
        finished = sum(row["trials"].get(state, 0) for state in ("COMPLETE", "PRUNED"))
        counts = {"met": sum(met), "of": len(met), "missed": len(met) - sum(met)}
        yield {**row, "name": name, "finished": finished, "shown": ", ".join(faults), **counts}


def heads(records: Sequence[Record]) -> Iterator[Mapping[str, Any]]:
    """The heads of a record that is a mapping of heads."""
    yield from ({"name": name, **head} for name, head in records[0].items())


SOURCES = {
    source.__name__: source
    for source in (members, replays, compiled, contexts, strategies, agreements, bridged, scenarios, heads)
}


def generate(description: Mapping[str, Any]) -> list[str]:
    """The lines of a table, of its conditions and of its aim."""
    records = [Record(path.name) for name in description["records"] for path in sorted(RECORDS.glob(name))]
    source, columns, only = description["rows"], description["columns"], description.get("only")
    rows = map(Row, SOURCES[source](records) if source in SOURCES else entries(records, source))
    kept = [row for row in rows if only is None or row["name"] in only]
    lines = table(list(columns), [[row.text(text) for text in columns.values()] for row in kept])
    work = description.get("work", "")
    found = conditions(records, kept, work) if not work.startswith("as above") else records[0].text(work)
    lines += ["", f"*Conditions:* {found}."]
    if "aim" in description:
        missed = [row.text("{name}") or row.text(next(iter(columns.values()))) for row in kept
                  if not all(meets(row, limit) for limit in description["limits"])]  # fmt: skip
        lines += ["", f"*Aim:* {description['aim']}. " + (f"**Missed:** {', '.join(missed)}." if missed else "It is met.")]
    return lines


def conditions(records: Sequence[Record], rows: Sequence[Row], work: str) -> str:
    """Machines, work, verdicts on the output, dates, commits and files."""
    verdicts = Counter(row.text("{losslessness[verdict]}") or row.text("{losslessness}") for row in rows)
    outputs = " and ".join(f"{count} {verdict}" for verdict, count in verdicts.items() if verdict)
    machine = records[0].machine()
    others = [part for record in records[1:] for part in record.machine() if part not in machine]
    machine += [f"or {', '.join(dict.fromkeys(others))}"] if others else []
    files: dict[str, list[str]] = {}
    for record in records:
        files.setdefault(record.source(), []).append(f"[record](../notebooks/records/{record.file})")
    measured = [", ".join([source, *links]) for source, links in files.items()]
    parts = [", ".join(machine), records[0].text(work), outputs and f"output: {outputs}", *measured]
    return "; ".join(filter(None, parts))


def meets(row: Row, limit: str) -> bool:
    """Whether a row is within a limit such as ``{share} <= 0.05``. A value that the row lacks is within it."""
    template, sign, bound = limit.split()
    value = row.text(template)
    return value in ("", "None") or (float(value) <= float(bound) if sign == "<=" else float(value) >= float(bound))


def page() -> str:
    """The page with its tables."""
    described = tomllib.loads((DOCS / "results.toml").read_text(encoding="utf-8"))
    shared = described.pop("shared")
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    for name, description in described.items():
        lines = "\n".join(generate(shared.get(description.get("shared"), {}) | description))
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise ValueError(f"results.md has no place for the table {name}")
        text = f"{before}{start}{lines}\n{end}{after}"
    return text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(head)} |", "|" + "-|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def write_or_check(name: str, text: str) -> None:
    """Writes a page. With ``--check`` it stays as it is, and the script ends with exit code 1 where it is stale."""
    page = DOCS / name
    if "--check" not in sys.argv[1:]:
        page.write_text(text, encoding="utf-8")
    elif not page.exists() or page.read_text(encoding="utf-8") != text:
        sys.exit(f"docs/{name} is stale: run .venv/bin/python docs/{Path(sys.argv[0]).name}")


if __name__ == "__main__":
    write_or_check("results.md", page())
