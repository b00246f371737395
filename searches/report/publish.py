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
from matplotlib.lines import Line2D
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
from searches.report.markdown import search_seconds, summary, verdict
from searches.report.page import FINISHED, PAGE, Page, write_page
from searches.report.tables import best_trials
from searches.study.finals import Finals
from searches.study.leaderboard import configuration, leading
from searches.study.plan import Plan
from searches.study.study import finished
from searches.tracking.tracker import Tracker

_MARKERS = {"circle": "o", "x-thin-open": "x", "line-ns-open": "|"}
_PICTURED = {
    "history": "Search history (tune prompts, 95 % intervals)",
    "acceptance": "Speedup against acceptance",
    "scans": "First drafted token right with one sub-layer skipped, by layer",
    "held-out": "Held-out speedup, 95 % interval (bar: in the search)",
}
"""The charts of ``report.png`` with their titles there."""


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
        """Write and print the results; ``predictor`` is None without scans, ``race`` if no engine was measured."""
        plan, study, folder, winner = self.plan, self.study, self.folder, finals.winner
        seconds = search_seconds(study, finals)
        self._export(winner.config, winner.held_out, held_out, seconds).save(folder / "best.json")
        singles = None if predictor is None else predictor.single_agreements()
        text = summary(study, finals, race)
        (folder / "report.md").write_text(text, encoding="utf-8")
        page = Page(plan.settings.n_trials, FINISHED, finals=finals, race=race, singles=singles)
        shown = write_page(folder / PAGE, study, page)
        _draw(f"Study {study.study_name}", shown, charts.legend(finished(study)), folder / "report.png")
        say(text)
        say(f"wrote {folder / 'best.json'} and {folder / PAGE}; compare runs with:")
        say(f"  mlflow ui --backend-store-uri {shlex.quote(without_password(self.tracker.uri))}")

    def publish_provisional(self, prompts: PromptSet, seconds: float) -> bool:
        """Export the leader so far as provisional, unless a confirmed export is there; return whether it was."""
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
        plan, study = self.plan, self.study
        evidence = {**figures, "prompts_digest": prompts.digest, "max_new_tokens": plan.measuring.max_new_tokens}
        search = {"study": study.study_name, "trials": len(finished(study)), "seconds": seconds}
        search |= {"mlflow_run_id": self.tracker.run_id, **marks}
        where = environment(plan.target) | described(plan.backend, plan.workload)
        return Export(plan.target.describe(), config, plan.sampling, evidence, where, search=search)


def _draw(title: str, shown: Mapping[str, go.Figure], legend: Mapping[str, str], path: Path) -> None:
    """Save the main charts to one picture by matplotlib, because plotly needs a browser for a picture."""
    picture = Figure(figsize=(14, 9), layout="constrained")
    picture.suptitle(title)
    for axes, (name, heading) in zip(picture.subplots(2, 2).flat, _PICTURED.items(), strict=True):
        axes.set_title(heading)
        if name in shown:
            _copy(shown[name], axes)
        if name == "history" and legend:
            colors = [Line2D([], [], color=color, marker="o", linestyle="", label=text) for text, color in legend.items()]
            axes.legend(handles=colors, fontsize=8)
    picture.savefig(path, dpi=110)


def _copy(chart: go.Figure, axes: Axes) -> None:
    """Draw what a chart shows: heat maps, lines in steps, markers with error bars, and the lines of plain decoding."""
    layout = chart.layout
    axes.set(xlabel=layout.xaxis.title.text, ylabel=layout.yaxis.title.text)
    for trace in chart.data:
        if trace.type == "heatmap":
            axes.set_yticks(range(len(trace.y)), trace.y)
            colors = matplotlib.colormaps["viridis"].with_extremes(bad="0.9")
            image = axes.imshow(np.array(trace.z, dtype=float), aspect="auto", cmap=colors)
            axes.figure.colorbar(image, ax=axes, label=trace.colorbar.title.text)
        elif trace.mode == "lines":
            axes.step(trace.x, trace.y, where="post", color=trace.line.color, linewidth=1)
        else:
            xerr, yerr = (bar.array and (bar.arrayminus, bar.array) for bar in (trace.error_x, trace.error_y))
            axes.errorbar(trace.x, trace.y, yerr, xerr, fmt="none", ecolor="0.6", elinewidth=1)
            marker, count = trace.marker, len(trace.x)
            color, symbol = (np.broadcast_to(each, count) for each in (marker.color, marker.symbol or "circle"))
            for x, y, own, mark in zip(trace.x, trace.y, color, map(_MARKERS.get, symbol), strict=True):
                axes.plot(x, y, color=own, marker=mark, markersize=14 if mark == "|" else 6)
    for line in layout.shapes:
        draw, place = (axes.axhline, line.y0) if line.y0 == line.y1 else (axes.axvline, line.x0)
        draw(place, color="0.6", linewidth=0.8)
    if layout.yaxis.ticktext:
        labels = [html.unescape(text.replace("<br>", "\n")) for text in layout.yaxis.ticktext]
        axes.set_yticks(layout.yaxis.tickvals, labels, fontsize=8)
