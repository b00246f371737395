"""The default study, its export, and verifications of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pages.markdown import table
from pages.results.benchmark_tables import EXPORT
from pages.results.figures import ranged
from pages.results.records import RECORDS, Record, conditions, link, stated
from pages.results.section import Section

MOST_TRIALS = 4.0
"""The aim: whole trials that 64 scans may cost."""

REPORT = re.compile(
    r"^(\d+ trials: \d+ stopped early, \d+ not run).*^Scanning a mask took ([\d.]+) seconds: 64 cost as much as ([\d.]+)"
    r" whole trials.*^([^\n]+) wins: ",
    re.M | re.S,
)

DOCTORED = f"""\
The doctored copy claims more than was measured. This writes it.

```python
import json
from pathlib import Path

export, factor = json.loads(Path("notebooks/records/{EXPORT}").read_text()), 1.3
for name in ("speedup", "speedup_low", "speedup_high", "tokens_per_second", "tokens_per_round"):
    export["evidence"][name] *= factor
export["evidence"]["decode_seconds"] /= factor
Path("outputs").mkdir(exist_ok=True)
Path("outputs/doctored.json").write_text(json.dumps(export))
```
"""


def sections() -> Iterator[Section]:
    yield Section(
        "The default study",
        "What `make sweep` finds for SmolLM2-135M: its finalists, measured on prompts that the search never saw.",
        _study("sweep-smollm2-2-cores.md", EXPORT, "report.png"),
        ["make sweep"],
        ["Other models, prompts and data types have other winners."],
    )
    yield Section(
        "Verified exports",
        "`searches.verify` measures an export again and judges its claim. A doctored copy must be refuted.",
        _verifications(EXPORT, "verify-packed-smollm2-2-cores.json", "verify-doctored-packed-smollm2-2-cores.json"),
        [f"searches.verify notebooks/records/{EXPORT}", "searches.verify outputs/doctored.json"],
    )


def _study(report: str, export: str, picture: str) -> list[str]:
    text = (RECORDS / report).read_text(encoding="utf-8")
    best = Record(export)
    finalists = text.partition("## Finalists (held-out prompts)\n\n")[2].partition("\n\n")[0]
    found = REPORT.search(text)
    if found is None:
        raise ValueError(f"{report} is no report of a study")
    trials, scan, cost, winner = found.groups()
    evidence = best["evidence"]
    by_kind = ", ".join(f"{kind} {value:.2f}" for kind, value in evidence["speedup_by_category"].items())
    prompts = f"{evidence['prompts']} held-out prompts, {evidence['max_new_tokens']} new tokens, greedy"
    return [
        f"The winner is *{winner}*. Its speedup by kind of work: {by_kind}.",
        "",
        finalists.replace("identical but for near-ties of rounding", "identical except for near-ties"),
        "",
        f"![The report of the study](../notebooks/records/{picture})",
        *stated(best.machine(), prompts, best.measured_at(), *map(link, (report, export, picture))),
        f"- {trials}, in {best['search']['seconds']:.0f} s of search.",
        f"- Scanning a mask took {scan} s. 64 scans cost as much as {cost} whole trials. The aim is at most"
        f" {MOST_TRIALS:.0f}.",
        "- The intervals of the finalists overlap, so the order among them is not certain.",
    ]


def _verifications(name: str, *verified: str) -> list[str]:
    export, records = Record(name), [Record(one) for one in verified]
    rows = []
    for record in records:
        if record["config"] != export["config"]:
            raise ValueError(f"{record.name} verifies another export than {name}")
        factor = record["claimed"]["value"] / export["evidence"]["speedup"]
        doctored = f"a doctored copy of {link(name)}, claim multiplied by {factor:.1f}"
        copy = link(name) if abs(factor - 1) < 0.001 else doctored
        claimed, reason = ranged(record["claimed"], "value"), record["reason"].removesuffix(".")
        rows.append([copy, export.commit(), claimed, record["verdict"], reason, record.measured_at(), link(record.name)])
    head = ["export", "exported at", "claimed speedup", "verdict", "reason", "verified at", "record"]
    what = f"{records[0]['prompts']['count']} held-out prompts, {records[0]['max_new_tokens']} new tokens, greedy"
    return [
        *table(head, rows),
        *conditions(what, *records),
        f"- A verification stops at one of {records[0]['looks']} looks at most. The measured interval holds for all of them,"
        " so it is wider.",
        "- The dates of the exports are not recorded.",
        "",
        *DOCTORED.splitlines(),
    ]
