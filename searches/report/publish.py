"""The results of a finished study: ``best.json`` and ``report.md``, ``.png`` and ``.html``, all logged to MLflow."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from layerskip import Export, PromptSet, SkipMask, SpeculativeConfig
from layerskip.export import PROVISIONAL, attached_folders
from layerskip.models.environment import environment
from searches.backends.selection import described
from searches.connections import without_password
from searches.predict.scan_predictor import ScanPredictor
from searches.predict.stability import SeedStability, seed_stability
from searches.progress import say
from searches.report.markdown import search_seconds, study_notes, summary, verdict
from searches.report.page import FINISHED, PAGE, Page, write_page
from searches.report.picture import draw
from searches.report.tables import best_trials
from searches.study.finals import Finals
from searches.study.leaderboard import configuration, leading, ranking
from searches.study.plan import Plan
from searches.study.study import SETTINGS, finished
from searches.tracking.tracker import Tracker


@dataclass(frozen=True)
class Publisher:
    """Writer of a study's results.

    Args:
        plan: of the study.
        study: the study.
        tracker: takes the files and figures.
        folder: of the study, for the files.
    """

    plan: Plan
    study: optuna.Study
    tracker: Tracker
    folder: Path

    def publish(self, finals: Finals, predictor: ScanPredictor | None, held_out: PromptSet, log: bool = True) -> None:
        """Write the export and the report of the finished study, log them, and print the report.

        Args:
            finals: the results on held-out prompts.
            predictor: predicts masks with empty skips; None if none were scanned.
            held_out: the measured held-out prompts.
            log: whether files and figures are logged.
        """
        plan, study, folder, winner = self.plan, self.study, self.folder, finals.winner
        seconds = search_seconds(study, finals)
        self._export(winner.config, winner.held_out, held_out, seconds).save(folder / "best.json")
        stability = singles = scan_seconds = None
        if predictor is not None:
            stability = predictor.stability(2 * len(plan.space.skippable))
            singles, scan_seconds = predictor.single_agreements(), predictor.scan_seconds
        seeds = self._compare_seeds(predictor)
        text = summary(study, finals, stability, seeds, scan_seconds)
        (folder / "report.md").write_text(text, encoding="utf-8")
        draw(study, finals, plan.target.layers, folder / "report.png", singles)
        notes = study_notes(study, finals, stability, seeds, scan_seconds)
        page = Page(plan.target.layers, plan.settings.n_trials, notes, FINISHED, finals=finals, singles=singles)
        write_page(folder / PAGE, study, page)
        if log:
            self.log(finals)
        say(text)
        say(f"wrote {folder / 'best.json'} and {folder / PAGE}; compare runs with:")
        say(f"  mlflow ui --backend-store-uri {shlex.quote(without_password(self.tracker.uri))}")

    def publish_provisional(self, prompts: PromptSet, seconds: float) -> bool:
        """Write the export of the running study's leader, marked as provisional; a confirmed one of the same study stays.

        Returns whether it was written.

        Args:
            prompts: tune prompts, of which trials decoded some.
            seconds: that the search took so far.
        """
        path = self.folder / "best.json"
        with contextlib.suppress(OSError, ValueError, LookupError, AttributeError):  # one that cannot be read is replaced
            if not json.loads(path.read_text(encoding="utf-8"))["search"].get(PROVISIONAL):
                return False
        config, evidence = SpeculativeConfig(), {}
        if (leader := leading(self.study)) is not None and leader.value is not None and leader.value > 1:
            config, evidence = configuration(leader), leader.user_attrs["measurement"]
        self._export(config, evidence, prompts, seconds, **{PROVISIONAL: True}).save(path)
        return True

    def log(self, finals: Finals, again: bool = True) -> None:
        """Log the files and the figures of the finished study, and its winner with the trial that stands for it.

        Args:
            finals: the results on held-out prompts.
            again: whether results that were logged completely are logged again.
        """
        names = ("report.md", "report.png", PAGE, "best.json")
        files: list[tuple[Path, str | None]] = [(self.folder / name, None) for name in names]
        for place in attached_folders(self.folder / "best.json"):
            files += [(path, place.name) for path in sorted(place.iterdir())]
        figures = ("speedup", "speedup_low", "speedup_high", "tokens_per_second")
        metrics = {f"held_out_{name}": finals.winner.held_out[name] for name in figures}
        metrics |= {"search_seconds": search_seconds(self.study, finals), "trials": len(finished(self.study))}
        winner = _winning_trial(self.study, finals.winner.config)
        self.tracker.conclude(finals.winner.config.label(), verdict(finals), winner, metrics, files, again)

    def _export(
        self,
        config: SpeculativeConfig,
        figures: Mapping[str, Any],
        prompts: PromptSet,
        seconds: float,
        **marks: bool,
    ) -> Export:
        """Return the export of a configuration with its figures on some prompts, after so many seconds of search."""
        plan, study = self.plan, self.study
        evidence = {**figures, "prompts_digest": prompts.digest, "max_new_tokens": plan.measuring.max_new_tokens}
        search = {"study": study.study_name, "trials": len(finished(study)), "seconds": seconds}
        search |= {"mlflow_run_id": self.tracker.run_id, **marks}
        where = environment(plan.target) | described(plan.backend, plan.workload)
        return Export(Export.describe(plan.target), config, plan.sampling, evidence, where, search=search)

    def _compare_seeds(self, predictor: ScanPredictor | None) -> SeedStability | None:
        """Return the overlap of the best mask with those that the same study chose with other seeds.

        If no trial decoded a mask, the mask with the highest predicted speedup is compared.
        """
        layers, skippable = self.plan.target.layers, self.plan.space.skippable
        tried = (SkipMask.parse(entry.config.mask, layers) for entry in ranking(self.study) if entry.config.mask)
        mask = next(tried, None) or (predictor.best_mask() if predictor is not None else None)
        if mask is None:
            return None
        return seed_stability(self.folder, self.study.user_attrs[SETTINGS], mask, 2 * len(skippable))


def _winning_trial(study: optuna.Study, winner: SpeculativeConfig) -> int | None:
    """Return the trial that stands for the winner: the fastest with its configuration.

    Bridges that were trained for the finals were in no trial. The fastest with the same drafters and masks stands for them.
    """
    measured = [(trial.number, configuration(trial)) for trial in best_trials(finished(study), len(study.trials))]
    same = [number for number, config in measured if config == winner]
    alike = [number for number, config in measured if _drafts_with(config) == _drafts_with(winner)]
    return next(iter(same or alike), None)


def _drafts_with(config: SpeculativeConfig) -> list[tuple[str, str]]:
    return [(part.method, part.mask) for part in config.members or (config,)]
