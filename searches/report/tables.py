"""The tables of a study's report, which Markdown and HTML share: each row holds a text by the name of its column."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from layerskip import SpeculativeConfig
from layerskip.measure.measurement import MIN_RESAMPLED
from layerskip.models.target import described_precision
from searches.engines.race import Race
from searches.study.finals import Finalist, Finals, measured_prompts
from searches.study.leaderboard import configuration, is_lossless
from searches.tracking.names import METRICS

Row = dict[str, str]

_REQUEST_COLUMNS = {
    "throughput": ("throughput", "{:.1f}", 1.0),
    "tpot_p50": ("ms/token p50", "{:.1f}", 1000.0),
    "tpot_p95": ("ms/token p95", "{:.1f}", 1000.0),
    "ttft_p50": ("ms to first p50", "{:.0f}", 1000.0),
    "ttft_p95": ("ms to first p95", "{:.0f}", 1000.0),
}
"""Title, format and factor of the metrics of an engine that the tables show; throughput is in tokens/s."""
_LONG = ("95 % interval", "output", "verdict")  # values that a narrow screen shows in lines of their own
_OUTPUTS = {
    "exact": "identical",
    "near_tie": "identical except where rounding decides a near-tie",
    "different": "CHANGED",
    "unchecked": "unchecked",
}


def output_state(config: SpeculativeConfig, measured: Mapping[str, Any]) -> str:
    """Return the comparison of the output with that of plain decoding."""
    return _OUTPUTS[measured["losslessness"]["verdict"]] if config.lossless else "LOSSY"


def speedup_cells(metrics: Mapping[str, Any], digits: int) -> Row:
    """Return the speedup and its interval; both are empty if no prompt has a speed."""
    if not measured_prompts(metrics):
        return {"speedup": "", "95 % interval": ""}
    value, low, high = (f"{metrics[name]:.{digits}f}" for name in ("speedup", "speedup_low", "speedup_high"))
    return {"speedup": value, "95 % interval": f"{low} to {high}"}


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


def finals_rows(finals: Finals) -> list[Row]:
    """Return plain decoding and the finalists on held-out prompts."""
    plain = "wins" if finals.winner.config.method == "none" else "reference"
    rows = [("no drafting", plain, SpeculativeConfig(), finals.baseline, 1.0)]
    rows += [(f.config.label(), _outcome(finals, f), f.config, f.held_out, f.search_speedup) for f in finals.finalists]
    return [
        {"configuration": label, "verdict": outcome}
        | speedup_cells(metrics, 3)
        | {"in the search": f"{search_speedup:.3f}"}
        | _rates(metrics)
        | {"output": output_state(config, metrics)}
        for label, outcome, config, metrics, search_speedup in rows
    ]


def race_rows(race: Race) -> list[Row]:
    """Return engines and our decoder, fastest first, with speedups over the fastest plain decoding and over their own."""
    return [
        {
            "engine": f"{row.name} {row.version}".rstrip(),
            "tokens/s": f"{row.measured['tokens_per_second']:.1f}",
            **speedup_cells(row.measured, 2),
            "over its own plain": "" if row.own_speedup is None else "{:.2f} ({:.2f} to {:.2f})".format(*row.own_speedup),
            "outputs as its own plain": "{} of {}".format(*row.same_outputs),
            "precision": ", ".join(sorted({value for name, value in row.precision.items() if name != "build"})),
            "measured": f"on {row.measured['prompts']} prompts" + (f": {row.ended}" if row.ended else ""),
        }
        for row in race.rows
    ]


def finals_requests(finals: Finals) -> list[Mapping[str, float]]:
    """Return an engine's metrics of each row of :func:`finals_rows`; empty ones if it reports none."""
    return [held_out.get(METRICS, {}) for held_out in (finals.baseline, *(each.held_out for each in finals.finalists))]


def _outcome(finals: Finals, finalist: Finalist) -> str:
    """Return why a finalist wins or does not."""
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


