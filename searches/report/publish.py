"""The results of a finished study: ``best.json`` and ``report.md``, ``.png`` and ``.html``, all logged to MLflow."""

from __future__ import annotations

import contextlib
import json
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from matplotlib.figure import Figure

from layerskip import Export, PromptSet, SpeculativeConfig
from layerskip.export import PROVISIONAL, attached_folders
from layerskip.models.environment import environment
from searches.backends.selection import described
from searches.connections import without_password
from searches.engines.race import RACE_FILE, Race
from searches.predict.scan_predictor import ScanPredictor
from searches.progress import say
from searches.report import charts
from searches.report.markdown import race_verdict, search_seconds, study_notes, summary, verdict
from searches.report.page import FINISHED, PAGE, Page, write_page
from searches.report.tables import best_trials
from searches.study.finals import Finals
from searches.study.leaderboard import configuration, leading
from searches.study.plan import Plan
from searches.study.study import finished
from searches.tracking.tracker import Tracker


@dataclass(frozen=True)
class Publisher:
    """Writer of a study's results into its folder and to the tracker."""

    plan: Plan
    study: optuna.Study
    tracker: Tracker
    folder: Path

    def publish(
        self, finals: Finals, predictor: ScanPredictor | None, held_out: PromptSet, race: Race | None = None
    ) -> None:
        """Write the export and the report of the finished study, and print the report.

        ``predictor`` is None if no masks were scanned, ``race`` if no engine was measured.
        """
        plan, study, folder, winner = self.plan, self.study, self.folder, finals.winner
        seconds = search_seconds(study, finals)
        self._export(winner.config, winner.held_out, held_out, seconds).save(folder / "best.json")
        singles = None if predictor is None else predictor.single_agreements()
        text = summary(study, finals, race)
        (folder / "report.md").write_text(text, encoding="utf-8")
        _draw(study, finals, folder / "report.png", singles)
        notes = study_notes(study, finals)
        notes += [] if race is None else [race_verdict(race)]
        page = Page(plan.settings.n_trials, notes, FINISHED, finals=finals, singles=singles)
        write_page(folder / PAGE, study, page)
        say(text)
        say(f"wrote {folder / 'best.json'} and {folder / PAGE}; compare runs with:")
        say(f"  mlflow ui --backend-store-uri {shlex.quote(without_password(self.tracker.uri))}")

    def publish_provisional(self, prompts: PromptSet, seconds: float) -> bool:
        """Write the export of the running study's leader after so many seconds, marked as provisional.

        A confirmed one of the same study stays. Returns whether it was written.
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
        """Log the files and the figures of the finished study, also ``again`` those that were logged completely."""
        names = ("report.md", "report.png", PAGE, "best.json")
        files: list[tuple[Path, str | None]] = [(self.folder / name, None) for name in names]
        files += [(path, None) for path in (self.folder / RACE_FILE,) if path.exists()]
        for place in attached_folders(self.folder / "best.json"):
            files += [(path, place.name) for path in sorted(place.iterdir())]
        figures = ("speedup", "speedup_low", "speedup_high", "tokens_per_second")
        metrics = {f"held_out_{name}": finals.winner.held_out[name] for name in figures}
        metrics |= {"search_seconds": search_seconds(self.study, finals), "trials": len(finished(self.study))}
        best = best_trials(finished(self.study), len(self.study.trials))
        winner = next((trial.number for trial in best if configuration(trial) == finals.winner.config), None)
        self.tracker.conclude(finals.winner.config.label(), verdict(finals), winner, metrics, files, again)
        if again and self.plan.backend.name == "layerskip":
            self.tracker.register(self.folder / "best.json")

    def _export(
        self, config: SpeculativeConfig, figures: Mapping[str, Any], prompts: PromptSet, seconds: float, **marks: bool
    ) -> Export:
        """Return the export of a configuration with its figures on some prompts, after so many seconds of search."""
        plan, study = self.plan, self.study
        evidence = {**figures, "prompts_digest": prompts.digest, "max_new_tokens": plan.measuring.max_new_tokens}
        search = {"study": study.study_name, "trials": len(finished(study)), "seconds": seconds}
        search |= {"mlflow_run_id": self.tracker.run_id, **marks}
        where = environment(plan.target) | described(plan.backend, plan.workload)
        return Export(Export.describe(plan.target), config, plan.sampling, evidence, where, search=search)


def _draw(study: optuna.Study, finals: Finals, path: Path, singles: np.ndarray | None) -> None:
    """Save the main charts to one picture by matplotlib, because plotly needs a browser for a picture."""
    figure = Figure(figsize=(14, 9), layout="constrained")
    figure.suptitle(f"Study {study.study_name}")
    history, acceptance, scans, held_out = figure.subplots(2, 2).flat
    history.set(title="Search history (tune prompts, 95 % intervals)", xlabel="trial", ylabel="speedup")
    acceptance.set(title="Speedup against acceptance", xlabel="acceptance rate", ylabel="speedup")
    scans.set(title="First drafted token right with one sub-layer skipped", xlabel="layer")
    held_out.set(title="Held-out speedup, 95 % interval (bar: in the search)", xlabel="speedup")
    trials = [trial for trial in finished(study) if "measurement" in trial.user_attrs]
    for method in charts.methods({configuration(trial).method for trial in trials}):
        own = [trial for trial in trials if configuration(trial).method == method]
        metrics, speedups = [trial.user_attrs["measurement"] for trial in own], charts.speedups(own)
        style: dict[str, Any] = {"fmt": "o", "color": charts.color_of(method), "elinewidth": 1}
        numbers, label = [trial.number for trial in own], method.replace("_", " ")
        history.errorbar(numbers, speedups, charts.interval_lengths(metrics), label=label, **style)
        if method != "none":
            acceptance.errorbar([each["acceptance_rate"] for each in metrics], speedups, **style)
    if trials:
        history.legend(fontsize=8)
    if singles is not None and not np.isnan(singles).all():
        scans.set_yticks([0, 1], ["attention", "MLP"])
        figure.colorbar(scans.imshow(singles, aspect="auto"), ax=scans)
    ranked = finals.finalists[::-1]
    for place, finalist in enumerate(ranked):
        lengths = charts.interval_lengths([finalist.held_out])
        color = charts.color_of(finalist.config.method)
        held_out.errorbar(finalist.held_out["speedup"], place, xerr=lengths, fmt="o", color=color)
        held_out.plot(finalist.search_speedup, place, "|", color="black", markersize=14)
    held_out.set_yticks(range(len(ranked)), [textwrap.fill(each.config.label(), 40) for each in ranked], fontsize=8)
    for line in (history.axhline, acceptance.axhline, held_out.axvline):
        line(1.0, color="0.6", linewidth=0.8)
    figure.savefig(path, dpi=110)
