"""The plots of a study's report: search history, acceptance, skipped sub-layers, held-out intervals."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from optuna.trial import FrozenTrial, TrialState

from searches.report.trial_points import COLORS, OTHER, points, skipped_speedups
from searches.study.finals import Finals
from searches.study.leaderboard import configuration
from searches.study.study import finished


def draw(study: optuna.Study, finals: Finals | None, layers: int, path: Path, singles: np.ndarray | None = None) -> None:
    """Save the plots of a study, which may still run, to one picture.

    Args:
        study: finished or running.
        finals: the results on held-out prompts; None while the study runs.
        layers: the number of decoder layers of the target.
        path: of the picture.
        singles: ``[2, layers]``, the agreement with one attention or MLP sub-layer skipped, from scans; drawn if no trial
            skipped anything.
    """
    trials = [t for t in finished(study) if "measurement" in t.user_attrs]
    figure = Figure(figsize=(14, 9), layout="constrained")
    axes = figure.subplots(2, 2)
    _history(axes[0][0], trials)
    _acceptance(axes[0][1], trials)
    _heatmap(axes[1][0], trials, layers, singles)
    _intervals(axes[1][1], finals)
    figure.suptitle(f"Study {study.study_name}")
    figure.savefig(path, dpi=110)


def _speedup(trial: FrozenTrial) -> float:
    return float(trial.user_attrs["measurement"]["speedup"])


def _history(axes: Axes, trials: Sequence[FrozenTrial]) -> None:
    """Draw the speedup of each trial, in order."""
    for kind, color in COLORS.items():
        for state, marker in ((TrialState.COMPLETE, "o"), (TrialState.PRUNED, "x")):
            chosen = [t for t in trials if configuration(t).kind == kind and t.state == state]
            if chosen:
                label = kind.replace("_", " ") + ("" if state == TrialState.COMPLETE else ", stopped early")
                axes.scatter([t.number for t in chosen], [_speedup(t) for t in chosen], c=color, marker=marker, label=label)
    complete = [t for t in trials if t.state == TrialState.COMPLETE]
    if complete:
        best = np.maximum.accumulate([_speedup(t) for t in complete])
        axes.step([t.number for t in complete], best, where="post", color="black", lw=1, label="best so far")
        axes.legend(fontsize=8)
    axes.axhline(1.0, color="0.6", lw=0.8)
    axes.set(title="Search history (tune prompts)", xlabel="trial", ylabel="speedup over plain decoding")


def _acceptance(axes: Axes, trials: Sequence[FrozenTrial]) -> None:
    """Draw speedup against acceptance rate."""
    drafted = [t for t in trials if configuration(t).kind != "none"]
    colors = [COLORS.get(configuration(t).kind, OTHER) for t in drafted]
    rates = [t.user_attrs["measurement"]["acceptance_rate"] for t in drafted]
    axes.scatter(rates, [_speedup(t) for t in drafted], c=colors)
    axes.axhline(1.0, color="0.6", lw=0.8)
    axes.set(title="Speedup against acceptance", xlabel="acceptance rate", ylabel="speedup over plain decoding")
    axes.set_xlim(-0.02, 1.02)


def _heatmap(axes: Axes, trials: Sequence[FrozenTrial], layers: int, singles: np.ndarray | None) -> None:
    """Draw the mean speedup of the trials that skipped a sub-layer, or the agreement from scans; unknown cells are grey."""
    cells, count = skipped_speedups(points(trials), layers)
    title = "Mean speedup of the trials that skipped a sub-layer"
    if not count.any() and singles is not None:
        cells, title = singles, "First drafted token right, one sub-layer skipped (scan)"
    colors = matplotlib.colormaps["viridis"].with_extremes(bad="0.9")
    image = axes.imshow(cells, aspect="auto", cmap=colors)
    axes.set_yticks([0, 1], ["attention", "MLP"])
    axes.set(title=title, xlabel="layer")
    if not np.isnan(cells).all():
        axes.figure.colorbar(image, ax=axes)


def _intervals(axes: Axes, finals: Finals | None) -> None:
    """Draw the held-out speedup of each finalist with its interval, and its speedup in the search."""
    axes.set(title="Held-out speedup, 95 % interval (bar: in the search)", xlabel="speedup over plain decoding")
    axes.axvline(1.0, color="0.6", lw=0.8)
    if finals is None:
        axes.text(0.5, 0.5, "not measured yet", transform=axes.transAxes, ha="center")
        return
    shown = list(reversed(finals.finalists))
    for place, finalist in enumerate(shown):
        held_out: dict[str, Any] = finalist.held_out
        speedup, low, high = (held_out[name] for name in ("speedup", "speedup_low", "speedup_high"))
        color = COLORS.get(finalist.config.kind, OTHER)
        axes.errorbar(speedup, place, xerr=[[speedup - low], [high - speedup]], fmt="o", color=color, capsize=4)
        axes.plot(finalist.search_speedup, place, "|", color="black", ms=12)
    labels = [textwrap.shorten(f.config.label(), 80, placeholder="...") for f in shown]
    axes.set_yticks(range(len(shown)), [textwrap.fill(label, 32) for label in labels], fontsize=8)
    axes.set_ylim(-0.6, max(len(shown), 1) - 0.4)
