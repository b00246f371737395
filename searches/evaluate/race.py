"""Race of search strategies for fast skip masks, under one budget of seconds.

Published strategies and ours search on the same target with the same budget, once per seed. They share everything except the
search itself. What they claim, the configuration that they would export at a time, is then measured on held-out prompts. The
same command resumes. The exit code is 4 if ours needed more than ``max_share`` of another strategy's seconds to reach its
final speedup.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import optuna
from omegaconf import DictConfig
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import GPSampler

from layerskip import DraftPlan, Measurement, PromptSet, SpeculativeConfig, StopRule
from layerskip.files import digest
from searches.app.application import run
from searches.app.checks import InputError, check_list, check_number
from searches.backends.backend import BASELINE, CANDIDATE
from searches.evaluate.criteria import Count, Parts, check_fields, conclude, resume
from searches.predict.mask_search import SearchControl
from searches.predict.preparation import Preparation
from searches.predict.proposals import propose
from searches.predict.scan_predictor import SCREENED_ROWS
from searches.results import record_header
from searches.study.plan import drop_unsupported

_OURS = "ours"
_SUBLAYERS = ("attention", "mlp")
_HELD_OUT_SEED = 1_000_003
# SWIFT: share of sub-layers that a mask skips, masks between two Bayesian steps, and masks in all.
_SKIP_RATIO, _BAYESIAN_EVERY, _MAX_MASKS = 0.45, 25, 1000


class Race:
    """One strategy's search, whose time begins when it is made: its claims with their times, and its measurements.

    ``parts`` are what all strategies share; ``preparation`` makes this strategy's own continuations and profiles.
    """

    def __init__(self, parts: Parts, preparation: Preparation, seconds: float, seed: int) -> None:
        self.parts, self.preparation, self.seconds, self.seed = parts, preparation, seconds, seed
        self.claims: list[tuple[float, SpeculativeConfig]] = []
        self.measured, self._best, self._start = 0, 0.0, monotonic()

    def spent(self) -> float:
        return monotonic() - self._start

    def is_over(self) -> bool:
        return self.spent() > self.seconds

    def claim(self, config: SpeculativeConfig) -> None:
        """Record the configuration that would be exported from now on, unless the budget is spent."""
        if not self.is_over():
            self.claims.append((self.spent(), config))

    def measure(self, config: SpeculativeConfig) -> float:
        """Return the measured speedup of a configuration over plain decoding, and claim it if it is the best so far."""
        speedup = _speedup(self.parts, config, self.parts.prompts, self.seed + self.measured)
        self.measured += 1
        if speedup > self._best:
            self._best = speedup
            self.claim(config)
        return speedup

    def longest_draft(self, mask: DraftPlan, stop: StopRule) -> SpeculativeConfig:
        """Return the configuration of a mask whose drafts only a stop rule ends."""
        _, length = self.parts.space.values("layer_skip", "num_speculative_tokens")
        return SpeculativeConfig("layer_skip", length, mask=mask.format(), stop=stop)


def _scannable(prepared: Any) -> Any:
    if prepared is None:
        raise InputError("target: it cannot be scanned; leave swift and ours out of strategies")
    return prepared


def draft_verify(race: Race) -> None:
    """Search 2L numbers with a Gaussian process and a cut at one half: Draft & Verify, arXiv 2309.08168, section 3.2."""
    study = optuna.create_study(direction="maximize", sampler=GPSampler(seed=race.seed))
    layers = range(race.parts.space.layers)
    while not race.is_over():
        trial = study.ask()
        flags = [[trial.suggest_float(f"{method}_{i}", 0.0, 1.0) > 0.5 for i in layers] for method in _SUBLAYERS]
        mask = DraftPlan(*map(tuple, flags))
        study.tell(trial, race.measure(race.longest_draft(mask, StopRule("adaptive", 0.6))))


def swift(race: Race) -> None:
    """Score masks with a fixed skip ratio by their first drafted token: SWIFT, arXiv 2410.06916, section 4.2.

    Masks are random, except that a Gaussian process proposes every 25th. The strategy ends after 1000 masks.
    """
    space, source = race.parts.space, random.Random(race.seed)
    scanner = race.preparation.scanner(race.parts.prompts, race.parts.measuring.max_new_tokens, space, race.seed)
    sample = _scannable(scanner).sample(SCREENED_ROWS)
    sublayers = [f"{method}_{layer}" for method in _SUBLAYERS for layer in space.skippable]
    ranges: dict[str, BaseDistribution] = dict.fromkeys(sublayers, FloatDistribution(0.0, 1.0))
    count = min(len(sublayers), round(_SKIP_RATIO * 2 * space.layers))
    study = optuna.create_study(direction="maximize", sampler=GPSampler(seed=race.seed, n_startup_trials=1))
    best = -1.0
    for turn in range(1, _MAX_MASKS + 1):
        if race.is_over():
            break
        if turn % _BAYESIAN_EVERY:
            drawn = source.sample(sublayers, count)
            study.enqueue_trial({name: float(name in drawn) for name in sublayers})
        trial = study.ask(ranges)
        chosen = sorted(sublayers, key=lambda name: -trial.params[name])[:count]
        flags = [[f"{method}_{layer}" in chosen for layer in range(space.layers)] for method in _SUBLAYERS]
        mask = DraftPlan(*map(tuple, flags))
        (scan,) = sample.scan([mask], depth=1)
        study.tell(trial, scan.agreement)
        if scan.agreement > best:
            best = scan.agreement
            race.claim(race.longest_draft(mask, StopRule("threshold", 0.8)))


def ours(race: Race) -> None:
    """Scan masks, then measure the proposals.

    Claims the best screened mask so far, then the one with the best prediction, then the fastest measured one.
    """
    parts, new_tokens, folder = race.parts, race.parts.measuring.max_new_tokens, race.preparation.outputs / "scans"
    own = race.preparation.predictor(parts.prompts, new_tokens, parts.space, parts.scanning, folder, race.seed)
    control = SearchControl(race.is_over, on_best=race.claim)
    proposals = propose(_scannable(own), parts.space, parts.scanning.proposals, control)
    race.claim(proposals[0].config)
    for prediction in proposals:
        if not race.is_over():
            race.measure(prediction.config)


STRATEGIES: dict[str, Callable[[Race], None]] = {"draft_verify": draft_verify, "swift": swift, _OURS: ours}


def race_strategies(config: DictConfig) -> None:
    """Race strategies and write the record. See ``conf/race.yaml``."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    check_list("strategies", config.strategies, list(STRATEGIES), or_empty=False)
    check_list("seeds", config.seeds, or_empty=False)
    check_fields(config, {"seeds": 0}, ("max_share",))
    check_number("seconds", config.seconds)
    if config.max_share is not None and not {_OURS} < set(config.strategies):
        raise InputError(f"strategies: max_share compares {_OURS} with others, so both are needed; null disables it")
    parts = Parts(config)
    parts.space = drop_unsupported(parts.space, parts.target)
    continued = partial(resume, config, "race", [*parts.identity, config.seconds])
    pairs = [(name, seed) for seed in config.seeds for name in config.strategies]
    jobs = {f"{name} {seed}": partial(_search, parts, name, seed, config.seconds) for name, seed in pairs}
    searches = list(continued(jobs, "search").values())
    points = [point for search in searches for point in search["curve"]]
    claimed = {digest(point["config"]): SpeculativeConfig.from_dict(point["config"]) for point in points}
    held_out = {name: partial(_speedup, parts, one, parts.held_out, _HELD_OUT_SEED) for name, one in claimed.items()}
    speedups = continued(held_out, "claim")
    for point in points:
        point["held_out_speedup"] = speedups[digest(point["config"])]
    rows, count = verdict(searches, config.seconds), len(parts.prompts)
    record = record_header("layerskip.compare/2", parts.target) | {
        "prompts": {"tune": count, "scanned": count, "held_out": len(parts.held_out)},
        "max_new_tokens": parts.measuring.max_new_tokens,
        "searches": searches,
        "verdict": rows,
    }
    conclude(config, "race.json", record, judge(rows, config.max_share))


