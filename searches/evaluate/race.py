"""Which search finds a fast mask soonest? Strategies under one budget of seconds, judged on held-out prompts.

``python -m searches.evaluate.race`` lets each strategy of :mod:`searches.evaluate.strategies` search on the same target, seed by seed, then
measures what they claimed, when they claimed it, on held-out prompts side by side, and draws best held-out speedup against
seconds spent. ``bench=simulated`` races on planted decoders instead, whose truth is known. Finished searches are kept, and
what was measured of their claims, a few at a time, as long as the program stays as it is; the same command goes on. It ends
with exit code 4 where ours took more than a set share of another's seconds to be as good.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from layerskip.files import digest, write_json
from searches.app.application import NOT_SHOWN, run
from searches.app.checks import InputError, check_list, check_number, check_seed
from searches.app.record_header import program_sources
from searches.app.resume_log import ResultLog
from searches.evaluate.race_problems import ModelProblem, PlantedProblem, RaceProblem
from searches.evaluate.strategies import STRATEGIES, TimeUp

_OURS = "ours"
_COURSES: dict[str, Callable[[DictConfig], RaceProblem]] = {"model": ModelProblem, "simulated": PlantedProblem}


def compare(config: DictConfig) -> dict[str, Any]:
    """Race strategies; see ``conf/compare.yaml``."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    check_list("strategies", config.strategies, list(STRATEGIES), or_empty=False)
    check_list("seeds", config.seeds, or_empty=False)
    for seed in config.seeds:
        check_seed(seed)
    check_number("seconds", config.seconds)
    names, most = list(config.strategies), config.most_share
    if most is not None:
        check_number("most_share", most, or_zero=True)
        if not {_OURS} < set(names):
            raise InputError(
                f"strategies: {_OURS} and another are what most_share compares; most_share=null asks for no bar"
            )
    if config.bench not in _COURSES:
        raise InputError(f"bench: {config.bench!r} is not one of {', '.join(_COURSES)}")
    course: RaceProblem = _COURSES[config.bench](config)
    folder = Path(config.outputs) / f"compare-{digest([course.asked(), config.seconds, program_sources()])[:12]}"
    searched = ResultLog(folder / "searches.jsonl")
    runs = [(name, seed) for seed in config.seeds for name in names]
    with tqdm(runs, unit="search", disable=None) as bar:
        for name, seed in bar:
            bar.set_description(f"{name}, seed {seed}")
            if f"{name} {seed}" not in searched:
                searched.add(f"{name} {seed}", _search(course, name, seed))
    curves = {f"{name} {seed}": _thinned(searched[f"{name} {seed}"]["claims"], course.most_claims) for name, seed in runs}
    claims = {name: [found for _, found in curve] for name, curve in curves.items()}
    seeds = {f"{name} {seed}": seed for name, seed in runs}
    speedups = course.speedups(claims, seeds, ResultLog(folder / "held-out.jsonl"))
    record = course.record_header() | {
        "seconds": config.seconds,
        "scan": OmegaConf.to_container(config.scan),
        "searches": [
            {
                "strategy": name,
                "seed": seed,
                "measured": searched[f"{name} {seed}"]["measured"],
                "spent": searched[f"{name} {seed}"]["spent"],
                "curve": [
                    {"seconds": when, "config": found, "held_out_speedup": speedup}
                    for (when, found), speedup in zip(curves[f"{name} {seed}"], speedups[f"{name} {seed}"], strict=True)
                ],
            }
            for name, seed in runs
        ],
    }
    record["verdict"] = verdict(record["searches"], config.seconds)
    path = Path(config.record or Path(config.outputs) / "compare.json")
    write_json(path, record)
    draw(record, path.with_suffix(".png"))
    print(table(record))
    print(f"wrote {path} and {path.with_suffix('.png')}")
    shares = [row["share_of_its_seconds"] for row in record["verdict"]]
    if most is not None and not (shares and all(share is not None and share <= most for share in shares)):
        compared = f"{len(shares)} of their searches claimed something"
        print(f"MISSED: ours as good as every other within {most:.0%} of its seconds ({compared})")
        sys.exit(NOT_SHOWN)
    return record


def _search(course: RaceProblem, name: str, seed: int) -> dict[str, Any]:
    """One strategy with one seed."""
    with course.race(seed) as race:
        with suppress(TimeUp):
            STRATEGIES[name](race)
        claims = [[when, found.to_dict()] for when, found in race.claims]
        return {"claims": claims, "measured": race.measured, "spent": race.spent}


def _thinned(claims: Sequence[Any], most: int) -> list[Any]:
    """The first, the last, and some claims in between."""
    places: Any = np.unique(np.linspace(0, len(claims) - 1, most).round().astype(int)) if claims else []
    return [claims[place] for place in places]


def verdict(searches: Sequence[Mapping[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """For every other search: when ours, with the same seed, had reached its final held-out speedup, and in what share of
    its seconds, which are fewer than the budget where it ended by itself."""
    own = {search["seed"]: search["curve"] for search in searches if search["strategy"] == _OURS}
    found = []
    for search in searches:
        if search["strategy"] == _OURS or search["seed"] not in own or not search["curve"]:
            continue
        final = search["curve"][-1]["held_out_speedup"]
        reached = [point["seconds"] for point in own[search["seed"]] if point["held_out_speedup"] >= final]
        share = min(reached) / min(search["spent"], seconds) if reached else None  # what it took beyond is not its budget's
        found.append(
            {
                "strategy": search["strategy"],
                "seed": search["seed"],
                "held_out_speedup": final,
                "share_of_its_seconds": share,
            }
        )
    return found


def table(record: Mapping[str, Any]) -> str:
    """A record as Markdown."""
    lines = ["| strategy | seed | measured | final held-out speedup | ours reached it in |", "|---|---|---|---|---|"]
    shares = {(row["strategy"], row["seed"]): row["share_of_its_seconds"] for row in record["verdict"]}
    for search in record["searches"]:
        own = search["strategy"], search["seed"]
        share = shares.get(own)
        said = "" if own not in shares else "never" if share is None else f"{share:.1%} of its seconds"
        final = f"{search['curve'][-1]['held_out_speedup']:.3f}" if search["curve"] else "nothing claimed"
        lines.append(f"| {search['strategy']} | {search['seed']} | {search['measured']} | {final} | {said} |")
    where, target = record["environment"], record["target"]
    conditions = f"{record['seconds']} s each, {record['date']}"
    lines += ["", f"{target['name']} in {target['dtype']} on {where['device_name']}, {conditions}."]
    return "\n".join(lines)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Save a picture: best held-out speedup against seconds spent, one line per search."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    colors = dict(zip(STRATEGIES, ("0.5", "tab:orange", "tab:green", "tab:purple", "tab:blue"), strict=True))
    labelled = set()
    for search in record["searches"]:
        curve, name = search["curve"], search["strategy"]
        if not curve:
            continue
        xs = [point["seconds"] for point in curve] + [record["seconds"]]
        ys = [point["held_out_speedup"] for point in curve]
        axes.step(xs, [*ys, ys[-1]], where="post", color=colors[name], label=None if name in labelled else name)
        labelled.add(name)
    axes.axhline(1.0, color="0.8", zorder=0, label="plain decoding")
    axes.set(xscale="log", xlabel="seconds of search", ylabel="held-out speedup of what is claimed")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    run("compare", compare)
