"""Records of ``notebooks/records``, and the conditions under which they were measured."""

from __future__ import annotations

import json
from typing import Any

from pages.generated import DOCS

RECORDS = DOCS.parent / "notebooks" / "records"


class Record(dict[str, Any]):
    """The content of a record, and the name of its file."""

    def __init__(self, name: str) -> None:
        super().__init__(json.loads((RECORDS / name).read_text(encoding="utf-8")))
        self.name = name

    def commit(self) -> str:
        commit = self.get("environment", {}).get("git_commit")
        return f"commit {commit[:7]}" if commit else "commit not recorded"

    def measured_at(self) -> str:
        return f"{self.get('date', 'date not recorded')}, {self.commit()}"

    def machine(self) -> str:
        where, versions = self["environment"], self["environment"]["versions"]
        threads = "1 thread" if where["threads"] == 1 else f"{where['threads']} threads"
        packed = {True: "weights packed", False: "weights not packed", None: "packing of weights not recorded"}
        return (
            f"{where['device_name']} ({where['device']}, {threads}), {self['target']['dtype']}, "
            f"{packed[where.get('packed_weights')]}, torch {versions['torch']}, transformers {versions['transformers']}"
        )


def link(name: str) -> str:
    return f"[`{name}`](../notebooks/records/{name})"


def conditions(what: str, *records: Record) -> list[str]:
    """Machine, work, date and record; of several records, dates and links are in the table."""
    if len(records) == 1:
        return stated(records[0].machine(), what, records[0].measured_at(), link(records[0].name))
    machines: dict[str, list[str]] = {}
    for record in records:
        machines.setdefault(record.machine(), []).append(f"`{record.name}`")
    where = [machine + (f" ({', '.join(of)})" if len(machines) > 1 else "") for machine, of in machines.items()]
    return stated("; ".join([what, *where]))


def stated(*conditions: str) -> list[str]:
    return ["", f"*Conditions:* {', '.join(conditions)}.", ""]
