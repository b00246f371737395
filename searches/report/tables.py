"""The tables of a study's report, which Markdown and HTML share: each row holds a text by the name of its column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from layerskip.measure.measurement import MIN_RESAMPLED
from layerskip.models.target import described_precision
from searches.engines.race import Race
from searches.study.finals import Finalist, Finals, measured_prompts
from searches.study.leaderboard import configuration, is_lossless
from searches.tracking.names import METRICS

Row = dict[str, str]
Tables = dict[str, list[Row]]  # by their titles

_MIN_OF_A_CATEGORY = 3  # prompts; the interval of two is unbounded
_REQUEST_COLUMNS = {
    "throughput": ("throughput", "{:.1f}", 1.0),
    "tpot_p50": ("ms/token p50", "{:.1f}", 1000.0),
    "tpot_p95": ("ms/token p95", "{:.1f}", 1000.0),
    "ttft_p50": ("ms to first p50", "{:.0f}", 1000.0),
    "ttft_p95": ("ms to first p95", "{:.0f}", 1000.0),
}
"""Title, format and factor of the metrics of an engine that the tables show; throughput is in tokens/s."""
_OUTPUTS = {
    "exact": "identical",
    "near_tie": "identical except where rounding decides a near-tie",
    "different": "CHANGED",
    "unchecked": "unchecked",
}


def output_state(measured: Mapping[str, Any]) -> str:
    return _OUTPUTS[measured["losslessness"]["verdict"]]


def with_interval(speedup: float, low: float, high: float) -> str:
    return f"{speedup:.2f} ({low:.2f} to {high:.2f})"


def speedup_cells(metrics: Mapping[str, Any], digits: int) -> Row:
    """Return the speedup and its interval; both are empty if no prompt has a speed."""
    if not measured_prompts(metrics):
        return {"speedup": "", "95 % interval": ""}
    value, low, high = (f"{metrics[name]:.{digits}f}" for name in ("speedup", "speedup_low", "speedup_high"))
    return {"speedup": value, "95 % interval": f"{low} to {high}"}


def category_speedup(metrics: Mapping[str, Any], category: str) -> str:
    """Return the speedup of a category, with its interval if it has enough prompts for one."""
    speedup = metrics["speedup_by_category"][category]
    if metrics["prompts_by_category"][category] < _MIN_OF_A_CATEGORY:
        return f"{speedup:.2f}"
    return with_interval(speedup, *metrics["interval_by_category"][category])


def empty_note(metrics: Mapping[str, Any]) -> list[str]:
    """Return the lines that count the prompts without a speed; none if all have one."""
    if not metrics.get("empty_prompts"):
        return []
    counts = f"{metrics['empty_prompts']} of {metrics['prompts']}"
    return ["", f"The outputs of {counts} prompts end with their first token. Speedups leave them out."]


def conditions(record: Mapping[str, Any]) -> str:
    """Return the target, machine, prompts and versions of a record, and its date."""
    target, where, prompts = record["target"], record["environment"], record["prompts"]
    engines = "".join(f"{engine} {version}, " for engine, version in record.get("engines", {}).items())
    reads = record.get("read_gigabytes_per_second")
    named = [where["device_name"], where.get("instruction_set"), f"{where['threads']} threads"]
    named += [None if reads is None else f"reads {reads:.0f} GB/s"]
    return (
        f"{target['name']} in {described_precision(target)} on {where['device']} ({', '.join(filter(None, named))}), "
        f"{prompts['count']} prompts ({prompts['name']}) x {record['repeats']}, {record['max_new_tokens']} new tokens, "
        f"torch {where['versions']['torch']}, transformers {where['versions']['transformers']}, {engines}{record['date']}."
    )


def finals_tables(finals: Finals) -> Tables:
    """Return plain decoding and the finalists on held-out prompts, and an engine's metrics of them."""
    rows = [("no drafting", "wins" if finals.winner.config.method == "none" else "reference", finals.baseline, 1.0)]
    rows += [(f.config.label(), _outcome(finals, f), f.held_out, f.search_speedup) for f in finals.finalists]
    shown = [
        {"configuration": label, "verdict": outcome}
        | speedup_cells(metrics, 3)
        | {"in the search": f"{search_speedup:.3f}"}
        | _rates(metrics)
        | {"output": output_state(metrics)}
        for label, outcome, metrics, search_speedup in rows
    ]
    tables = {"Finalists (held-out prompts)": shown}
    loads = [metrics.get(METRICS, {}) for *_, metrics, _ in rows]
    return tables | _load_table([{"configuration": row[0]} for row in rows], loads, "held-out prompts")