def measured(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials that were measured to the end."""
    return [trial for trial in trials if trial.state == TrialState.COMPLETE and "measurement" in trial.user_attrs]


def best_trials(trials: Iterable[FrozenTrial], maximum: int = 10) -> list[FrozenTrial]:
    """Return the fastest trials that were measured to the end and kept the output."""
    kept = [t for t in measured(trials) if is_lossless(t.user_attrs["measurement"]) or not configuration(t).lossless]
    return sorted(kept, key=lambda t: -(t.value or 0.0))[:maximum]


def trial_rows(trials: Iterable[FrozenTrial]) -> list[Row]:
    """Return measured trials with their speedups on the tune prompts that every trial decodes."""
    return [
        named_row(trial) | {"speedup": f"{trial.value:.3f}"} | _rates(trial.user_attrs["measurement"]) for trial in trials
    ]


def named_row(trial: FrozenTrial) -> Row:
    """Return the number and the configuration of a trial."""
    return {"trial": str(trial.number), "configuration": configuration(trial).label()}


def trial_requests(trial: FrozenTrial) -> Mapping[str, float]:
    """Return an engine's metrics of a trial; empty if it reports none."""
    found: Mapping[str, float] = trial.user_attrs.get(METRICS, {})
    return found


def _rates(metrics: Mapping[str, Any]) -> Row:
    return {
        "tokens/s": f"{metrics['tokens_per_second']:.1f}",
        "acceptance": f"{metrics['acceptance_rate']:.2f}",
        "tokens/round": f"{metrics['mean_acceptance_length']:.2f}",
    }


def levels(loads: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the ends of the names of metrics: one for each number of requests in flight, empty for a single one."""
    ends = {name.removeprefix("throughput") for workload in loads for name in workload if name.startswith("throughput")}
    return sorted(ends, key=lambda end: (len(end), end))


def with_requests(rows: Sequence[Row], loads: Sequence[Mapping[str, float]], level: str) -> list[Row]:
    """Return rows with an engine's metrics under one of :func:`levels`; a metric that no row has is no column."""
    shown = {name: each for name, each in _REQUEST_COLUMNS.items() if any(name + level in load for load in loads)}
    return [
        row
        | {
            title: form.format(factor * load[name + level]) if name + level in load else ""
            for name, (title, form, factor) in shown.items()
        }
        for row, load in zip(rows, loads, strict=True)
    ]


def pareto_front(points: Mapping[int, tuple[float | None, float | None]]) -> list[int]:
    """Return the points that no other one exceeds in both coordinates, by falling first one.

    Args:
        points: by name, a number of which more is better and one of which less is better. Those that lack one are left out.
    """
    known = {name: (-more, less) for name, (more, less) in points.items() if more is not None and less is not None}
    front: list[int] = []
    for name in sorted(known, key=lambda name: known[name]):
        if not front or known[name][1] < known[front[-1]][1] or known[name] == known[front[-1]]:
            front.append(name)
    return front


def as_markdown(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table."""
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (rows[0], *(row.values() for row in rows)))
    return [head, f"|{'---|' * len(rows[0])}", *lines]


def as_html(rows: Sequence[Row]) -> str:
    """Return a table, the row of the winner marked; on a narrow screen each row becomes a list of named values."""
    kinds = {name: ' class="text"' if name in _LONG else "" for name in rows[0]}
    head = "".join(f"<th{kind}>{html.escape(name)}</th>" for name, kind in kinds.items())
    body = []
    for row in rows:
        cells = (f'<td{kinds[name]} data-name="{html.escape(name)}">{html.escape(cell)}</td>' for name, cell in row.items())
        start = '<tr class="best">' if row.get("verdict") == "wins" else "<tr>"
        body.append(f"{start}{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def as_html_with_requests(rows: Sequence[Row], names: Sequence[Row], loads: Sequence[Mapping[str, float]]) -> str:
    """Return a table with an engine's metrics as further columns; those of several numbers of requests in further tables.

    ``names`` are the cells that name each row there, ``loads`` the metrics of each row, which are empty if there are none.
    """
    tables = [as_html(with_requests(rows, loads, ""))]
    for level in filter(None, levels(loads)):
        further = as_html(with_requests(names, loads, level))
        tables.append(f"<p>Requests in flight: {level.removeprefix('_at_')}.</p>{further}")
    return "".join(tables)
