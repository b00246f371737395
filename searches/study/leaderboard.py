"""The leaderboard of a study: all measurements of a configuration pooled, however many trials made them.

Samplers repeat configurations, and the leader is measured again, so that one lucky trial does not decide. A speedup is a
ratio of seconds over all prompts that a configuration was measured on. Each prompt counts with the mean of its replicates,
pruned and drifted ones included, and weighs no more if it was decoded more often. Prompts differ more than configurations
do. Two configurations are therefore compared on the prompts that both decoded.
"""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from layerskip import SpeculativeConfig
from searches.tracking.names import ENGINE_FAILED, PREDICTED

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
_NEAR = 0.15  # share by which contenders with other drafters may be slower than the leader; few prompts rank roughly


@dataclass
class LeaderboardEntry:
    """All measurements of one configuration."""

    config: SpeculativeConfig
    complete: int = 0  # trials that measured it to the end
    lossless: bool = True  # whether all of them kept the output
    first: int = -1  # number of the first trial with this configuration
    last: int = -1  # number of the last trial with it, measured or not
    # By prompt, sums over the replicates: seconds of decoding, and of plain decoding at the speed of the same pairs; and the
    # number of replicates.
    seconds: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    failures: int = 0  # trials that the engine could not run
    predicted: float | None = None  # its speedup, by the prediction of a complete trial
    latest: FrozenTrial | None = field(default=None, compare=False)  # complete, and with a measurement

    @property
    def speedup(self) -> float:
        """Pooled speedup over plain decoding on all its prompts; 1.0 if nothing was decoded."""
        return self.speedup_on(self.seconds)

    def speedup_on(self, prompts: Collection[str]) -> float:
        """Return the pooled speedup on some prompts; 1.0 if none of them was decoded."""
        pooled = [seconds for prompt, seconds in self.seconds.items() if prompt in prompts]
        own, plain = (sum(seconds[i] / seconds[2] for seconds in pooled) for i in (0, 1))
        return plain / own if own else 1.0

    def over(self, other: LeaderboardEntry) -> float:
        common = self.seconds.keys() & other.seconds.keys()
        return self.speedup_on(common) / other.speedup_on(common)

    def add(self, table: Mapping[str, list[Any]]) -> None:
        """Pool the rows of a measurement, as :meth:`layerskip.Measurement.table` returns them."""
        columns = ("prompt_id", "tokens_per_second", "decode_seconds", "baseline_tokens_per_second")
        for prompt, rate, seconds, baseline in zip(*(table[name] for name in columns), strict=True):
            if rate and baseline:
                own, plain, replicates = self.seconds.get(prompt, (0.0, 0.0, 0))
                self.seconds[prompt] = own + seconds, plain + rate * seconds / baseline, replicates + 1


class Leaderboard:
    """The finished trials of a study, pooled by configuration. Each trial is read once, however many questions follow."""

    def __init__(self) -> None:
        self.trials: Sequence[FrozenTrial] = ()  # by number
        self.entries: dict[SpeculativeConfig, LeaderboardEntry] = {}
        # Those that draft, kept the output and were measured to the end at least once, fastest first.
        self.ranking: list[LeaderboardEntry] = []
        self.leader: LeaderboardEntry | None = None  # the fastest of these
        self._pooled: set[int] = set()

    @property
    def failures(self) -> int:
        return sum(entry.failures for entry in self.entries.values())

    def to_beat(self, prompts: Collection[str]) -> float:
        """Return the speedup to beat: the leader's, or 1.0 if plain decoding is faster.

        The leader's speedup is that on ``prompts``, if it decoded any of them, or else that on all its own. At most twice
        the lower end of its interval counts, because other programs may have disturbed its measurement.
        """
        if (leader := self.leader) is None:
            return 1.0
        low = leader.latest.user_attrs["measurement"]["speedup_low"] if leader.latest is not None else math.inf
        return max(1.0, min(2 * low, leader.speedup_on(leader.seconds.keys() & prompts or leader.seconds)))

    def update(self, trials: Sequence[FrozenTrial]) -> None:
        """Pool the trials that have finished since the last update, from all finished trials, by number."""
        if len(trials) == len(self._pooled):
            return
        self.trials = trials
        for trial in trials:
            if trial.number not in self._pooled:
                self._pool(trial)
        eligible = [
            entry for entry in self.entries.values() if entry.complete and entry.lossless and entry.config.method != "none"
        ]
        eligible.sort(key=lambda entry: entry.first)  # without a common prompt two tie
        self.ranking = sorted(eligible, key=functools.cmp_to_key(_compare), reverse=True)
        self.leader = next(iter(self.ranking), None)

    def _pool(self, trial: FrozenTrial) -> None:
        self._pooled.add(trial.number)
        config = configuration(trial)
        is_complete = trial.state == TrialState.COMPLETE
        entry = self.entries.setdefault(config, LeaderboardEntry(config, first=trial.number))
        entry.first, entry.last = min(entry.first, trial.number), max(entry.last, trial.number)
        entry.failures += str(trial.user_attrs.get("reason")).startswith(ENGINE_FAILED)
        if "table" in trial.user_attrs:
            entry.add(trial.user_attrs["table"])
            entry.lossless &= trial.user_attrs["measurement"]["losslessness"]["verdict"] != "different"
            if is_complete:
                entry.complete += 1
                if entry.latest is None or entry.latest.number < trial.number:
                    entry.latest = trial
                    entry.predicted = trial.user_attrs.get(PREDICTED) or entry.predicted


