"""``report.md``: the results of a finished or a running study in sentences and tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState

from layerskip.measure.measurement import MIN_RESAMPLED
from searches.engines.race import Race
from searches.report.tables import (
    Tables,
    as_markdown,
    category_speedup,
    empty_note,
    engine_trial_rows,
    finals_tables,
    output_state,
    race_rows,
    trial_tables,
)
from searches.study.budget import left_out, preparation_seconds, recorded_seconds
from searches.study.finals import Finalist, Finals, measured_prompts
from searches.study.objective import OUT_OF_MEMORY, OVERHEAD_SECONDS
from searches.study.pruning import CANNOT_WIN
from searches.study.study import finished
from searches.tracking.names import DRIFTED, ENGINE_FAILED, METRICS, STARTUP_SECONDS, WORKER


def summary(study: optuna.Study, finals: Finals | None, race: Race | None = None) -> str:
    """Return the report; ``finals`` is None while the study runs."""
    trials = finished(study)
    shown = [] if race is None else [race_verdict(race)]
    shown += [*study_notes(study, finals), *([verdict(finals)] if finals is not None else [])]
    lines = [f"# Study {study.study_name}", "", *(line for note in shown for line in (note, ""))]
    if finals is not None:
        lines += [*_tables(finals_tables(finals)), *empty_note(finals.baseline), "", *winner_notes(study, finals), ""]
    if race is not None:
        lines += [*_tables({"Engines (held-out prompts)": race_rows(race)}), ""]
        lines += [f"Left out: {reason}.\n" for reason in race.left_out] + [f"{note}.\n" for note in race.notes]
        lines.append("`python -m searches.verify` with `engines.json` measures the fastest again.\n")
        lines += [*_tables({"Trials of engines (tune prompts)": engine_trial_rows(race)}), ""] if race.trials else []
    lines += _tables(trial_tables(trials))
    if changed := [t.number for t in trials if t.constraints.get("output_changed", 0) > 0]:
        lines += ["", f"Trials {changed} changed an output beyond a near-tie; they cannot win."]
    reasons = {t.number: str(t.user_attrs.get("reason")) for t in trials}
    if failed := [f"- {number}: {reason}" for number, reason in reasons.items() if reason.startswith(ENGINE_FAILED)]:
        lines += ["", "## Failed trials", "", *failed]
    return "\n".join(lines) + "\n"


def _tables(tables: Tables) -> list[str]:
    none = ["None was measured to the end."]
    parts = [[f"## {title}", "", *(as_markdown(rows) if rows else none)] for title, rows in tables.items()]
    return [line for part in parts for line in ("", *part)][1:]


def race_verdict(race: Race) -> str:
    """Return the fastest engine and method in a sentence, with what decodes so."""
    first, metrics, over = race.fastest, race.fastest.measured, ""
    if first.name != race.fastest_plain:
        interval = f"{metrics['speedup']:.2f} x ({metrics['speedup_low']:.2f} to {metrics['speedup_high']:.2f})"
        over = f", {interval} the fastest plain decoding, which is {race.fastest_plain}"
    speed = f"{metrics['tokens_per_second']:.1f} tokens/s"
    level = f" Not distinguishable from it: {'; '.join(race.level)}." if race.level else ""
    start = f"`{first.command}`" if first.command else "best.json holds it, and python -m searches.export prints commands."
    return f"Fastest of all engines: {first.name}, {speed}{over}.{level} {start}"


def study_notes(study: optuna.Study, finals: Finals | None) -> list[str]:
    """Return sentences on the trials, costs and drift of a study; ``finals`` is None while it runs."""
    trials = finished(study)
    notes = [_trial_counts(trials), *left_out(study)]
    metrics = [trial.user_attrs.get(METRICS, {}) for trial in trials]
    if started := [found[STARTUP_SECONDS] for found in metrics if STARTUP_SECONDS in found]:
        notes.append(
            f"{len(started)} trials began with {statistics.fmean(started):.1f} seconds of compiling and capturing passes, "
            "or of starting an engine, on average. No speedup includes them."
        )
    if drifted := sum(trial.user_attrs.get(DRIFTED, 0) for trial in trials):
        notes.append(f"The machine's speed changed on {drifted} prompts, which were measured again.")
    if finals is not None and finals.stalled:
        notes.append(f"Held-out prompts that speeds leave out, because one decoding stalled: {finals.stalled}.")
    if finals is not None and finals.left_out:
        notes.append(finals.left_out)
    return notes


def search_seconds(study: optuna.Study, finals: Finals) -> float:
    """Return the seconds of the whole search: of shared artifacts, trials, what was between them, and finals."""
    attributes = [trial.user_attrs for trial in study.get_trials(deepcopy=False)]
    trials = sum(each.get("seconds", 0.0) + each.get(OVERHEAD_SECONDS, 0.0) for each in attributes)
    return float(preparation_seconds(study) + sum(recorded_seconds(study).values()) + trials + finals.seconds)


def _trial_counts(trials: Sequence[FrozenTrial]) -> str:
    reasons = [str(trial.user_attrs.get("reason", "")) for trial in trials if "measurement" not in trial.user_attrs]
    stopped = sum("measurement" in trial.user_attrs and trial.state != TrialState.COMPLETE for trial in trials)
    begins = {"cannot win": CANNOT_WIN, OUT_OF_MEMORY: OUT_OF_MEMORY, ENGINE_FAILED: ENGINE_FAILED}
    counts = {name: sum(reason.startswith(begin) for reason in reasons) for name, begin in begins.items()}
    counts["measured before"] = len(reasons) - sum(counts.values())
    why = f" ({', '.join(f'{count} {name}' for name, count in counts.items() if count)})" if reasons else ""
    return f"{len(trials)} trials: {stopped} stopped early, {len(reasons)} not run{why}."


def winner_notes(study: optuna.Study, finals: Finals) -> list[str]:
    """Return the speedup by category of the winner, or of the fastest finalist if none wins, and the cost of the search."""
    seconds = search_seconds(study, finals)
    together = " of all workers together" if any(WORKER in trial.user_attrs for trial in finished(study)) else ""
    cost = f"The search took {seconds:.0f} seconds{together}"
    if finals.winner.config.method == "none":
        kept = [finalist for finalist in finals.finalists if finalist.keeps_output]
        if not kept:
            return [f"{cost}."]
        return [f"The fastest finalist, {kept[0].config.label()}:", _details(kept[0]), f"{cost}."]
    held_out = finals.winner.held_out
    saved = 1 / held_out["baseline_tokens_per_second"] - 1 / held_out["tokens_per_second"]
    return [_details(finals.winner), f"{cost}. {seconds / saved:,.0f} generated tokens pay it back."]


def _details(finalist: Finalist) -> str:
    held_out = finalist.held_out
    shown = ", ".join(f"{name} {category_speedup(held_out, name)}" for name in held_out["speedup_by_category"])
    copies = held_out["copies_bytes"]
    return (
        f"By category: {shown}.\n"
        + (f"Its draft reads copies of weights of {copies / 1e6:.0f} MB.\n" if copies else "")
        + f"Its speedup was {finalist.search_speedup:.2f} in the search and {held_out['speedup']:.2f} on held-out prompts."
    )


def verdict(finals: Finals) -> str:
    """Return one sentence: the winner, its speedup and the interval, or the reason why plain decoding wins."""
    winner, count = finals.winner, len(finals.finalists)
    if winner.config.method == "none":
        prompts = measured_prompts(finals.baseline)
        if prompts < MIN_RESAMPLED:
            why = ", as the outputs of the others end with their first token" if finals.baseline.get("empty_prompts") else ""
            shown = f"{prompts} held-out prompts cannot show that anything is faster{why}"
            return f"No drafting wins: {shown}; {MIN_RESAMPLED} are the least."
        faster = [finalist for finalist in finals.finalists if finalist.low > 1.0]
        if faster:
            why = "its output differs from plain decoding" if faster[0].stayed else "it was dropped before the end"
            return f"No drafting wins: {faster[0].config.label()} is faster, but {why}."
        together = f"for all {count} finalists together, " if count > 1 else ""
        return f"No drafting wins: {together}no held-out interval lies wholly above the speed of plain decoding."
    held_out = winner.held_out
    together = f", lower end {winner.low:.2f} for all {count} finalists together" if count > 1 else ""
    return (
        f"{winner.config.label()} wins: {held_out['speedup']:.2f} x plain decoding on held-out prompts "
        f"(95 % interval {held_out['speedup_low']:.2f} to {held_out['speedup_high']:.2f}{together}), "
        f"output {output_state(held_out)}."
    )