def race_rows(race: Race) -> list[Row]:
    """Return engines and our decoder, fastest first, with speedups over the fastest plain decoding and over their own."""
    return [
        {
            "engine": f"{row.name} {row.version}".rstrip(),
            "tokens/s": f"{row.measured['tokens_per_second']:.1f}",
            **speedup_cells(row.measured, 2),
            "over its own plain": "" if row.own_speedup is None else with_interval(*row.own_speedup),
            "outputs as its own plain": "{} of {}".format(*row.same_outputs),
            "as layerskip, plain": "{same} of {compared}; {near_ties} near-ties, {changed} changed".format(**row.reference),
            "precision": ", ".join(sorted({value for name, value in row.precision.items() if name != "build"})),
            "measured": f"on {row.measured['prompts']} prompts" + (f": {row.ended}" if row.ended else ""),
        }
        for row in race.rows
    ]


def engine_trial_rows(race: Race) -> list[Row]:
    return [{"trial": trial.name, "speedup over our plain decoding": f"{trial.speedup:.2f}"} for trial in race.trials]


def _outcome(finals: Finals, finalist: Finalist) -> str:
    if finalist is finals.winner:
        return "wins"
    if not finalist.keeps_output:
        return "cannot win: output changed"
    if not finalist.stayed:
        return "dropped: slower than the leader"
    if measured_prompts(finalist.held_out) < MIN_RESAMPLED:
        return "too few prompts"
    if not finalist.eligible:
        return "not shown to be faster"
    return "as fast as the winner, less simple" if finalist.ties else "faster than plain decoding"


def may_lead(trial: FrozenTrial) -> bool:
    """Return True if a trial was measured to the end and kept the output."""
    measurement = trial.user_attrs.get("measurement")
    return measurement is not None and is_lossless(measurement) and trial.state == TrialState.COMPLETE


def best_trials(trials: Iterable[FrozenTrial], maximum: int = 10) -> list[FrozenTrial]:
    return sorted(filter(may_lead, trials), key=lambda t: -(t.value or 0.0))[:maximum]


def trial_tables(trials: Sequence[FrozenTrial]) -> Tables:
    """Return the fastest trials on tune prompts, and an engine's Pareto front of throughput and latency."""
    best = [_named(t) | {"speedup": f"{t.value:.3f}"} | _rates(t.user_attrs["measurement"]) for t in best_trials(trials)]
    kept = {trial.number: trial for trial in trials if may_lead(trial)}
    loads = {number: trial.user_attrs.get(METRICS, {}) for number, trial in kept.items()}
    front = pareto_front({number: (load.get("throughput"), load.get("tpot_p50")) for number, load in loads.items()})
    rates = _load_table([_named(kept[n]) for n in front], [loads[n] for n in front], "Pareto front")
    return {"Best trials (tune prompts)": best} | rates


def _named(trial: FrozenTrial) -> Row:
    return {"configuration": configuration(trial).label(), "trial": str(trial.number)}


def _rates(metrics: Mapping[str, Any]) -> Row:
    return {
        "tokens/s": f"{metrics['tokens_per_second']:.1f}",
        "acceptance": f"{metrics['acceptance_rate']:.2f}",
        "tokens/round": f"{metrics['mean_acceptance_length']:.2f}",
    }


def _load_table(names: Sequence[Row], loads: Sequence[Mapping[str, float]], of: str) -> Tables:
    """Return the table of an engine's metrics; a metric that no row has is no column. No engine reports any: no table."""
    shown = {name: each for name, each in _REQUEST_COLUMNS.items() if any(name in load for load in loads)}
    columns = shown.items()
    rows = [
        row | {title: form.format(factor * load[name]) if name in load else "" for name, (title, form, factor) in columns}
        for row, load in zip(names, loads, strict=True)
    ]
    return {f"Throughput and latency ({of})": rows} if shown else {}


def pareto_front(points: Mapping[int, tuple[float | None, float | None]]) -> list[int]:
    """Return the names of points that no other exceeds: more is better first, less second; by falling first one."""
    known = {name: (-more, less) for name, (more, less) in points.items() if more is not None and less is not None}
    front: list[int] = []
    for name in sorted(known, key=lambda name: known[name]):
        if not front or known[name][1] < known[front[-1]][1] or known[name] == known[front[-1]]:
            front.append(name)
    return front


def as_markdown(rows: Sequence[Row]) -> list[str]:
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (rows[0], *(row.values() for row in rows)))
    return [head, f"|{'---|' * len(rows[0])}", *lines]
