"""Races of search strategies under one budget."""

from __future__ import annotations

from collections.abc import Iterator

from pages.markdown import table
from pages.results.figures import aims, percent
from pages.results.records import Record, conditions, link, stated
from pages.results.section import Section

MOST_SHARE = 0.05
"""The aim: the share of another strategy's seconds, to be as good as its result."""

STRATEGIES = {
    "ours": "ours (scans)",
    "swift": "SWIFT",
    "draft_verify": "Draft & Verify",
    "random": "random search",
    "tpe": "Optuna's default (TPE)",
}


def sections() -> Iterator[Section]:
    yield Section(
        "Search strategies on planted decoders",
        "Five strategies search simulated decoders where skipping pays. Each seed is another decoder. Figures are the true"
        " speedup of what a strategy names in the end.",
        _race("race-planted.json"),
        ["OMP_NUM_THREADS=1 searches.evaluate.race bench=simulated"],
        ["SWIFT's search ends by itself, before its budget is spent."],
    )
    yield Section(
        "Search strategies on SmolLM2-135M",
        "The same five strategies on SmolLM2-135M, where hardly a skip pays. Figures are speedups on held-out prompts.",
        _race("race-smollm2-2-cores.json"),
        [
            "OMP_NUM_THREADS=1 searches.evaluate.race target.dtype=bfloat16 seconds=480 scan.prompts=4 "
            "scan.profile_repeats=2 scan.profile_error=1"
        ],
        [
            "Only ours and SWIFT protect the outer layers. Draft & Verify asks for a thousand iterations, far more than this"
            " budget allows.",
        ],
    )


def _race(name: str) -> list[str]:
    record = Record(name)
    seeds = sorted({search["seed"] for search in record["searches"]})
    rows, missed = [], []
    for key, label in STRATEGIES.items():
        searches = {search["seed"]: search for search in record["searches"] if search["strategy"] == key}
        finals = [f"{searches[seed]['curve'][-1]['held_out_speedup']:.2f}" for seed in seeds]
        spent = [search["spent"] for search in searches.values()]
        shares = [found["share_of_its_seconds"] for found in record["verdict"] if found["strategy"] == key]
        share = f"{percent(min(shares), 1)} to {percent(max(shares), 1)}" if shares else ""
        rows.append([label, *finals, f"{min(spent):.0f} to {max(spent):.0f}", share])
        missed += [f"against {label}"] if shares and max(shares) > MOST_SHARE else []
    head = ["strategy", *(f"seed {seed}" for seed in seeds), "seconds of search", "share that ours needs to be as good"]
    prompts = record["prompts"]
    what = f"{prompts['tune']} prompts for the others, {prompts['scanned']} scanned by ours"
    if "versions" in record["environment"]:
        work = f"{prompts['held_out']} held-out prompts, {record['max_new_tokens']} new tokens"
        where = conditions(f"{what}, {work}", record)
    else:
        simulated = f"simulated decoders of {record['target']['layers']} layers, simulated seconds, no device and no model"
        where = stated(simulated, what, "versions not recorded", record.measured_at(), link(name))
    ends = [search["curve"][-1]["config"]["mask"] for search in record["searches"] if search["strategy"] == "ours"]
    empty = "Ours ends with a mask that skips nothing."
    finds = "This race shows which searches avoid masks that lose, not which find masks that win."
    return [
        *table(head, rows),
        *where,
        f"- The aim is at most {percent(MOST_SHARE)} of another strategy's seconds. {aims(missed)}",
        *([] if any(ends) else [f"- {empty} {finds}"]),
    ]
