"""Race of search strategies for fast skip masks, under one budget of seconds.

Published strategies and ours search on the same target with the same budget, once per seed. They share everything except the
search itself. What they claim, the configuration that they would export at a time, is then measured on held-out prompts side
by side.

The same command resumes: finished searches and measurements are kept until the program changes. The exit code is 4 if ours
needed more than ``max_share`` of another strategy's seconds to reach its final speedup.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import optuna
from omegaconf import DictConfig, OmegaConf
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import create_trial
from tqdm import tqdm

from layerskip import Measurement, SkipMask, SpeculativeConfig, StopRule
from layerskip.files import digest
from layerskip.models.environment import machine
from searches.app.application import run
from searches.app.checks import InputError, check_list, check_number, check_seed
from searches.evaluate.criteria import Count, Parts, conclude
from searches.predict.predictor import Prediction
from searches.predict.preparation import Preparation
from searches.predict.proposals import propose
from searches.predict.scan_predictor import SCREENED_ROWS
from searches.results import RESULTS_VERSION, ResultLog, record_header
from searches.study.bench import BASELINE
from searches.study.gaussian_process import GaussianProcess
from searches.study.plan import drop_unsupported

_OURS, _CANDIDATE = "ours", "candidate"
_SUBLAYERS = ("attention", "mlp")
_HELD_OUT_SEED = 1_000_003
# SWIFT: share of sub-layers that a mask skips, masks between two Bayesian steps, and masks in all.
_SKIP_RATIO, _BAYESIAN_EVERY, _MAX_MASKS = 0.45, 25, 1000

T = TypeVar("T")
Screen = Callable[[Sequence[SkipMask]], Sequence[float]]
"""Returns the acceptance rate of the first drafted token of each mask."""


class TimeUp(Exception):
    """A strategy's budget that is spent."""


@dataclass
class Race:
    """State of one strategy in a race, which begins when it is made.

    Args:
        parts: what all strategies share.
        preparation: of this strategy's own continuations and profiles.
        seconds: budget; all time counts.
        seed: seed of the strategy.

    Attributes:
        claims: time and configuration of each claim.
        measured: number of measurements.
    """

    parts: Parts
    preparation: Preparation
    seconds: float
    seed: int
    clock: Callable[[], float] = monotonic
    claims: list[tuple[float, SpeculativeConfig]] = field(default_factory=list, init=False)
    measured: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.space, self._start, self._best = self.parts.space, self.clock(), 0.0

    def propose(self) -> Sequence[Prediction]:
        """Prepare a predictor and return its proposals, best first. The best so far is claimed meanwhile."""
        parts, folder = self.parts, self.preparation.outputs / "scans"
        new_tokens, proposals = parts.measuring.max_new_tokens, parts.scanning.proposals
        own = self.preparation.predictor(parts.prompts, new_tokens, self.space, parts.scanning, folder, self.seed)
        return propose(_scannable(own), self.space, proposals, self.check_budget, on_best=self.claim)

    def screen(self) -> Screen:
        """Prepare only what screens masks."""
        new_tokens = self.parts.measuring.max_new_tokens
        scanner = _scannable(self.preparation.scanner(self.parts.prompts, new_tokens, self.space, self.seed))
        sample = scanner.sample(SCREENED_ROWS)
        return lambda masks: [scan.agreement for scan in sample.scan(masks, depth=1)]

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._start

    def measure(self, config: SpeculativeConfig) -> float:
        """Return the measured speedup of a configuration over plain decoding, and claim it if it is the best so far.

        Raises:
            TimeUp: the budget is spent; a measurement that exceeds it does not count.
        """
        rows = []
        for row in self.parts.bench.compare({_CANDIDATE: config}, self.parts.prompts, 1, self.seed + self.measured):
            rows.append(row)
            self.check_budget()
        self.measured += 1
        speedup = Measurement.of(rows, BASELINE, _CANDIDATE).speedup
        if speedup > self._best:
            self._best = speedup
            self.claim(config)
        return speedup

    def claim(self, config: SpeculativeConfig) -> None:
        """Record the configuration that would be exported from now on; raises :class:`TimeUp` like :meth:`measure`."""
        self.check_budget()
        self.claims.append((self.spent, config))

    def check_budget(self) -> None:
        """Raise :class:`TimeUp` if the budget is spent."""
        if self.spent > self.seconds:
            raise TimeUp

    def longest_draft(self, mask: SkipMask, stop: StopRule) -> SpeculativeConfig:
        """Return the configuration of a mask whose drafts only a stop rule ends."""
        _, length = self.space.values("layer_skip", "num_speculative_tokens")
        return SpeculativeConfig("layer_skip", length, mask=mask.format(), stop=stop)


