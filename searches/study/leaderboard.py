"""Who leads? Every configuration's replicates pooled, however many trials measured it.

A sampler repeats itself and an incumbent is measured again, so one lucky trial must not decide: speedups are ratios of
seconds over all prompts that were ever measured with a configuration, each at the mean of its replicates, hopeless and
flagged rounds included. Prompts differ more than configurations do, so two of them are compared on the prompts that both
decoded, and no prompt weighs more for having been decoded more often.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from layerskip import SpeculativeConfig

_OTHERS = 2  # contenders of other makes than the best few
_NEAR = 0.1  # they may be so much slower than the leader
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass
class LeaderboardEntry:
    """What is known of one configuration.

    Args:
        config: the configuration.
        complete: trials that measured it to the end.
        lossless: whether every one of them kept the output.
        first: the number of the first trial that was about it.
        last: that of the last trial that was about it, measured or not.
        seconds: by prompt: what decoding took, what plain decoding would have taken at the pace of the same pairs, both
            over all replicates, and how many these are.
    """

    config: SpeculativeConfig
    complete: int = 0
    lossless: bool = True
    first: int = -1
    last: int = -1
    seconds: dict[str, tuple[float, float, int]] = field(default_factory=dict)

    @property
    def keeps(self) -> bool:
        """Whether it kept the output, or never meant to, which only a search that was allowed to proposes."""
        return self.lossless or not self.config.lossless

    @property
    def speedup(self) -> float:
        """Pooled speedup over plain decoding on all its prompts; 1.0 where nothing was decoded."""
        return self.speedup_on(self.seconds)

    def speedup_on(self, prompts: Collection[str]) -> float:
        """Pooled speedup on some prompts; 1.0 where nothing of them was decoded."""
        found = [pooled for prompt, pooled in self.seconds.items() if prompt in prompts]
        own, plain = (sum(pooled[i] / pooled[2] for pooled in found) for i in (0, 1))
        return plain / own if own else 1.0

    def add(self, table: Mapping[str, list[Any]]) -> None:
        """Pool a measurement's rows, as :meth:`layerskip.Measurement.table` gives them."""
        columns = ("prompt_id", "tokens_per_second", "decode_seconds", "baseline_tokens_per_second")
        for prompt, rate, seconds, baseline in zip(*(table[name] for name in columns), strict=True):
            if rate and baseline:
                own, plain, times = self.seconds.get(prompt, (0.0, 0.0, 0))
                self.seconds[prompt] = own + seconds, plain + rate * seconds / baseline, times + 1


def configuration(trial: FrozenTrial) -> SpeculativeConfig:
    """The configuration that a finished trial was about."""
    return SpeculativeConfig.from_dict(trial.user_attrs["config"])


def is_lossless(measurement: Mapping[str, Any]) -> bool:
    """Whether a measurement's outputs were the baseline's, near-ties in half precision included."""
    return measurement["losslessness"]["verdict"] in ("exact", "near_tie")


def leaderboard(trials: Iterable[FrozenTrial]) -> dict[SpeculativeConfig, LeaderboardEntry]:
    """Every configuration that a finished trial was about."""
    found: dict[SpeculativeConfig, LeaderboardEntry] = {}
    for trial in trials:
        if trial.state not in FINISHED:
            continue
        config = configuration(trial)
        entry = found.setdefault(config, LeaderboardEntry(config, first=trial.number))
        entry.last = max(entry.last, trial.number)
        if "table" in trial.user_attrs:
            entry.add(trial.user_attrs["table"])
            entry.complete += trial.state == TrialState.COMPLETE
            entry.lossless &= is_lossless(trial.user_attrs["measurement"])
    return found


def ranking(study: optuna.Study) -> list[LeaderboardEntry]:
    """Configurations that drafted, kept the output and were measured to the end at least once, best first."""
    found = leaderboard(study.get_trials(deepcopy=False, states=FINISHED))
    chosen = [s for s in found.values() if s.complete and s.keeps and s.config.kind != "none"]
    return sorted(chosen, key=functools.cmp_to_key(_compare), reverse=True)


def contenders(study: optuna.Study, count: int) -> list[LeaderboardEntry]:
    """The best few, best first, and behind them, where about as fast, the best of other makes and the first of the leader's.

    A few prompts often rank five lookups of neighbouring lengths above a drafter whose worth differs from prompt to prompt,
    and five that were tuned on them above the settings that a study tries first, which these prompts did not choose.
    """
    ranked = ranking(study)
    chosen = ranked[:count]
    for entry in ranked[count:]:
        if len(chosen) < count + _OTHERS and _make(entry) not in map(_make, chosen) and _is_near(entry, ranked[0]):
            chosen.append(entry)
    usual = min((s for s in ranked if _make(s) == _make(ranked[0])), key=lambda entry: entry.first, default=None)
    if usual is not None and usual not in chosen and _is_near(usual, ranked[0]):
        chosen.append(usual)
    return chosen


def _make(entry: LeaderboardEntry) -> tuple[str, ...]:
    config = entry.config
    return config.kind, *(member.kind for member in config.members)


def _is_near(entry: LeaderboardEntry, leader: LeaderboardEntry) -> bool:
    common = entry.seconds.keys() & leader.seconds.keys()
    return entry.speedup_on(common) >= (1 - _NEAR) * leader.speedup_on(common)


def _compare(one: LeaderboardEntry, other: LeaderboardEntry) -> int:
    """Above 0 where the one is faster on the prompts that both decoded."""
    common = one.seconds.keys() & other.seconds.keys()
    mine, theirs = one.speedup_on(common), other.speedup_on(common)
    return (mine > theirs) - (mine < theirs)


def incumbent(study: optuna.Study, prompts: Collection[str] | None = None) -> float:
    """The speedup to beat: the leader's, on those of some prompts that it decoded, if any, or on all of its own, and plain
    decoding's at least."""
    leaders = ranking(study)[:1]
    return max([1.0, *(s.speedup_on(s.seconds.keys() & (prompts or ()) or s.seconds) for s in leaders)])
