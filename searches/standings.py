"""Who leads? Every configuration's replicates pooled, however many trials measured it.

A sampler repeats itself and an incumbent is measured again, so one lucky trial must not decide: speedups are ratios of all
tokens and seconds that were ever measured with a configuration, hopeless and flagged rounds included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from layerskip import SpeculativeConfig

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass
class Standing:
    """What is known of one configuration.

    Args:
        config: the configuration.
        complete: trials that measured it to the end.
        prompts: decodings of a prompt, in all its trials.
        lossless: whether every one of them kept the output.
        last: the number of the trial that measured it last.
    """

    config: SpeculativeConfig
    complete: int = 0
    prompts: int = 0
    lossless: bool = True
    last: int = -1
    _tokens: float = 0.0
    _seconds: float = 0.0
    _baseline_seconds: float = 0.0

    @property
    def speedup(self) -> float:
        """Pooled speedup over plain decoding; 1.0 where nothing was decoded."""
        return self._baseline_seconds / self._seconds if self._seconds else 1.0

    def add(self, table: Mapping[str, list[Any]]) -> None:
        """Pool a measurement's rows, as :meth:`layerskip.Measurement.table` gives them."""
        columns = ("tokens_per_second", "decode_seconds", "baseline_tokens_per_second")
        for rate, seconds, baseline in zip(*(table[name] for name in columns), strict=True):
            self.prompts += 1
            if rate and baseline:
                self._seconds += seconds
                # what plain decoding would have taken for the same tokens, at the pace of the same pair
                self._baseline_seconds += rate * seconds / baseline


def configuration(trial: FrozenTrial) -> SpeculativeConfig:
    """The configuration that a finished trial was about."""
    return SpeculativeConfig.from_dict(trial.user_attrs["config"])


def is_lossless(measurement: Mapping[str, Any]) -> bool:
    """Whether a measurement's outputs were the baseline's, near-ties in half precision included."""
    return measurement["losslessness"]["verdict"] in ("exact", "near_tie")


def standings(trials: Iterable[FrozenTrial]) -> dict[SpeculativeConfig, Standing]:
    """Every configuration that was measured at all."""
    found: dict[SpeculativeConfig, Standing] = {}
    for trial in trials:
        if trial.state not in FINISHED or "table" not in trial.user_attrs:
            continue
        config = configuration(trial)
        standing = found.setdefault(config, Standing(config))
        standing.add(trial.user_attrs["table"])
        standing.complete += trial.state == TrialState.COMPLETE
        standing.lossless &= is_lossless(trial.user_attrs["measurement"])
        standing.last = max(standing.last, trial.number)
    return found


def ranking(study: optuna.Study) -> list[Standing]:
    """Configurations that drafted, kept the output and were measured to the end at least once, best first."""
    found = standings(study.get_trials(deepcopy=False, states=FINISHED))
    chosen = [s for s in found.values() if s.complete and s.lossless and s.config.kind != "none"]
    return sorted(chosen, key=lambda standing: -standing.speedup)


def incumbent(study: optuna.Study) -> float:
    """The speedup to beat: the leader's, and plain decoding's own at least."""
    return max([1.0, *(standing.speedup for standing in ranking(study)[:1])])
