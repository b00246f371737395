"""Race of search strategies for fast skip masks, under one budget of seconds.

Usage: ``python -m searches.evaluate.race [bench=simulated] [field=value]``

Every strategy of :mod:`searches.evaluate.strategies` searches on the same target with the same budget of seconds, once per
seed. Their claims are then measured on held-out prompts side by side. The plot shows held-out speedup against seconds spent.
``bench=simulated`` races on simulated decoders, whose speedups are known.

The same command resumes: finished searches and measurements are kept until the program changes. The exit code is 4 if ours
needed more than ``most_share`` of another strategy's seconds to reach its final speedup.
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
from searches.app.application import NOT_CONFIRMED, run
from searches.app.checks import InputError, check_list, check_number, check_seed
from searches.app.record_header import program_sources
from searches.app.resume_log import ResultLog
from searches.evaluate.race_problems import ModelProblem, RaceProblem, SimulatedProblem
from searches.evaluate.strategies import STRATEGIES, TimeUp

_OURS = "ours"
_PROBLEMS: dict[str, Callable[[DictConfig], RaceProblem]] = {"model": ModelProblem, "simulated": SimulatedProblem}


def race_strategies(config: DictConfig) -> dict[str, Any]:
    """Race strategies and return the record. See ``conf/race.yaml``."""
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
                f"strategies: most_share compares {_OURS} with others, so both are needed; most_share=null disables it"
            )
    if config.bench not in _PROBLEMS:
        raise InputError(f"bench: {config.bench!r} is not one of {', '.join(_PROBLEMS)}")
    problem: RaceProblem = _PROBLEMS[config.bench](config)
    folder = Path(config.outputs) / f"race-{digest([problem.identity(), config.seconds, program_sources()])[:12]}"
    log = ResultLog(folder / "searches.jsonl")
    races = {f"{name} {seed}": (name, seed) for seed in config.seeds for name in names}
    with tqdm(races.items(), unit="search", disable=None) as bar:
        for key, (name, seed) in bar:
            bar.set_description(f"{name}, seed {seed}")
            if key not in log:
                log.add(key, _search(problem, name, seed))
    curves = {key: _thinned(log[key]["claims"], problem.most_claims) for key in races}
    claims = {key: [claimed for _, claimed in curve] for key, curve in curves.items()}
    seeds = {key: seed for key, (_, seed) in races.items()}
    speedups = problem.speedups(claims, seeds, ResultLog(folder / "held-out.jsonl"))
    record = problem.record_header() | {
        "seconds": config.seconds,
        "scan": OmegaConf.to_container(config.scan),
        "searches": [
            {
                "strategy": name,
                "seed": seed,
                "measured": log[key]["measured"],
                "spent": log[key]["spent"],
                "curve": [
                    {"seconds": when, "config": claimed, "held_out_speedup": speedup}
                    for (when, claimed), speedup in zip(curves[key], speedups[key], strict=True)
                ],
            }
            for key, (name, seed) in races.items()
        ],
    }
    record["verdict"] = verdict(record["searches"], config.seconds)
    path = Path(config.record or Path(config.outputs) / "race.json")
    write_json(path, record)
    draw(record, path.with_suffix(".png"))
    print(table(record))
    print(f"wrote {path} and {path.with_suffix('.png')}")
    shares = [row["share_of_its_seconds"] for row in record["verdict"]]
    if most is not None and not (shares and all(share is not None and share <= most for share in shares)):
        print(f"MISSED: ours as fast as every other within {most:.0%} of its seconds ({len(shares)} searches compared)")
        sys.exit(NOT_CONFIRMED)
    return record


def _search(problem: RaceProblem, name: str, seed: int) -> dict[str, Any]:
    """Run one strategy with one seed."""
    with problem.race(seed) as race:
        with suppress(TimeUp):
            STRATEGIES[name](race)
        claims = [[when, claimed.to_dict()] for when, claimed in race.claims]
        return {"claims": claims, "measured": race.measured, "spent": race.spent}


def _thinned(claims: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` claims: the first, the last and evenly spaced ones in between."""
    places: Any = np.unique(np.linspace(0, len(claims) - 1, most).round().astype(int)) if claims else []
    return [claims[place] for place in places]


def verdict(searches: Sequence[Mapping[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return when ours reached the final held-out speedup of every other search with the same seed.

    Args:
        searches: the searches of a record.
        seconds: budget of a search.

    Returns:
        One row per other search that claimed something. ``share_of_its_seconds`` is relative to the time of the other
        search, at most the budget; None if ours never reached its speedup.
    """
    own = {search["seed"]: search["curve"] for search in searches if search["strategy"] == _OURS}
    rows = []
    for search in searches:
        if search["strategy"] == _OURS or search["seed"] not in own or not search["curve"]:
            continue
        final = search["curve"][-1]["held_out_speedup"]
        reached = [point["seconds"] for point in own[search["seed"]] if point["held_out_speedup"] >= final]
        share = min(reached) / min(search["spent"], seconds) if reached else None
        rows.append(
            {
                "strategy": search["strategy"],
                "seed": search["seed"],
                "held_out_speedup": final,
                "share_of_its_seconds": share,
            }
        )
    return rows


def table(record: Mapping[str, Any]) -> str:
    """Return a record as a Markdown table."""
    lines = ["| strategy | seed | measured | final held-out speedup | ours reached it in |", "|---|---|---|---|---|"]
    shares = {(row["strategy"], row["seed"]): row["share_of_its_seconds"] for row in record["verdict"]}
    for search in record["searches"]:
        key = search["strategy"], search["seed"]
        share = shares.get(key)
        reached = "" if key not in shares else "never" if share is None else f"{share:.1%} of its seconds"
        final = f"{search['curve'][-1]['held_out_speedup']:.3f}" if search["curve"] else "nothing claimed"
        lines.append(f"| {search['strategy']} | {search['seed']} | {search['measured']} | {final} | {reached} |")
    where, target = record["environment"], record["target"]
    conditions = f"{record['seconds']} s each, {record['date']}"
    lines += ["", f"{target['name']} in {target['dtype']} on {where['device_name']}, {conditions}."]
    return "\n".join(lines)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Save a plot of held-out speedup against seconds of search, one line per search."""
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
    axes.set(xscale="log", xlabel="seconds of search", ylabel="held-out speedup of the claim")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    run("race", race_strategies)
