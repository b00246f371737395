"""Writes the tables of ``docs/results.md`` from ``notebooks/records``; with ``--check``, says whether the page is stale.

``docs/results.toml`` describes the tables. Each stands between the lines ``<!-- name -->`` and ``<!-- end -->`` of the page.
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
    """Values; ``range`` is a speedup and its interval."""

    def __missing__(self, key: str) -> Any:
        if key == "range":
            name = next((name for name in ("speedup", "ratio", "value", "over_plain") if name in self), "")
            low, high = (self.get(f"{name}_{limit}", self.get(limit)) for limit in ("low", "high"))
            return f"{self[name]:.2f} ({low:.2f} to {high:.2f})"
        raise KeyError(key)

    def text(self, template: str) -> str:
        """A format string over the values; empty where one is missing."""
        try:
            return re.sub(r"(?<=\d)%", " %", template.format_map(self)).replace("_tie", "-tie")
        except (KeyError, TypeError, IndexError, ValueError):
            return ""


class Record(Row):
    """The content of a record, and the name of its file."""

    def __init__(self, path: Path) -> None:
        super().__init__(json.loads(path.read_text(encoding="utf-8"), object_hook=Row))
        self.file = path.name

    def machine(self) -> list[str]:
        """Device, threads, bandwidth, data type, packing of weights, and versions, as far as they are recorded."""
        where = self.get("environment", Row())
        versions = where.get("versions", self.get("versions", {}))
        packing = {True: "", False: "weights not packed"}.get(where.get("packed_weights"), "packing not recorded")
        parts = [where.text("{device_name}"), where.text("{instruction_set}")]
        parts += [where.text("{threads} threads").replace("1 threads", "1 thread")]
        parts += [self.text("reads {read_gigabytes_per_second:.0f} GB/s")]
        parts += [self.text("{target[dtype]}"), self.text("weights in {target[weights]}")]
        parts += [packing if "threads" in where else ""]
        libraries = [name for name in ("torch", "transformers", "numpy") if name in versions]
        parts += [f"{name} {versions[name].partition('+')[0]}" for name in libraries]
        return list(filter(None, parts)) or ["device and versions not recorded"]

    def source(self) -> str:
        """The date, and the commit as a link to the record."""
        date, commit = self.text("{date:.10}") or "no date", self.text("{environment[git_commit]:.7}") or "no commit"
        return f"{date}, [{commit}](../notebooks/records/{self.file})"


Rows = Iterator[Mapping[str, Any]]


def entries(record: Record, path: str) -> Rows:
    """The rows at a dotted path of a record, with the record's other values. Keys of a mapping are their ``name``."""
    if path == "record":
        yield record
        return
    node: Any = record
    for key in filter(None, path.split(".")):
        node = node[key]
    for name, value in node.items() if isinstance(node, Mapping) else [(row.get("name"), row) for row in node]:
        yield from ({**record, "name": name, **row} for row in (value if isinstance(value, list) else [value]))


def replays(record: Record) -> Rows:
    """Counts of scans that were compared with decoding."""
    counts = ("decodings", "rounds", "drafted", "accepted")
    sums = {count: sum(mask[count] for mask in record["masks"]) for count in counts}
    name = "plans with formats" if any("int" in mask["mask"] for mask in record["masks"]) else "masks"
    yield {"name": name, "lengths": ", ".join(map(str, record["draft_lengths"])), **sums, "differ": len(record["differing"])}


def strategies(record: Record) -> Rows:
    """The searches of a race by strategy. ``share`` is that of its seconds after which this project's is as good."""
    for name in dict.fromkeys(search["strategy"] for search in record["searches"]):
        searches = sorted((one for one in record["searches"] if one["strategy"] == name), key=lambda one: one["seed"])
        finals = [f"{search['curve'][-1]['held_out_speedup']:.2f}" for search in searches]
        shares = [found["share_of_its_seconds"] for found in record["verdict"] if found["strategy"] == name]
        spent = max(search["spent"] for search in searches)
        yield {"name": name, "finals": ", ".join(finals), "spent": spent, "share": max(shares, default=None)}


SOURCES = {f.__name__: f for f in (replays, strategies)}


def generate(described: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table and of its conditions."""
    records = [Record(path) for name in described["records"].split(", ") for path in sorted(RECORDS.glob(f"{name}.json"))]
    source, only = described["rows"], described.get("only", "").split(", ")
    found = [Row(row) for one in records for row in (SOURCES[source](one) if source in SOURCES else entries(one, source))]
    rows = [row for row in found if only == [""] or row.text("{name}") in only]
    head, cells = (line.split(" | ") for line in described["table"].splitlines())
    yield from table(head, ([row.text(cell) for cell in cells] for row in rows))
    yield from ("", f"*Conditions:* {conditions(records, rows, described['work'])}.")


def conditions(records: Sequence[Record], rows: Sequence[Row], work: str) -> str:
    """Machines, work, verdicts on the output, dates, commits and files; the work alone if it begins with "as above"."""
    if work.startswith("as above"):
        return records[0].text(work)
    machine = records[0].machine()
    others = [part for record in records[1:] for part in record.machine() if part not in machine]
    machine += [f"or {', '.join(dict.fromkeys(others))}"] if others else []
    verdicts = Counter(row.text("{losslessness[verdict]}") or row.text("{losslessness}") for row in rows)
    outputs = " and ".join(f"{count} {verdict}" for verdict, count in verdicts.items() if verdict)
    parts = [", ".join(machine), records[0].text(work), outputs and f"output: {outputs}"]
    return "; ".join(filter(None, [*parts, *(record.source() for record in records)]))


def page() -> str:
    """The page with its tables."""
    described = tomllib.loads((DOCS / "results.toml").read_text(encoding="utf-8"))
    default = described.pop("default")
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    for name, description in described.items():
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise ValueError(f"results.md has no place for the table {name}")
        text = before + start + "\n".join(generate(default | description)) + f"\n{end}{after}"
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
