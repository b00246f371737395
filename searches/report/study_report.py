"""What did a study find? A table to read, of a finished or a running study; :mod:`searches.report.study_plots` draws it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import optuna
from optuna.trial import FrozenTrial, TrialState

from layerskip import SpeculativeConfig
from layerskip.measure.measurement import LEAST_RESAMPLED
from searches.app.time_ledger import FITS, KEPT_SECONDS, SHARED, seconds_of
from searches.predict.prediction_error import SCANNED
from searches.predict.stability import SeedStability, Stability
from searches.study.finals import Finalist, Finals
from searches.study.leaderboard import configuration, is_lossless
from searches.study.objective import MEASURING, OUT_OF_MEMORY
from searches.study.pruning import HOPELESS
from searches.study.study import BETWEEN, FORESIGHT_SECONDS, finished
from searches.tracking.names import DRIFTED

matplotlib.use("Agg")

_LEAST_OF_A_KIND = 3  # prompts; of two, an interval reaches from nothing to everything


def summary(
    study: optuna.Study,
    finals: Finals | None,
    stable: Stability | None = None,
    seeds: SeedStability | None = None,
    scan_seconds: float | None = None,
) -> str:
    """The report as Markdown: the verdict, the finalists on held-out prompts, and the best trials."""
    trials = finished(study)
    idle = [trial for trial in trials if "measurement" not in trial.user_attrs]
    stopped = len(trials) - len(idle) - len(_measured(trials))
    lines = [
        f"# Study {study.study_name}",
        "",
        f"{len(trials)} trials: {stopped} stopped early, {len(idle)} not run{_reasons(idle)}.",
        "",
    ]
    if stable is not None:
        lines += [
            f"Of the scanned masks, {stable.share:.0%} of resampled text sets choose the same; two choices share "
            f"{stable.overlap:.2f} of what they skip, where chance gives {stable.chance:.2f}.",
            "",
        ]
    whole = _measured(trials)
    took = [trial.user_attrs.get(MEASURING, trial.user_attrs["seconds"]) for trial in whole]
    if scan_seconds is not None and took:
        cost = SCANNED * scan_seconds / statistics.fmean(took)
        lines += [f"Scanning a mask took {scan_seconds:.1f} seconds: {SCANNED} cost as much as {cost:.1f} whole trials.", ""]
    if seeds is not None:
        lines += [
            f"The best masks of {seeds.seeds} seeds share {seeds.overlap:.2f} of what they skip, where chance gives "
            f"{seeds.chance:.2f}.",
            "",
        ]
    fits = seconds_of(study, FITS)
    if fits:
        lines += [f"Fitting what stands in for skips took {sum(fits.values()):.0f} seconds, {len(fits)} times.", ""]
    if len(trials) > 1:
        lines += [f"Optuna, MLflow and Hydra took {overhead_seconds(trials):.2f} seconds a trial.", ""]
    drifted = sum(trial.user_attrs.get(DRIFTED, 0) for trial in trials)
    if drifted:
        lines += [f"The machine's pace moved: {drifted} prompts were measured again.", ""]
    if finals is not None:
        if finals.drifted:
            still = f"; it still did on {finals.unsteady}" if finals.unsteady else ""
            lines += [
                f"The machine's pace moved on {finals.drifted} held-out prompts, which were measured again{still}.",
                "",
            ]
        lines += [verdict(finals), "", *_finals_table(finals), "", *_winner(finals, search_seconds(study, finals)), ""]
    lines += ["## Best trials (tune prompts)", "", *_trials_table(trials)]
    changed = [t.number for t in trials if t.constraints.get("output_changed", 0) > 0]
    if changed:
        lines += ["", f"Trials {changed} changed an output beyond a near-tie; they cannot win."]
    return "\n".join(lines) + "\n"


def _measured(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Whole trials; of a configuration that was known well enough, nothing was measured once more."""
    return [trial for trial in trials if trial.state == TrialState.COMPLETE and "measurement" in trial.user_attrs]


def search_seconds(study: optuna.Study, finals: Finals) -> float:
    """What the search took: foretelling before it, all that was fitted and written for it, here or before, its trials,
    interrupted ones included, what Optuna and MLflow took between them, and measuring its finalists."""
    spent = [trial.user_attrs for trial in study.get_trials(deepcopy=False)]
    trials = sum(each.get("seconds", 0.0) + each.get(BETWEEN, 0.0) - each.get(KEPT_SECONDS, 0.0) for each in spent)
    kept = sum(sum(seconds_of(study, kind).values()) for kind in (FITS, SHARED))
    return float(study.user_attrs.get(FORESIGHT_SECONDS, 0.0) + kept + trials + finals.seconds)


def overhead_seconds(trials: Sequence[FrozenTrial]) -> float:
    """Median time from one trial's start to the next one's that was not spent on foretelling or decoding."""
    ordered = sorted(trials, key=lambda trial: trial.number)
    starts = [(trial.datetime_start, trial.user_attrs.get("seconds", 0.0)) for trial in ordered]
    pairs = [(start, seconds, following) for (start, seconds), (following, _) in itertools.pairwise(starts)]
    gaps = [(after - before).total_seconds() - seconds for before, seconds, after in pairs if before and after]
    return max(0.0, statistics.median(gaps)) if gaps else 0.0


