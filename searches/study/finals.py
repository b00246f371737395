"""The finals: the best configurations of a search against plain decoding, on prompts that the search never saw.

All finalists are measured interleaved, prompt by prompt. Drafters that learn keep what they have learned. Speeds leave out
the prompts on which one decoding stalled, unless these are more than a tenth; outputs are compared on all.

A finalist is dropped when its paired interval lies wholly below the leader's speed; this is tested after every few prompts.
Measuring ends when all prompts were decoded and one finalist is left, when all that are left are significantly slower than
plain decoding, or when the repeats are used up. With ``measure.indifference`` it also ends once the winner is clear: faster
than plain decoding with the confidence of these repeated tests, and no other finalist more than that share faster. It ends
early if time runs out, after one block of prompts at least. A finalist that the engine cannot run is dropped, too.

Finalists tie with the fastest if they cannot be distinguished from it and seem about as fast. The simplest of them wins: no
model before a model, fewer skips, shorter drafts. A configuration beats plain decoding if the whole interval of its held-out
speedup lies above 1, at a confidence that gives 95 % for all finalists together (Bonferroni). If none does, plain decoding
wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna

from layerskip import Measurement, PromptSet, SpeculativeConfig, draft_plan
from layerskip.config import methods
from layerskip.export import attachment_digests
from layerskip.files import digest
from layerskip.measure.measurement import CONFIDENCE, MIN_RESAMPLED, check_output
from searches.backends.running_engine import request_metrics
from searches.results import ResultLog
from searches.study.bench import BASELINE, ModelBench, Row, logged_seconds, resumed_rows, stalled_rows, surviving_rows
from searches.study.leaderboard import LeaderboardEntry, contenders, drafters, is_lossless, leaderboard
from searches.study.objective import MeasureSettings
from searches.tracking.names import METRICS

_LOG = "finals-{}.jsonl"
_AFFORDABLE = "finalists_of_{}_trials"
"""User attribute of a study: how many configurations the finals after so many trials had time for."""
_BLOCK = 6  # prompts between two tests for slower finalists
_GROWTH = 1.25  # rows at the next test, as a multiple of those at the last one
_DROP_CONFIDENCE = 0.999  # well above the verdict's, as the test is repeated
_ENOUGH_PROMPTS = 16  # that finalists should be measured on
_OTHER_WORK = 1.2  # seconds of measuring, prefills and comparisons included, for each second of decoding
_SEED = 1_000_003  # which differs from the seeds of all trials
_RARE = 0.1  # share of rows that may be left out because of stalls
_TIE = 0.01  # share of speed that simplicity may cost; with few prompts, intervals alone would allow a tenth


@dataclass(frozen=True)
class Finalist:
    """A configuration and its results on held-out prompts."""

    config: SpeculativeConfig
    search_speedup: float  # pooled over its trials
    held_out: dict[str, Any]  # of :meth:`layerskip.Measurement.to_dict`; under ``metrics`` those of an engine
    low: float  # lower end of its interval, at a confidence that gives 95 % for all finalists together
    ties: bool = True  # whether it cannot be distinguished from the fastest and seems about as fast
    stayed: bool = True  # whether it was measured to the end

    @property
    def keeps_output(self) -> bool:
        return is_lossless(self.held_out)

    @property
    def eligible(self) -> bool:
        """True if the configuration may win: it kept the output and is significantly faster, on enough prompts."""
        enough = measured_prompts(self.held_out) >= MIN_RESAMPLED
        return self.stayed and self.keeps_output and enough and self.low > 1.0

    @property
    def complexity(self) -> tuple[int, int, int, int]:
        """Sort key that decides ties: the simplest comes first."""
        parts = self.config.members or (self.config,)
        return (
            max(methods()[part.method].rank for part in parts),
            len(parts),
            sum(len(layers) for part in parts for layers in draft_plan.sublayers(part.plan)),
            max(part.num_speculative_tokens for part in parts),
        )


@dataclass(frozen=True)
class Finals:
    """The results on held-out prompts."""

    finalists: tuple[Finalist, ...]  # fastest first
    baseline: dict[str, Any]  # metrics of plain decoding
    seconds: float  # that measuring took
    stalled: int = 0  # decodings that speeds leave out
    left_out: str = ""  # what was not measured because time ran out, as a sentence

    @property
    def winner(self) -> Finalist:
        """The simplest of the fastest eligible finalist and those that tie with it; else plain decoding."""
        eligible = [finalist for finalist in self.finalists if finalist.eligible]
        tied = [finalist for finalist in eligible[1:] if finalist.ties]
        plain = Finalist(SpeculativeConfig(), 1.0, self.baseline, 1.0)
        return min([*eligible[:1], *tied], key=lambda finalist: finalist.complexity, default=plain)


def measured_prompts(metrics: Mapping[str, Any]) -> int:
    """Return the number of prompts that a speedup rests on: those whose output goes on after the prefill's token."""
    return int(metrics["prompts"] - metrics.get("empty_prompts", 0))


