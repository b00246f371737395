"""``report.png``: charts of ``report.html`` as matplotlib draws them, because plotly needs a browser for a picture."""

from __future__ import annotations

import html
from pathlib import Path

import matplotlib
import numpy as np
import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plotly import graph_objects as go

from searches.report import charts
from searches.study.finals import Finals
from searches.study.study import finished

_MARKERS = {"circle": "o", "x-thin-open": "x", "line-ns-open": "|"}


def draw(study: optuna.Study, finals: Finals, layers: int, path: Path, singles: np.ndarray | None = None) -> None:
    """Save the search history, speedup against acceptance, skipped sub-layers and held-out intervals to one picture.

    Args:
        study: the finished study.
        finals: the results on held-out prompts.
        layers: the number of decoder layers of the target.
        path: of the picture.
        singles: ``[2, layers]``, the agreement with one attention or MLP sub-layer skipped, from scans; drawn if no trial
            skipped anything.
    """
    measured = charts.points(finished(study))
    drawn = {
        "Search history (tune prompts)": charts.history(measured),
        "Speedup against acceptance": charts.acceptance(measured),
        "Skipped sub-layers, by layer": charts.skipped_by_trials(measured, layers) or charts.agreement_of_scans(singles),
        "Held-out speedup, 95 % interval (bar: in the search)": charts.held_out(finals),
    }
    figure = Figure(figsize=(14, 9), layout="constrained")
    for axes, (title, chart) in zip(figure.subplots(2, 2).flat, drawn.items(), strict=True):
        axes.set_title(title)
        if chart is not None:
            _copy(chart, axes)
    if measured:
        figure.axes[0].legend(fontsize=8)
    figure.suptitle(f"Study {study.study_name}")
    figure.savefig(path, dpi=110)


def _copy(chart: go.Figure, axes: Axes) -> None:
    """Draw a chart of this package: markers with error bars, lines in steps, a map of sub-layers, lines and notes."""
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
            axes.errorbar(
                trace.x,
                trace.y,
                xerr=_lengths(trace.error_x),
                yerr=_lengths(trace.error_y),
                fmt=_MARKERS[trace.marker.symbol or "circle"],
                color=trace.marker.color,
                elinewidth=1,
                label=html.unescape(trace.name),
            )
    for shape in layout.shapes:  # the speed of plain decoding
        axes.axline((shape.x0, shape.y0), (shape.x1, shape.y1), color="0.6", lw=0.8)
    for note in layout.annotations:
        text = html.unescape(note.text.replace("<br>", "\n"))
        axes.text(note.x, note.y, text, transform=axes.get_yaxis_transform(), fontsize=8, va="center")
    if layout.yaxis.visible is False:
        axes.set_yticks([])
        axes.set_ylim(*layout.yaxis.range)


def _lengths(error: go.scatter.ErrorX | go.scatter.ErrorY) -> list[list[float]] | None:
    """Return the lengths of bars to both sides, ``[2, points]``; None if there are none."""
    return None if error.array is None else [list(error.arrayminus), list(error.array)]
