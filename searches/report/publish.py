"""The results of a finished study: ``best.json`` and ``report.md``, ``.png`` and ``.html``, all logged to MLflow."""

from __future__ import annotations

import contextlib
import html
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plotly import graph_objects as go

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

_MARKERS = {"circle": "o", "x-thin-open": "x", "line-ns-open": "|"}


@dataclass(frozen=True)
class Publisher:
    """Writer of a study's results into its folder and to the tracker."""

    plan: Plan
    study: optuna.Study
    tracker: Tracker
    folder: Path

    def publish(
        self,
        finals: Finals,
        predictor: ScanPredictor | None,
        held_out: PromptSet,
        race: Race | None = None,
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
        winner = _winning_trial(self.study, finals.winner.config)
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
        return Export(plan.target.describe(), config, plan.sampling, evidence, where, search=search)


def _winning_trial(study: optuna.Study, winner: SpeculativeConfig) -> int | None:
    """Return the fastest trial with the winner's configuration, if it was in one."""
    best = best_trials(finished(study), len(study.trials))
    return next((trial.number for trial in best if configuration(trial) == winner), None)


def _draw(study: optuna.Study, finals: Finals, path: Path, singles: np.ndarray | None) -> None:
    """Save charts of ``report.html`` to one picture by matplotlib, because plotly needs a browser for a picture."""
    trials = finished(study)
    drawn = {
        "Search history (tune prompts)": charts.history(trials),
        "Speedup against acceptance": charts.acceptance(trials),
        "Skipped sub-layers, by layer": charts.agreement_of_scans(singles),
        "Held-out speedup, 95 % interval (bar: in the search)": charts.held_out(finals),
    }
    figure = Figure(figsize=(14, 9), layout="constrained")
    for axes, (title, chart) in zip(figure.subplots(2, 2).flat, drawn.items(), strict=True):
        axes.set_title(title)
        if chart is not None:
            _copy(chart, axes)
    if drawn_history := figure.axes[0].get_legend_handles_labels()[0]:
        figure.axes[0].legend(handles=drawn_history, fontsize=8)
    figure.suptitle(f"Study {study.study_name}")
    figure.savefig(path, dpi=110)


def _copy(chart: go.Figure, axes: Axes) -> None:
    """Draw a chart: markers with error bars, lines in steps, a map of sub-layers, lines and notes."""
    layout = chart.layout
    axes.set(xlabel=layout.xaxis.title.text, ylabel=layout.yaxis.title.text)
    for trace in chart.data:
        if trace.type == "heatmap":
            colors = matplotlib.colormaps["viridis"].with_extremes(bad="0.9")
            image = axes.imshow(np.array(trace.z, dtype=float), aspect="auto", cmap=colors)
            axes.set_yticks(range(len(trace.y)), trace.y)
            axes.figure.colorbar(image, ax=axes, label=trace.colorbar.title.text)
        elif trace.mode == "lines":
            axes.step(trace.x, trace.y, where="post", color=trace.line.color, lw=1, label=trace.name)
        else:
            bars = {"xerr": trace.error_x, "yerr": trace.error_y}
            style: dict[str, Any] = {
                axis: [bar.arrayminus, bar.array] for axis, bar in bars.items() if bar.array is not None
            }
            style |= {"fmt": _MARKERS[trace.marker.symbol or "circle"], "color": trace.marker.color, "elinewidth": 1}
            axes.errorbar(trace.x, trace.y, label=html.unescape(trace.name), **style)
    for shape in layout.shapes:  # the speed of plain decoding
        axes.axline((shape.x0, shape.y0), (shape.x1, shape.y1), color="0.6", lw=0.8)
    for note in layout.annotations:
        text = html.unescape(note.text.replace("<br>", "\n"))
        axes.text(note.x, note.y, text, transform=axes.get_yaxis_transform(), fontsize=8, va="center")
    if layout.yaxis.visible is False:
        axes.set_yticks([])
        axes.set_ylim(*layout.yaxis.range)
