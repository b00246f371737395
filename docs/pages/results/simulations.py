"""Studies on simulated decoders, whose events are counted: calibration, and several workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pages.markdown import folded, table
from pages.results.figures import aims, percent
from pages.results.records import RECORDS, Record, conditions, link, stated
from pages.results.section import Section

FAULTS = {
    "kills": "workers killed",
    "restarts": "restarts of the database",
    "database_gone": "outage of the database",
    "tracking_gone": "outage of the MLflow server",
    "full_disks": "full disk",
}

Scenario = Mapping[str, Any]

KINDS = ("decoding", "sampling", "waiting", "coordination", "storage", "tracking", "page", "rest")
LABELS = {"waiting": "waiting for others", "storage": "storage of results", "tracking": "MLflow", "rest": "the rest"}


def sections() -> Iterator[Section]:
    yield Section(
        "Calibration",
        "How often chance names a winner, how often intervals hold the truth, and how often a search finds a planted best"
        " configuration.",
        _calibration("calibration.json"),
        ["searches.evaluate.calibration planted.seeds=100 planted.hopeless=20 planted.close=20"],
    )
    for path in sorted(RECORDS.glob("scale-*.json")):
        yield Section(
            "Workers on one study",
            "Several processes search one simulated decoder through PostgreSQL, each with the real program; decoding sleeps."
            " Workers are killed, servers are stopped, a disk fills up, a clock is wrong.",
            _workers(path.name),
            ["OMP_NUM_THREADS=1 searches.evaluate.scale"],
            [
                "A killed worker is replaced at once. Each study has one more run, its own.",
                "Several workers do not divide all seconds: one of them measures the finals alone, and they choose other"
                " configurations, whose trials may be longer.",
                "A trial here is a call of the objective. Of several workers some calls end at once, because another worker"
                " measures the same configuration.",
            ],
        )


def _counts(record: Record) -> list[str]:
    """The counted events of a record, each with its criterion."""
    rows = []
    for count in record["counts"]:
        limits = {"at least": count["least"], "at most": count["most"]}
        asked = ", ".join(f"{limit} {percent(share)}" for limit, share in limits.items() if share is not None)
        times, share = f"{count['times']} of {count['of']}", percent(count["share"], 1)
        rows.append([count["name"], times, share, asked, "yes" if count["passed"] else "**no**"])
    return table(["count", "times", "share", "aim", "met"], rows)


def _calibration(name: str) -> list[str]:
    record = Record(name)
    search = record["config"]["planted"]["search"]
    packages = ", ".join(f"{package} {record['versions'][package]}" for package in ("numpy", "optuna", "scipy"))
    return [
        *_counts(record),
        *stated("simulated decoders, no device and no model", packages, record.measured_at(), link(name)),
        "- A planted configuration counts as found where the exported one is within 1 % of its speed.",
        f"- Planted searches run {search['study']['n_trials']} trials over {search['measure']['prompts']} to "
        f"{search['measure']['survivor_prompts']} prompts.",
    ]


def _workers(name: str) -> list[str]:
    record = Record(name)
    rows, spent = [], []
    for scenario, found in record["scenarios"].items():
        settings, exported = found["settings"], found["winner"]
        faults = [f"{count} {FAULTS[kind]}" for kind, count in found["faults"].items()]
        faults += ["a clock an hour ahead"] if settings["hours_ahead"] else []
        trials = sum(found["trials"].get(state, 0) for state in ("COMPLETE", "PRUNED"))
        row = [scenario, str(settings["workers"]), str(trials), ", ".join(faults), f"{found['seconds']:.0f}"]
        rows.append([*row, f"{exported['label']}: {exported['true_speedup']:.3f}"])
        clock, processor = (found["per_trial"][name] for name in ("seconds", "processor"))
        spent.append([scenario, *(f"{clock.get(kind, 0.0):.3f} ({processor.get(kind, 0.0):.3f})" for kind in KINDS)])
    missed = [count["name"] for count in record["counts"] if not count["passed"]]
    return [
        *table(["study", "workers", "trials", "faults", "seconds", "winner: its true speedup"], rows),
        "",
        "Seconds of a trial, and those of the processor in parentheses; means over the workers that were not killed:",
        "",
        *table(["study", *(LABELS.get(kind, kind) for kind in KINDS)], spent),
        *folded("All counts", _counts(record)),
        *conditions("simulated decoders that sleep", record),
        f"- {len(record['counts'])} criteria. {aims(missed)}",
        *(f"- {_equally(record['scenarios'], name)}" for name, each in record["scenarios"].items() if _is_share(each)),
    ]


def _is_share(scenario: Scenario) -> bool:
    return scenario["settings"]["most_share"] is not None


def _equally(scenarios: Mapping[str, Scenario], name: str) -> str:
    """The share of the seconds that several workers would take if their trials decoded as long as those of one."""
    several, one = scenarios[name], scenarios[scenarios[name]["settings"]["like"]]
    decoded, alone = _decoded_seconds(several), _decoded_seconds(one)
    share = (several["seconds"] + (alone - decoded) / several["settings"]["workers"]) / one["seconds"]
    return (
        f"All trials of `{name}` decoded for {decoded:.0f} s, those of `{several['settings']['like']}` for {alone:.0f} s. If"
        f" they had decoded as long, the share of the seconds would be {share:.2f}."
    )


def _decoded_seconds(scenario: Scenario) -> float:
    """The simulated seconds of decoding of all calls of the objective, without the finals."""
    return float(sum(scenario["trials"].values()) * scenario["per_trial"]["seconds"]["decoding"])
