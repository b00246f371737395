"""Tables of throughput and latency: of the finalists, and of the trials that none exceeds in both (the Pareto front)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from optuna.trial import FrozenTrial

from searches.study.finals import Finals
from searches.study.leaderboard import configuration, is_lossless
from searches.tracking.names import FIGURES

_SHOWN = ("throughput", "tpot_p50", "tpot_p95", "ttft_p50", "ttft_p95")
_HEADER = (
    "| configuration | tokens/s of the engine | s/token p50 | p95 | s to the first token p50 | p95 |",
    "|---|---|---|---|---|---|",
)


def levels(loads: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the ends of the names of the figures: one for each number of requests in flight, empty for a single one."""
    ends = {name.removeprefix(_SHOWN[0]) for load in loads for name in load if name.startswith(_SHOWN[0])}
    return sorted(ends, key=lambda end: (len(end), end))


def finals_load_tables(finals: Finals) -> list[str]:
    """Return a table of plain decoding and the finalists for each number of requests in flight; none without figures."""
    held_out = [("no drafting", finals.baseline), *((each.config.label(), each.held_out) for each in finals.finalists)]
    figures = [(label, found[FIGURES]) for label, found in held_out if FIGURES in found]
    lines = []
    for suffix in levels(found for _, found in figures):
        rows = [_row(label, _under(found, suffix)) for label, found in figures if _SHOWN[0] + suffix in found]
        lines += ["", f"## Throughput and latency{_requests(suffix)} (held-out prompts)", "", *_HEADER, *rows]
    return lines


def load_tables(trials: Sequence[FrozenTrial]) -> list[str]:
    """Return a table for each number of requests in flight; none if the back end does not report these figures.

    Args:
        trials: measured to the end.
    """
    figures = {trial.number: _figures(trial) for trial in trials if is_lossless(trial.user_attrs["measurement"])}
    lines = []
    for suffix in levels(figures.values()):
        under = {number: _under(found, suffix) for number, found in figures.items()}
        front = pareto_front({n: (each["throughput"], each["tpot_p50"]) for n, each in under.items()})
        header = [f"| trial {_HEADER[0]}", f"|---{_HEADER[1]}"]
        lines += ["", f"## Throughput and latency{_requests(suffix)} (Pareto front)", "", *header] if front else []
        for trial in (trial for number in front for trial in trials if trial.number == number):
            lines.append(f"| {trial.number} {_row(configuration(trial).label(), under[trial.number])}")
    return lines


def _requests(suffix: str) -> str:
    return f", {suffix.removeprefix('_at_')} requests in flight" if suffix else ""


def _under(figures: Mapping[str, float], suffix: str) -> dict[str, float | None]:
    """Return the shown figures under a number of requests in flight."""
    return {name: figures.get(name + suffix) for name in _SHOWN}


def _row(label: str, figures: Mapping[str, float | None]) -> str:
    cells = ["" if value is None else f"{value:.4g}" for value in figures.values()]
    return f"| {label} | {' | '.join(cells)} |"


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