_LEADERBOARDS: weakref.WeakKeyDictionary[optuna.Study, Leaderboard] = weakref.WeakKeyDictionary()


def leaderboard(study: optuna.Study) -> Leaderboard:
    """Return the leaderboard of a study, which holds the trials that have finished so far."""
    board = _LEADERBOARDS.setdefault(study, Leaderboard())
    board.update(study.get_trials(deepcopy=False, states=FINISHED))
    return board


def leading(study: optuna.Study) -> FrozenTrial | None:
    """Return the latest whole measurement of the fastest configuration; None before there is one."""
    leader = leaderboard(study).leader
    return None if leader is None else leader.latest


def configuration(trial: FrozenTrial) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict(trial.user_attrs["config"])


def is_lossless(measurement: Mapping[str, Any]) -> bool:
    """Return whether the outputs of a measurement equal the baseline's, up to near-ties in half precision."""
    return measurement["losslessness"]["verdict"] in ("exact", "near_tie")


def contenders(study: optuna.Study, count: int) -> list[LeaderboardEntry]:
    """Return at most ``count`` configurations to measure on held-out prompts, fastest first, and perhaps one more.

    The best with each set of drafters comes in, if about as fast as the leader, and then the best of the others. A few
    prompts often rank five lookups of neighbouring lengths above a drafter whose speedup differs from prompt to prompt. One
    more is the first that the study tried with the leader's drafters, because the prompts did not select it.
    """
    ranked = leaderboard(study).ranking
    near = [entry.over(ranked[0]) >= 1 - _NEAR for entry in ranked]
    sets = [drafters(entry.config) for entry in ranked]
    is_best = [sets.index(own) == place for place, own in enumerate(sets)]
    wanted = [place for place in range(len(ranked)) if is_best[place] and near[place]]
    wanted += [place for place in range(len(ranked)) if place not in wanted]
    chosen = [ranked[place] for place in sorted(wanted[:count])]
    alike = [place for place, own in enumerate(sets) if own == sets[0]]
    default = min(alike, key=lambda place: ranked[place].first, default=0)
    if alike and near[default] and ranked[default] not in chosen:
        chosen.append(ranked[default])
    return chosen


def drafters(config: SpeculativeConfig) -> tuple[str, ...]:
    return config.method, *(member.method for member in config.members)


def _compare(one: LeaderboardEntry, other: LeaderboardEntry) -> int:
    speedup = one.over(other)
    return (speedup > 1) - (speedup < 1)


def trial_line(trial: FrozenTrial) -> str:
    """Return one line on a finished trial: its configuration and its speedup, or why it was not measured to the end."""
    outcome = trial.user_attrs.get("reason") or f"{trial.value or 1.0:.2f} x"
    return f"trial {trial.number}, {configuration(trial).label()}: {outcome}"


def leader_line(study: optuna.Study) -> str:
    if (leader := leading(study)) is None:
        return "no drafting"
    low, high = (leader.user_attrs["measurement"][name] for name in ("speedup_low", "speedup_high"))
    drafters = re.sub(r" \([^)]*\)", "", configuration(leader).label().removeprefix("cascade: "))
    return f"{drafters} (trial {leader.number}) {leader.value:.2f} x ({low:.2f} to {high:.2f})"