@dataclass(frozen=True)
class RunControl:
    """What a long measurement leaves behind and ends by: the folder of the rows that an interrupted call resumes from, and
    the seconds that measuring may still take. ``on_prompt`` is called after each prompt.
    """

    folder: Path | None = None
    on_prompt: Callable[[], object] = lambda: None
    seconds_left: Callable[[], float] = lambda: math.inf


def measure_finals(
    study: optuna.Study,
    bench: ModelBench,
    prompts: PromptSet,
    settings: MeasureSettings,
    seed: int,
    control: RunControl = RunControl(),
) -> Finals:
    """Measure the contenders of a study by :func:`measure_held_out`; fewer of them if few seconds are left."""
    chosen, left_out = contenders(study, settings.finalists), ""
    name = _AFFORDABLE.format(len(leaderboard(study).trials))
    if name not in study.user_attrs:  # an interrupted call resumes with the same finalists
        study.set_user_attr(name, _affordable(chosen, control.seconds_left()))
    if (affordable := study.user_attrs[name]) < len(chosen):
        left_out = f"{affordable} of {len(chosen)} finalists were measured, because time was short."
        kinds = [drafters(entry.config) for entry in chosen]  # of each set of drafters, the first goes first
        chosen = sorted(chosen, key=lambda entry: kinds.index(drafters(entry.config)) != chosen.index(entry))[:affordable]
    expected = {entry.config: entry.speedup for entry in chosen}
    finals = measure_held_out(expected, bench, prompts, settings, seed, control)
    finals = replace(finals, left_out=" ".join(filter(None, (left_out, finals.left_out))))
    if control.folder is None:
        return finals
    # Finals of fewer trials, with other finalists, belong to the same search.
    logs = map(ResultLog, control.folder.glob(_LOG.format("*")))
    return replace(finals, seconds=sum(map(logged_seconds, logs)))


def measure_held_out(
    expected: Mapping[SpeculativeConfig, float],
    bench: ModelBench,
    prompts: PromptSet,
    settings: MeasureSettings,
    seed: int,
    control: RunControl = RunControl(),
) -> Finals:
    """Measure configurations on held-out prompts; those that are significantly slower than the leader are dropped.

    Args:
        expected: the speedup of each configuration in the search.
        prompts: with categories in turn, since the leader of the first category may not lead in all.

    Raises:
        PromptError: every output ends with its first token.
    """
    configs = {str(place): config for place, config in enumerate(expected)}
    identities = [[config.to_dict(), attachment_digests(config)] for config in expected]
    asked = [identities, prompts.digest, seed, bench.conditions]
    log = ResultLog(None if control.folder is None else control.folder / _LOG.format(digest(asked)[:12]))
    rows: list[Row] = []
    left, dropped, tested = dict(configs), set[str](), 0
    ended = is_clear = False
    for repeat in range(settings.held_out_repeats):
        measure = partial(surviving_rows, bench, left, seed=seed + _SEED + 7919 * repeat, without=dropped)
        measured = resumed_rows(measure, prompts, log, str(repeat))
        for number, item in enumerate(prompts, 1):
            is_logged = f"{repeat} {item.id}" in log
            if not is_logged and len(rows) >= min(_BLOCK, len(prompts)) and control.seconds_left() <= 0:
                ended = True
                break
            row = next(measured)
            left = {name: config for name, config in left.items() if name in row}  # without those that failed
            rows.append(row)
            control.on_prompt()
            is_last = number == len(prompts)  # another repeat may follow
            enough = len({row[BASELINE].prompt_id for row in rows}) >= 2 * _BLOCK
            if enough and (is_last or (number % _BLOCK == 0 and len(rows) >= _GROWTH * tested)):
                tested = len(rows)
                steady = _without_stalls(rows, settings.drift)
                leader = _leader(steady, left)
                dropped |= {name for name in left if name != leader and _is_slower(steady, leader, name)}
                left = {name: config for name, config in left.items() if name not in dropped}
                if settings.indifference is not None and _is_settled(steady, left, settings.indifference):
                    is_clear = True
                    break
        if ended or is_clear or _is_settled(_without_stalls(rows, settings.drift), left):
            break
    if rows:
        check_output((row[BASELINE] for row in rows), "held-out ")
    steady = _without_stalls(rows, settings.drift)
    baseline = _with_metrics(Measurement.of(steady, BASELINE, BASELINE))
    finalists = _judge_rows(steady, rows, configs, expected, left)
    left_out = f"Time ran out after {len(rows)} of {len(prompts) * settings.held_out_repeats} held-out decodings."
    return Finals(finalists, baseline, logged_seconds(log), len(rows) - len(steady), left_out if ended else "")