def draft_verify(race: Race) -> None:
    """Search 2L numbers with a Gaussian process and a cut at one half, with the adaptive stop threshold.

    Source: Draft & Verify, arXiv 2309.08168, section 3.2.
    """
    study = optuna.create_study(direction="maximize", sampler=GaussianProcess(n_startup_trials=10, seed=race.seed))
    layers = range(race.space.layers)
    while True:
        trial = study.ask()
        flags = [[trial.suggest_float(f"{method}_{i}", 0.0, 1.0) > 0.5 for i in layers] for method in _SUBLAYERS]
        mask = SkipMask(*map(tuple, flags))
        study.tell(trial, race.measure(race.longest_draft(mask, StopRule("adaptive", 0.6))))


def swift(race: Race) -> None:
    """Score masks with a fixed skip ratio by their first drafted token, and claim the best one.

    Masks are random, except that a Gaussian process proposes every 25th. The strategy ends after 1000 masks.

    Source: SWIFT, arXiv 2410.06916, section 4.2.
    """
    agreements = race.screen()
    source, layers = random.Random(race.seed), race.space.layers
    parts = {f"{method}_{layer}": (method, layer) for method in _SUBLAYERS for layer in race.space.skippable}
    count = min(len(parts), round(_SKIP_RATIO * 2 * layers))
    study = optuna.create_study(direction="maximize", sampler=GaussianProcess(n_startup_trials=1, seed=race.seed))
    ranges: dict[str, BaseDistribution] = {name: FloatDistribution(0.0, 1.0) for name in parts}
    best = -1.0
    for turn in range(1, _MAX_MASKS + 1):
        race.check_budget()
        trial = study.ask(ranges) if turn % _BAYESIAN_EVERY == 0 else None
        order = (
            source.sample(list(parts), len(parts)) if trial is None else sorted(parts, key=lambda name: -trial.params[name])
        )
        skipped = [parts[name] for name in order[:count]]
        mask = SkipMask.of(layers, *({layer for method, layer in skipped if method == which} for which in _SUBLAYERS))
        (score,) = agreements([mask])
        if trial is not None:
            study.tell(trial, score)
        else:
            values = {name: float(part in skipped) for name, part in parts.items()}
            study.add_trial(create_trial(params=values, distributions=ranges, value=score))
        if score > best:
            best = score
            race.claim(race.longest_draft(mask, StopRule("threshold", 0.8)))


def ours(race: Race) -> None:
    """Scan masks, then measure the proposals.

    Claims the best screened mask so far, then the one with the best prediction, then the fastest measured one.
    """
    proposals = race.propose()
    race.claim(proposals[0].config)
    for prediction in proposals:
        race.measure(prediction.config)


STRATEGIES: dict[str, Callable[[Race], None]] = {"draft_verify": draft_verify, "swift": swift, _OURS: ours}
"""Functions that search until they are finished or their race raises :class:`TimeUp`."""


