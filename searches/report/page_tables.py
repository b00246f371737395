"""The tables of ``report.html``, and how to use the winner of a study."""

from __future__ import annotations

import html
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna

from layerskip.measure.measurement import LEAST_RESAMPLED
from searches.report.load_report import levels
from searches.report.study_report import best_trials, finals_rows
from searches.study.empty_outputs import measured_prompts
from searches.study.finals import Finalist, Finals
from searches.study.leaderboard import configuration
from searches.study.study import SETTINGS, finished
from searches.tracking.names import FIGURES

_LOAD = {
    "throughput": ("throughput", "{:.1f}", 1.0),
    "tpot_p50": ("ms/token p50", "{:.1f}", 1000.0),
    "tpot_p95": ("ms/token p95", "{:.1f}", 1000.0),
    "ttft_p50": ("ms to first p50", "{:.0f}", 1000.0),
    "ttft_p95": ("ms to first p95", "{:.0f}", 1000.0),
}
"""Title, format and factor of the figures of an engine that the tables show, where there are any."""
_LONG = ("95 % interval", "output", "verdict")  # values that a narrow screen shows in lines of their own
_CODE = """import layerskip

target = layerskip.load_target({target!r})
export = layerskip.Export.load({export!r}, target)
drafter = layerskip.build_drafter(export.config, target)  # keep one drafter for all requests
result = layerskip.generate(target, "Why is the sky blue?", export.config, drafter=drafter, max_new_tokens=64)
print(result.text)

# The same inside transformers' generate:
method = export.custom_generate(target.tokenizer)
messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
inputs = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = target.model.generate(**inputs.to(target.device), custom_generate=method, max_new_tokens=64)
"""


def finals_table(finals: Finals) -> str:
    """Return the table of plain decoding and the finalists."""
    outcomes = ["wins" if finals.winner.config.kind == "none" else "reference"]
    outcomes += [_outcome(finals, finalist) for finalist in finals.finalists]
    rows, found = [], finals_rows(finals)
    for (label, search_speedup, figures, output), outcome in zip(found, outcomes, strict=True):
        row = {"configuration": label, "verdict": outcome, "speedup": f"{figures['speedup']:.3f}"}
        row |= {"in the search": f"{search_speedup:.3f}"}
        row |= {"95 % interval": f"{figures['speedup_low']:.3f} to {figures['speedup_high']:.3f}"}
        rows.append(row | _rates(figures) | {"output": output})
    named = [{name: row[name] for name in ("configuration", "verdict")} for row in rows]
    return _with_loads(rows, named, [figures.get(FIGURES, {}) for _, _, figures, _ in found])


def _outcome(finals: Finals, finalist: Finalist) -> str:
    """Return why a finalist wins or does not."""
    if finalist is finals.winner:
        return "wins"
    if not finalist.keeps_output:
        return "cannot win: output changed"
    if not finalist.stayed:
        return "dropped: slower than the leader"
    if measured_prompts(finalist.held_out) < LEAST_RESAMPLED:
        return "too few prompts"
    if not finalist.eligible:
        return "not shown to be faster"
    return "as fast as the winner, less simple" if finalist.ties else "faster than plain decoding"


def best_table(study: optuna.Study) -> str:
    """Return the table of the best trials, and one for each of several numbers of requests; empty if none was measured."""
    trials = best_trials(finished(study))
    if not trials:
        return ""
    named = [{"configuration": configuration(trial).label(), "trial": str(trial.number)} for trial in trials]
    rows = [
        name | {"speedup": f"{trial.value:.3f}"} | _rates(trial.user_attrs["measurement"])
        for trial, name in zip(trials, named, strict=True)
    ]
    return _with_loads(rows, named, [trial.user_attrs.get(FIGURES, {}) for trial in trials])


def _with_loads(
    rows: Sequence[Mapping[str, str]], named: Sequence[Mapping[str, str]], figures: Sequence[Mapping[str, float]]
) -> str:
    """Return a table with an engine's figures as further columns; those of several numbers of requests in further tables.

    Args:
        rows: of the table.
        named: the cells that name each row.
        figures: of each row; empty if there are none.
    """
    tables = [_table([{**row, **load} for row, load in zip(rows, _loads(figures, ""), strict=True)])]
    for level in filter(None, levels(figures)):
        loads = [{**name, **load} for name, load in zip(named, _loads(figures, level), strict=True)]
        tables.append(f"<p>Requests in flight: {level.removeprefix('_at_')}.</p>{_table(loads)}")
    return "".join(tables)


def _loads(figures: Sequence[Mapping[str, float]], level: str) -> list[dict[str, str]]:
    """Return the cells of an engine's figures, under one of :func:`~searches.report.load_report.levels`."""
    shown = {name: each for name, each in _LOAD.items() if any(name + level in found for found in figures)}
    return [
        {
            title: form.format(factor * found[name + level]) if name + level in found else ""
            for name, (title, form, factor) in shown.items()
        }
        for found in figures
    ]


def _rates(figures: Mapping[str, Any]) -> dict[str, str]:
    formats = {"tokens_per_second": ("tokens/s", ".1f"), "acceptance_rate": ("acceptance", ".2f")}
    formats["tokens_per_round"] = "tokens/round", ".2f"
    return {title: format(figures[name], spec) for name, (title, spec) in formats.items()}


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table; on a narrow screen each row becomes a list of named values."""
    kinds = {name: ' class="text"' if name in _LONG else "" for name in rows[0]}
    head = "".join(f"<th{kind}>{html.escape(name)}</th>" for name, kind in kinds.items())
    body = []
    for row in rows:
        cells = (f'<td{kinds[name]} data-name="{html.escape(name)}">{html.escape(cell)}</td>' for name, cell in row.items())
        start = '<tr class="best">' if row.get("verdict") == "wins" else "<tr>"
        body.append(f"{start}{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def usage(study: optuna.Study, finals: Finals, path: Path) -> str:
    """Return how the winner is used; ``path`` is that of the page."""
    if finals.winner.config.kind == "none":
        return "<p>Plain decoding wins: use the model as it is. best.json holds the evidence.</p>"
    settings, export = study.user_attrs.get(SETTINGS, {}), str(path.with_name("best.json"))
    parts = [f"<p>best.json holds {html.escape(finals.winner.config.label())}.</p>"]
    if (engine := settings.get("backend.name")) is None:
        target = str(settings.get("target.path") or settings.get("target.name") or "the searched model")
        parts += [_block(_CODE.format(target=target, export=export)), "<p>Commands of other engines:</p>"]
    else:
        parts.append(f"<p>It was measured with {html.escape(str(engine))}. Commands of engines:</p>")
    parts.append(_block(f"python -m searches.export {shlex.quote(export)}"))
    parts.append("<p>Check it on another day, with the overrides of the search for target and prompts:</p>")
    return "".join([*parts, _block(f"python -m searches.verify {shlex.quote(export)}")])


def _block(code: str) -> str:
    return f"<pre><code>{html.escape(code)}</code></pre>"