def _without_stalls(rows: list[Row], drift: float) -> list[Row]:
    """Return the rows in which no decoding stalled; all rows if stalls are frequent, since a decoder may cause these."""
    stalled = stalled_rows(rows, drift)
    if sum(stalled) > _RARE * len(rows):
        return rows
    return [row for row, is_stalled in zip(rows, stalled, strict=True) if not is_stalled]


def _judge_rows(
    steady: Sequence[Row],
    rows: Sequence[Row],
    configs: Mapping[str, SpeculativeConfig],
    expected: Mapping[SpeculativeConfig, float],
    left: Collection[str],
) -> tuple[Finalist, ...]:
    """Return the finalists, fastest first; speeds are of the ``steady`` rows, outputs of all ``rows``."""
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(configs))
    finalists = {}
    for name, config in configs.items():
        measured, compared = Measurement.of(steady, BASELINE, name), Measurement.of(rows, BASELINE, name).lossless
        low, _ = measured.interval(confidence=confidence)
        metrics = _with_metrics(measured) | {"losslessness": compared.to_dict()}
        finalists[name] = Finalist(config, expected[config], metrics, low, stayed=name in left)
    stayed = [name for name, finalist in finalists.items() if finalist.stayed]
    fastest = max(stayed, key=lambda name: (finalists[name].eligible, finalists[name].held_out["speedup"]), default=BASELINE)
    judged = [
        replace(finalist, ties=finalist.stayed and (name == fastest or _ties(steady, fastest, name)))
        for name, finalist in finalists.items()
    ]
    return tuple(sorted(judged, key=lambda finalist: (not finalist.stayed, -finalist.held_out["speedup"])))


def _with_metrics(measured: Measurement) -> dict[str, Any]:
    """Return the metrics of a measurement, and those of an engine's requests if it has any, plain decoding's as well."""
    metrics = request_metrics(measured)
    return measured.to_dict() | ({METRICS: metrics} if metrics else {})


def _leader(rows: Sequence[Row], configs: Mapping[str, SpeculativeConfig]) -> str:
    """Return the fastest of those that kept the output, or else of all."""
    measured = {name: Measurement.of(rows, BASELINE, name) for name in configs}
    return max(
        configs, key=lambda name: (measured[name].lossless.verdict != "different", measured[name].speedup), default=BASELINE
    )


def _is_settled(rows: Sequence[Row], left: Collection[str], indifference: float | None = None) -> bool:
    """Return whether more decodings would change nothing: all are slower than plain decoding, or one is faster and alone.

    With ``indifference`` others may be left that are not more than this share faster than it.
    """
    if all(_is_slower(rows, BASELINE, name) for name in left):
        return True
    leader = max(left, key=lambda name: Measurement.of(rows, BASELINE, name).speedup)
    if not _is_slower(rows, leader, BASELINE):
        return False
    others = [Measurement.of(rows, leader, name) for name in left if name != leader]
    return not others or (indifference is not None and all(each.interval()[1] <= 1 + indifference for each in others))


def _affordable(entries: Sequence[LeaderboardEntry], seconds: float) -> int:
    """Return how many configurations can be measured on enough prompts, at the speed of the search; one at least."""
    spent, count = 0.0, 0
    for entry in entries:
        each = list(entry.seconds.values()) or [(0.0, 0.0, 1)]  # no trial has decoded anything with it
        own, plain = (sum(times[i] / times[2] for times in each) / len(each) for i in (0, 1))
        spent += own + (0.0 if count else plain)
        if count and _OTHER_WORK * spent * _ENOUGH_PROMPTS > seconds:
            break
        count += 1
    return count


def _is_slower(rows: Sequence[Row], other: str, name: str) -> bool:
    return Measurement.of(rows, other, name).interval(confidence=_DROP_CONFIDENCE)[1] < 1.0


def _ties(rows: Sequence[Row], fastest: str, name: str) -> bool:
    measured = Measurement.of(rows, fastest, name)
    return measured.speedup >= 1 - _TIE and measured.interval()[1] >= 1.0