def race_strategies(config: DictConfig) -> None:
    """Race strategies and write the record. See ``conf/race.yaml``."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    _check(config)
    parts = Parts(config)
    parts.space = drop_unsupported(parts.space, parts.target)
    settings = [OmegaConf.to_container(config[part], resolve=True) for part in ("measure", "scan", "sampling", "space")]
    identity: list[Any] = [parts.target.digest, parts.prompts.digest, parts.held_out.digest, settings, machine(parts.target)]
    identity += [config.seconds, RESULTS_VERSION]
    log = ResultLog(Path(config.outputs) / f"race-{digest(identity)[:12]}.jsonl")
    keys = [(seed, name) for seed in config.seeds for name in config.strategies]
    for seed, name in tqdm(keys, unit="search", disable=None):
        if f"{name} {seed}" not in log:
            log.add(f"{name} {seed}", _search(parts, STRATEGIES[name], config.seconds, seed))
    searches = []
    for seed, name in keys:
        found = log[f"{name} {seed}"]
        curve = [
            {"seconds": when, "config": fields, "held_out_speedup": _held_out_speedup(fields, parts, log)}
            for when, fields in _thinned(found["claims"])
        ]
        whole = {"strategy": name, "seed": seed, "measured": found["measured"], "spent": found["spent"]}
        searches.append(whole | {"curve": curve})
    rows = verdict(searches, config.seconds)
    scanned = len(parts.prompts)
    record = record_header("layerskip.compare/2", parts.target) | {
        "prompts": {"tune": scanned, "scanned": scanned, "held_out": len(parts.held_out)},
        "max_new_tokens": parts.measuring.max_new_tokens,
        "seconds": config.seconds,
        "scan": OmegaConf.to_container(config.scan),
        "searches": searches,
        "verdict": rows,
    }
    conclude(config, "race.json", record, _counts(rows, config.max_share))


def _check(config: DictConfig) -> None:
    check_list("strategies", config.strategies, list(STRATEGIES), or_empty=False)
    check_list("seeds", config.seeds, or_empty=False)
    for seed in config.seeds:
        check_seed(seed)
    check_number("seconds", config.seconds)
    if config.max_share is not None:
        check_number("max_share", config.max_share, or_zero=True)
        if not {_OURS} < set(config.strategies):
            raise InputError(
                f"strategies: max_share compares {_OURS} with others, so both are needed; max_share=null disables it"
            )


def _search(parts: Parts, strategy: Callable[[Race], None], seconds: float, seed: int) -> dict[str, Any]:
    """Run one strategy and return its claims."""
    with tempfile.TemporaryDirectory(prefix="layerskip-race-", ignore_cleanup_errors=True) as folder:
        race = Race(parts, Preparation(parts.target, parts.sampling, Path(folder)), seconds, seed)
        with suppress(TimeUp):
            strategy(race)
        claims = [[when, claimed.to_dict()] for when, claimed in race.claims]
        return {"claims": claims, "measured": race.measured, "spent": race.spent}


def _scannable(scanner: T | None) -> T:
    if scanner is None:
        raise InputError("target: it cannot be scanned; leave swift and ours out of strategies")
    return scanner


def _thinned(claims: Sequence[Any]) -> list[Any]:
    return [claims[place] for place in sorted({0, (len(claims) - 1) // 2, len(claims) - 1})] if claims else []


def _held_out_speedup(fields: Mapping[str, Any], parts: Parts, log: ResultLog) -> float:
    name = f"held out {sorted(fields.items())}"
    if name not in log:
        configs = {_CANDIDATE: SpeculativeConfig.from_dict(fields)}
        rows = list(parts.bench.compare(configs, parts.held_out, 1, _HELD_OUT_SEED))
        log.add(name, Measurement.of(rows, BASELINE, _CANDIDATE).speedup)
    return float(log[name])


def verdict(searches: Sequence[Mapping[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return when ours reached the final held-out speedup of every other search with the same seed.

    Returns:
        One row per other search that claimed something. ``share_of_its_seconds`` is relative to the time of the other
        search, at most the budget; None if ours never reached its speedup.
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


def _counts(rows: Sequence[Mapping[str, Any]], maximum: float | None) -> list[Count]:
    """Return the share of every other search's seconds that ours needed; without another search, the criterion is missed."""
    counts = [] if rows or maximum is None else [Count("searches to compare with", 0, minimum=1)]
    for row in rows:
        share = row["share_of_its_seconds"]
        name = f"seconds of ours, of those of {row['strategy']} with seed {row['seed']} ({row['held_out_speedup']:.3f} x)"
        never = share is None
        counts.append(Count(f"{name}, never as fast" if never else name, 1.0 if never else share, maximum=maximum))
    return counts


if __name__ == "__main__":
    run("race", race_strategies)
