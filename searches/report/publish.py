"""The results of a finished study: ``best.json`` and ``report.md``, ``.png`` and ``.html``, all logged to MLflow."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna

from layerskip import Export, PromptSet, SkipMask, SpeculativeConfig
from layerskip.attachments import attached_folders
from layerskip.export import PROVISIONAL
from layerskip.models.environment import environment
from searches.app.progress import say
from searches.app.urls import without_password
from searches.backends.selection import described
from searches.predict.scan_predictor import ScanPredictor
from searches.predict.stability import SeedStability, seed_stability
from searches.report.html_report import FINISHED, Page, write_page
from searches.report.live import PAGE
from searches.report.study_plots import draw
from searches.report.study_report import best_trials, search_seconds, study_notes, summary, verdict
from searches.study.finals import Finals
from searches.study.leaderboard import configuration, leading, ranking
from searches.study.plan import Plan
from searches.study.study import SETTINGS, finished
from searches.tracking.tracker import Tracker


def publish(
    finals: Finals,
    predictor: ScanPredictor | None,
    plan: Plan,
    study: optuna.Study,
    held_out: PromptSet,
    tracker: Tracker,
    folder: Path,
    log: bool = True,
) -> None:
    """Write the export and the report of a study, log them, and print the report.

    Args:
        finals: the results on held-out prompts.
        predictor: predicts masks without bridges; None if none were scanned.
        plan: of the study.
        study: the finished study.
        held_out: the measured held-out prompts.
        tracker: takes the files and figures.
        folder: of the study, for the files.
        log: whether files and figures are logged.
    """
    seconds = search_seconds(study, finals)
    _export(finals, plan, study, held_out, seconds, tracker.run_id).save(folder / "best.json")
    stability = predictor.stability(2 * len(plan.space.skippable)) if predictor is not None else None
    scan_seconds = predictor.scan_seconds if predictor is not None else None
    seeds = _compare_seeds(study, plan, folder, predictor)
    text = summary(study, finals, stability, seeds, scan_seconds)
    (folder / "report.md").write_text(text, encoding="utf-8")
    singles = predictor.single_agreements() if predictor is not None else None
    draw(study, finals, plan.target.layers, folder / "report.png", singles)
    notes = study_notes(study, finals, stability, seeds, scan_seconds)
    page = Page(plan.target.layers, plan.settings.n_trials, notes, FINISHED, finals=finals, singles=singles)
    write_page(folder / PAGE, study, page)
    if log:
        log_results(finals, study, tracker, folder)
    say(text)
    say(f"wrote {folder / 'best.json'} and {folder / PAGE}; compare runs with:")
    say(f"  mlflow ui --backend-store-uri {shlex.quote(without_password(tracker.uri))}")


def publish_provisional(
    plan: Plan, study: optuna.Study, prompts: PromptSet, seconds: float, path: Path, run_id: str | None
) -> bool:
    """Write the export of a running study's leader, marked as provisional; a confirmed one of the same study stays.

    Returns whether it was written.

    Args:
        plan: of the study.
        study: with a finished trial at least.
        prompts: tune prompts, of which trials decoded some.
        seconds: that the search took so far.
        path: of the export.
        run_id: of the study's MLflow run.
    """
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError):  # one that cannot be read is replaced
        if not json.loads(path.read_text(encoding="utf-8"))["search"].get(PROVISIONAL):
            return False
    config, evidence = SpeculativeConfig(), {}
    if (leader := leading(study)) is not None and leader.value is not None and leader.value > 1:
        config, evidence = configuration(leader), leader.user_attrs["measurement"]
    search = {"study": study.study_name, "trials": len(finished(study)), "seconds": seconds, "mlflow_run_id": run_id}
    _export_of(config, evidence, plan, prompts, search | {PROVISIONAL: True}).save(path)
    return True


def log_results(finals: Finals, study: optuna.Study, tracker: Tracker, folder: Path, again: bool = True) -> None:
    """Log the files and the figures of a finished study, and its winner with the trial that stands for it.

    Args:
        finals: the results on held-out prompts.
        study: the finished study.
        tracker: takes the files and figures.
        folder: of the study, with the files.
        again: whether results that were logged completely are logged again.
    """
    files: list[tuple[Path, str | None]] = [(folder / name, None) for name in ("report.md", "report.png", PAGE, "best.json")]
    for place in attached_folders(folder / "best.json"):
        files += [(path, place.name) for path in sorted(place.iterdir())]
    names = ("speedup", "speedup_low", "speedup_high", "tokens_per_second")
    metrics = {f"held_out_{name}": finals.winner.held_out[name] for name in names}
    metrics |= {"search_seconds": search_seconds(study, finals), "trials": len(finished(study))}
    winner = winning_trial(study, finals.winner.config)
    tracker.conclude(finals.winner.config.label(), verdict(finals), winner, metrics, files, again)


def _export(
    finals: Finals, plan: Plan, study: optuna.Study, held_out: PromptSet, seconds: float, run_id: str | None
) -> Export:
    """Return the export of the winner, with its evidence."""
    search = {"study": study.study_name, "trials": len(finished(study)), "seconds": seconds, "mlflow_run_id": run_id}
    return _export_of(finals.winner.config, finals.winner.held_out, plan, held_out, search)


def _export_of(
    config: SpeculativeConfig, figures: Mapping[str, Any], plan: Plan, prompts: PromptSet, search: Mapping[str, Any]
) -> Export:
    """Return the export of a configuration with its figures on some prompts."""
    evidence = {**figures, "prompts_digest": prompts.digest, "max_new_tokens": plan.measuring.max_new_tokens}
    where = environment(plan.target) | described(plan.backend, plan.load)
    return Export(Export.describe(plan.target), config, plan.sampling, evidence, where, search=search)


def winning_trial(study: optuna.Study, winner: SpeculativeConfig) -> int | None:
    """Return the trial that stands for the winner: the fastest with its configuration.

    Bridges that were trained for the finals were in no trial. The fastest with the same drafters and masks stands for them.
    """
    measured = best_trials(finished(study), len(study.trials))  # fastest first
    same = [trial for trial in measured if configuration(trial) == winner]
    alike = [trial for trial in measured if _drafts_with(configuration(trial)) == _drafts_with(winner)]
    return next((trial.number for trial in same or alike), None)


def _drafts_with(config: SpeculativeConfig) -> list[tuple[str, str]]:
    return [(part.kind, part.mask) for part in config.members or (config,)]


def _compare_seeds(study: optuna.Study, plan: Plan, folder: Path, predictor: ScanPredictor | None) -> SeedStability | None:
    """Return the overlap of the best mask with those that the same study chose with other seeds.

    If no trial decoded a mask, the mask with the highest predicted speedup is compared.
    """
    tried = (SkipMask.parse(entry.config.mask, plan.target.layers) for entry in ranking(study) if entry.config.mask)
    mask = next(tried, None) or (predictor.best_mask() if predictor is not None else None)
    if mask is None:
        return None
    return seed_stability(folder, study.user_attrs[SETTINGS], mask, 2 * len(plan.space.skippable))
