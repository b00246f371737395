"""Tables of throughput and latency: the trials that no other one exceeds in both (the Pareto front)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optuna.trial import FrozenTrial

from searches.study.leaderboard import configuration, is_lossless
from searches.tracking.names import FIGURES

_SHOWN = ("throughput", "tpot_p50", "tpot_p95", "ttft_p50", "ttft_p95")
_HEADER = (
    "| trial | configuration | tokens/s of the engine | s/token p50 | p95 | s to the first token p50 | p95 |",
    "|---|---|---|---|---|---|---|",
)


def load_tables(trials: Sequence[FrozenTrial]) -> list[str]:
    """Return a table for each number of requests in flight; none if the back end does not report these figures.

    Args:
        trials: measured to the end.
    """
    figures = {trial.number: _figures(trial) for trial in trials if is_lossless(trial.user_attrs["measurement"])}
    names = [name for found in figures.values() for name in found if name.startswith(_SHOWN[0])]
    lines = []
    for suffix in dict.fromkeys(name.removeprefix(_SHOWN[0]) for name in names):
        under = {n: {name: found.get(name + suffix) for name in _SHOWN} for n, found in figures.items()}
        front = pareto_front({n: (each["throughput"], each["tpot_p50"]) for n, each in under.items()})
        requests = f", {suffix.removeprefix('_at_')} requests in flight" if suffix else ""
        lines += ["", f"## Throughput and latency{requests} (Pareto front)", "", *_HEADER] if front else []
        for trial in (trial for number in front for trial in trials if trial.number == number):
            cells = ["" if value is None else f"{value:.4g}" for value in under[trial.number].values()]
            lines.append(f"| {trial.number} | {configuration(trial).label()} | {' | '.join(cells)} |")
    return lines


def pareto_front(points: Mapping[int, tuple[float | None, float | None]]) -> list[int]:
    """Return the points that no other one exceeds in both coordinates, by falling first one.

    Args:
        points: by name, a number of which more is better and one of which less is better. Those that lack one are left out.
    """
    known = {name: (more, -less) for name, (more, less) in points.items() if more is not None and less is not None}
    return [
        name
        for name in sorted(known, key=lambda name: known[name], reverse=True)
        if not any(
            other != known[name] and all(a >= b for a, b in zip(other, known[name], strict=True)) for other in known.values()
        )
    ]


def _figures(trial: FrozenTrial) -> Mapping[str, float]:
    found: Mapping[str, float] = trial.user_attrs.get(FIGURES, {})
    return found
