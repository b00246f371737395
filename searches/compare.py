"""Which search finds a fast mask soonest? Strategies under one budget of seconds, judged on held-out prompts.

``python -m searches.compare`` lets each strategy of :mod:`searches.strategies` search on the same target, seed by seed, then
measures what they claimed, when they claimed it, on held-out prompts side by side, and draws best held-out speedup against
seconds spent. Finished searches are kept, and what was measured of their claims, four at a time; the same command goes on.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from hydra.utils import instantiate
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from layerskip import Measurement, PromptSet, Sampling, SpeculativeConfig, Target
from layerskip.environment import machine
from layerskip.files import digest, write_json
from layerskip.measurement import Sample

from .application import InputError, run
from .bench import BASELINE, ModelBench
from .foresight import ScanSettings, foresee
from .heading import heading
from .kept import Kept
from .objective import MeasureSettings
from .oracle import Oracle
from .plan import supported
from .space import SearchSpace
from .strategies import STRATEGIES, Race, TimeUp

_OURS = "ours"
_SHARED = ("measure", "scan", "sampling", "space")


def compare(config: DictConfig) -> dict[str, Any]:
    """Race strategies; see ``conf/compare.yaml``."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    names = list(config.strategies)
    for name in names:
        if name not in STRATEGIES:
            raise InputError(f"strategies: {name!r} is not one of {', '.join(STRATEGIES)}")
    measuring: MeasureSettings = instantiate(config.measure)
    sampling: Sampling = instantiate(config.sampling)
    tune, held_out = instantiate(config.prompts).split()
    prompts = tune.take(measuring.prompts)
    target: Target = instantiate(config.target)
    space = supported(instantiate(config.space, layers=target.layers), target)
    if space.bridged:
        raise InputError("space.bridges, space.draft_heads: this program skips emptily; searches.bridges has bridges")
    asked = {
        "target": target.digest,
        "prompts": [prompts.digest, held_out.digest],
        "parts": {part: OmegaConf.to_container(config[part], resolve=True) for part in _SHARED},
        "seconds": config.seconds,
        "machine": machine(target.device),
    }
    folder = Path(config.outputs) / f"compare-{digest(asked)[:12]}"
    bench = ModelBench(target, sampling, measuring.max_new_tokens)
    searched = Kept(folder / "searches.jsonl")
    runs = [(name, seed) for seed in config.seeds for name in names]
    for name, seed in tqdm(runs, unit="search", disable=None):
        if f"{name} {seed}" not in searched:
            searched.add(f"{name} {seed}", _search(config, target, prompts, sampling, bench, space, name, seed))
    curves = {f"{name} {seed}": searched[f"{name} {seed}"]["claims"] for name, seed in runs}
    prompts = held_out.take(measuring.held_out_prompts)
    speedups = _held_out(bench, curves, prompts, Kept(folder / "held-out.jsonl"), config.seeds[0])
    record = heading("layerskip.compare/1", target) | {
        "seconds": config.seconds,
        "prompts": {"tune": measuring.prompts, "held_out": len(prompts)},
        "max_new_tokens": measuring.max_new_tokens,
        "searches": [
            {
                "strategy": name,
                "seed": seed,
                "measured": searched[f"{name} {seed}"]["measured"],
                "spent": searched[f"{name} {seed}"]["spent"],
                "curve": [
                    {"seconds": when, "config": found, "held_out_speedup": speedups[_key(found)]}
                    for when, found in _thinned(curves[f"{name} {seed}"])
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
    return record


def _search(
    config: DictConfig,
    target: Target,
    prompts: PromptSet,
    sampling: Sampling,
    bench: ModelBench,
    space: SearchSpace,
    name: str,
    seed: int,
) -> dict[str, Any]:
    """One strategy with one seed, from nothing: continuations and profiles of earlier ones are not lent to it."""
    scanning: ScanSettings = instantiate(config.scan)
    nothing = Path(tempfile.mkdtemp(prefix="layerskip-compare-"))

    def oracle() -> Oracle:
        found = foresee(target, prompts, sampling, bench.max_new_tokens, space, scanning, nothing, nothing / "scans", seed)
        if found is None:
            raise InputError("target: it cannot be scanned; leave swift and ours out of strategies")
        return found

    race = Race(bench, prompts, target.layers, float(config.seconds), seed, space, oracle, proposals=scanning.proposals)
    try:
        STRATEGIES[name](race)
    except TimeUp:
        pass
    finally:
        shutil.rmtree(nothing, ignore_errors=True)
    return {
        "claims": [[when, found.to_dict()] for when, found in race.claims],
        "measured": race.measured,
        "spent": race.spent,
    }


def _thinned(claims: Sequence[Any], most: int = 3) -> list[Any]:
    """The first, the last, and some claims in between: each costs a measurement on held-out prompts."""
    places: Any = np.unique(np.linspace(0, len(claims) - 1, most).round().astype(int)) if claims else []
    return [claims[place] for place in places]


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _held_out(
    bench: ModelBench, curves: Mapping[str, Sequence[Any]], prompts: PromptSet, kept: Kept, seed: int
) -> dict[str, float]:
    """Speedup on held-out prompts of everything that was claimed, a few configurations at a time beside the baseline."""
    every = list(dict.fromkeys(_key(found) for claims in curves.values() for _, found in _thinned(claims)))
    missing = [key for key in every if key not in kept]
    for first in tqdm(range(0, len(missing), 4), unit="block", desc="held-out", disable=None):
        some = missing[first : first + 4]
        configs = {key: SpeculativeConfig.from_dict(json.loads(key)) for key in some}
        rows: list[Mapping[str, Sample]] = list(bench.compare(configs, prompts, 1, seed + 1_000_003))
        for key in some:
            kept.add(key, Measurement.of(rows, BASELINE, key).speedup)
    return {key: float(kept[key]) for key in every}


def verdict(searches: Sequence[Mapping[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """For every other search: when ours, with the same seed, had reached its final held-out speedup, and in what share of
    its seconds."""
    own = {search["seed"]: search["curve"] for search in searches if search["strategy"] == _OURS}
    found = []
    for search in searches:
        if search["strategy"] == _OURS or search["seed"] not in own or not search["curve"]:
            continue
        final = search["curve"][-1]["held_out_speedup"]
        reached = [point["seconds"] for point in own[search["seed"]] if point["held_out_speedup"] >= final]
        share = min(reached) / seconds if reached else None
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
