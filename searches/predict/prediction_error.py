"""How far do foretold speedups agree with measured ones? In one run, and in several of the same comparison together.

What one run measures is moved by what disturbed the machine meanwhile, by several per cent on shared ones. Runs of the same
masks and draft lengths measure the same thing: against the mean of their measurements stand what each of them foretold.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from searches.app.checks import InputError

SCHEMA = "layerskip.foretold/1"
SAME = ("target", "prompts", "max_new_tokens")  # what runs must share to be taken together
PLACE = ("device", "device_name", "threads", "packed_weights")  # and of their environments
SCANNED = 64  # masks whose scans are priced in real trials


def agreement(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How far predictions and measurements agree; errors are relative to what was measured."""
    names = ("predicted", "predicted_from_real_rounds", "measured")
    predicted, timed, measured = (np.array([point[name] for point in points]) for name in names)
    errors = predicted / measured - 1
    return {
        "spearman": float(spearmanr(predicted, measured).statistic) if len(points) > 2 else 0.0,
        "median_absolute_error": float(np.median(np.abs(errors))),
        "mean_error": float(np.mean(errors)),
        "median_absolute_error_from_real_rounds": float(np.median(np.abs(timed / measured - 1))),
    }


def scan_cost(record: Mapping[str, Any]) -> float | None:
    """How many of a run's trials cost as much time as scanning :data:`SCANNED` masks; None where nothing was scanned."""
    seconds = record["scan"].get("seconds_per_mask") if "scan" in record else None
    return None if seconds is None else float(SCANNED * seconds / record["trial_seconds"])


def together(paths: Sequence[str]) -> dict[str, Any]:
    """Several runs' predictions against the mean of their measurements.

    Args:
        paths: records of ``searches.evaluate.predictions``, two or more, of the same masks, draft lengths, prompts and target, on
            one kind of machine.

    Returns:
        ``runs``, what each foretold against its own measurements and against the mean of all; ``points`` and their
        agreement, every run's predictions among them; ``median_difference``, how far two runs' measurements of the same lie
        apart, relative to the later named; ``scan``, what scans cost in the run where they were dearest.

    Raises:
        InputError: a file is no such record, or they compare different things.
    """
    if len({Path(path).resolve() for path in paths}) < max(2, len(paths)):
        raise InputError("records: to be taken together they must be two or more, each named once")
    records = [_read(path) for path in paths]
    for path, record in zip(paths[1:], records[1:], strict=True):
        for name, value in _conditions(record).items():
            if value != _conditions(records[0])[name]:
                raise InputError(f"records: {path} has another {name} than {paths[0]}")
        if _measured(record).keys() != _measured(records[0]).keys():
            raise InputError(f"records: {path} has other masks or draft lengths than {paths[0]}")
    measured = [_measured(record) for record in records]
    mean = {key: statistics.fmean(found[key] for found in measured) for key in measured[0]}
    runs, points = [], []
    for record in records:
        beside = [point | {"measured": mean[_key(point)]} for point in record["points"]]
        points += beside
        about = {name: record[name] for name in ("date", "environment")}
        runs.append(about | {"by_itself": agreement(record["points"]), "beside_the_mean": agreement(beside)})
    costs = [cost for cost in map(scan_cost, records) if cost is not None]
    apart = [abs(one[key] / other[key] - 1) for one, other in combinations(measured, 2) for key in mean]
    return (
        {"schema": "layerskip.foretold-together/1"}
        | {name: records[0][name] for name in SAME}
        | {"runs": runs, "points": points, "median_difference": statistics.median(apart)}
        | ({"scan": {"trials": max(costs)}} if costs else {})
        | agreement(points)
    )


def _read(path: str) -> dict[str, Any]:
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"records: {path} cannot be read: {error}") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise InputError(f"records: {path} is no record of searches.evaluate.predictions")
    return record


def _conditions(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in SAME} | {name: record["environment"].get(name) for name in PLACE}


def _key(point: Mapping[str, Any]) -> tuple[str, int]:
    return point["mask"], point["draft_length"]


def _measured(record: Mapping[str, Any]) -> dict[tuple[str, int], float]:
    return {_key(point): point["measured"] for point in record["points"]}


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Save a picture: predicted against measured speedup."""
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    points = record["points"]
    for length in sorted({point["draft_length"] for point in points}):
        some = [point for point in points if point["draft_length"] == length]
        axes.scatter([p["measured"] for p in some], [p["predicted"] for p in some], s=14, label=f"draft length {length}")
    reach = [0.0, 1.05 * max(max(point["measured"], point["predicted"]) for point in points)]
    axes.plot(reach, reach, color="0.6", lw=0.8)
    title = f"Spearman {record['spearman']:.3f}, median absolute error {record['median_absolute_error']:.1%}"
    axes.set(xlabel="measured speedup", ylabel="predicted speedup", title=title)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