def _reasons(idle: Sequence[FrozenTrial]) -> str:
    """Why trials were not run, with how many each."""
    said = [str(trial.user_attrs.get("reason", "")) for trial in idle]
    hopeless, beyond = sum(reason.startswith(HOPELESS) for reason in said), said.count(OUT_OF_MEMORY)
    found = {"hopeless": hopeless, "out of memory": beyond, "known already": len(said) - hopeless - beyond}
    return f" ({', '.join(f'{count} {name}' for name, count in found.items() if count)})" if idle else ""


def _winner(finals: Finals, seconds: float) -> list[str]:
    """What the winner is worth by kind of work, against what the search thought of it and what the search cost; where plain
    decoding wins, what the fastest of the others is worth."""
    cost = f"The search took {seconds:.0f} seconds"
    if finals.winner.config.kind == "none":
        kept = [finalist for finalist in finals.finalists if finalist.keeps]
        if not kept:
            return [f"{cost}."]
        return [f"The fastest finalist, {kept[0].config.label()}:", _worth(kept[0]), f"{cost}."]
    found = finals.winner.held_out
    saved = 1 / found["baseline_tokens_per_second"] - 1 / found["tokens_per_second"]
    return [_worth(finals.winner), f"{cost}, which {seconds / saved:,.0f} generated tokens pay back."]


def _worth(finalist: Finalist) -> str:
    """A finalist by kind of work, and against what the search thought of it."""
    found = finalist.held_out
    kinds = ", ".join(f"{name} {value:.2f}{_range(found, name)}" for name, value in found["speedup_by_category"].items())
    before, now = finalist.search_speedup, found["speedup"]
    return f"By kind of work: {kinds}.\nFrom the search to held-out prompts its speedup went from {before:.2f} to {now:.2f}."


def _range(found: Mapping[str, Any], kind: str) -> str:
    """A kind's interval, where it has prompts enough to know one."""
    if found["prompts_by_category"][kind] < _LEAST_OF_A_KIND:
        return ""
    low, high = found["interval_by_category"][kind]
    return f" ({low:.2f} to {high:.2f})"


def verdict(finals: Finals) -> str:
    """One sentence: who won, by how much, and how sure that is."""
    winner = finals.winner
    if winner.config.kind == "none":
        if finals.baseline["prompts"] < LEAST_RESAMPLED:
            few = f"{finals.baseline['prompts']} held-out prompts"
            return f"No drafting wins, as {few} cannot show that anything is faster: {LEAST_RESAMPLED} are the least."
        fast = [one for one in finals.finalists if one.low > 1.0]
        if fast:
            why = "its output is not that of plain decoding" if fast[0].stayed else "it had left by then"
            return f"No drafting wins: {fast[0].config.label()} is faster, but {why}."
        sure = f"for all {len(finals.finalists)} finalists at once, " if len(finals.finalists) > 1 else ""
        return f"No drafting wins: {sure}no held-out interval lies wholly above the speed of plain decoding."
    held_out = winner.held_out
    return (
        f"{winner.config.label()} wins: {held_out['speedup']:.2f} x plain decoding on held-out prompts "
        f"(95 % interval {held_out['speedup_low']:.2f} to {held_out['speedup_high']:.2f}, "
        f"for all {len(finals.finalists)} finalists at once from {winner.low:.2f} on), "
        f"output {_output(winner.config, held_out)}."
    )


_VERDICTS = {
    "exact": "identical",
    "near_tie": "identical but for near-ties of rounding",
    "different": "CHANGED",
    "unchecked": "unchecked",
}


def _output(config: SpeculativeConfig, found: Mapping[str, Any]) -> str:
    """What became of the output, in words."""
    return _VERDICTS[found["losslessness"]["verdict"]] if config.lossless else "LOSSY"


def _finals_table(finals: Finals) -> list[str]:
    rows = [("no drafting", 1.0, finals.baseline, _output(SpeculativeConfig(), finals.baseline))]
    rows += [(f.config.label(), f.search_speedup, f.held_out, _output(f.config, f.held_out)) for f in finals.finalists]
    lines = [
        "## Finalists (held-out prompts)",
        "",
        "| configuration | speedup | 95 % interval | tokens/s | acceptance | tokens/round | in the search | output |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, before, found, output in rows:
        lines.append(
            f"| {label} | {found['speedup']:.3f} | {found['speedup_low']:.3f} to {found['speedup_high']:.3f} "
            f"| {found['tokens_per_second']:.1f} | {found['acceptance_rate']:.2f} | {found['tokens_per_round']:.2f} "
            f"| {before:.3f} | {output} |"
        )
    return lines


def _trials_table(trials: Sequence[FrozenTrial], most: int = 10) -> list[str]:
    lines = [
        "| trial | configuration | speedup | tokens/s | acceptance | tokens/round |",
        "|---|---|---|---|---|---|",
    ]
    whole = _measured(trials)
    kept = [t for t in whole if is_lossless(t.user_attrs["measurement"]) or not configuration(t).lossless]
    for trial in sorted(kept, key=lambda t: -(t.value or 0.0))[:most]:
        found = trial.user_attrs["measurement"]
        lines.append(
            f"| {trial.number} | {configuration(trial).label()} | {trial.value:.3f} | {found['tokens_per_second']:.1f} "
            f"| {found['acceptance_rate']:.2f} | {found['tokens_per_round']:.2f} |"
        )
    return lines