def _search(parts: Parts, strategy: str, seed: int, seconds: float) -> dict[str, Any]:
    """Run one strategy; its curve is its first, middle and last claim."""
    with tempfile.TemporaryDirectory(prefix="layerskip-race-", ignore_cleanup_errors=True) as folder:
        race = Race(parts, Preparation(parts.target, parts.sampling, Path(folder)), seconds, seed)
        STRATEGIES[strategy](race)
        found = {"strategy": strategy, "seed": seed, "measured": race.measured, "spent": race.spent()}
    last = len(race.claims) - 1
    claims = [race.claims[place] for place in sorted({0, last // 2, last}) if race.claims]
    return found | {"curve": [{"seconds": when, "config": claimed.to_dict()} for when, claimed in claims]}


def _speedup(parts: Parts, config: SpeculativeConfig, prompts: PromptSet, seed: int) -> float:
    rows = parts.bench.compare({CANDIDATE: config}, prompts, 1, seed)
    return Measurement.of(rows, BASELINE, CANDIDATE).speedup


def verdict(searches: Sequence[Mapping[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return when ours reached the final held-out speedup of every other search with the same seed and a claim.

    ``share_of_its_seconds`` is relative to the time of that search, at most the budget; None if ours never reached it.
    """
    own = {search["seed"]: search["curve"] for search in searches if search["strategy"] == _OURS}
    rows = []
    for search in searches:
        name, seed, curve = search["strategy"], search["seed"], search["curve"]
        if name == _OURS or seed not in own or not curve:
            continue
        final = curve[-1]["held_out_speedup"]
        reached = [point["seconds"] for point in own[seed] if point["held_out_speedup"] >= final]
        share = min(reached) / min(search["spent"], seconds) if reached else None
        rows.append({"strategy": name, "seed": seed, "held_out_speedup": final, "share_of_its_seconds": share})
    return rows


def judge(rows: Sequence[Mapping[str, Any]], maximum: float | None) -> list[Count]:
    """Return a criterion for every row of a verdict; without a row, the only one is missed."""
    counts = [] if rows or maximum is None else [Count("searches to compare with", 0, minimum=1)]
    for row in rows:
        share, name = row["share_of_its_seconds"], f"{row['strategy']} with seed {row['seed']}"
        if share is None:
            counts.append(Count(f"ours was never as fast as {name}", 1, maximum=None if maximum is None else 0))
        else:
            counts.append(Count(f"seconds of ours, of those of {name}", share, maximum=maximum))
    return counts


if __name__ == "__main__":
    run("race", race_strategies)
