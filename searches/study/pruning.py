"""Is a suggestion worth decoding with? Not if even its optimistic bound cannot reach the incumbent.

Two bounds, the cheaper first: what the mask would reach if every drafted token were accepted, from measured costs alone; and
what its scan foretells, widened by how far foretelling has been off on the trials that were really measured.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from layerskip import SkipMask, SpeculativeConfig
from searches.predict.oracle import Oracle
from searches.study.leaderboard import configuration, incumbent, leaderboard
from searches.tracking.names import PREDICTED

HOPELESS = "cannot reach the best"
_FIRST_ERROR = 0.15
"""Log error assumed until enough configurations tell."""
_SIBLINGS = 0.15
"""Log speedup that siblings may add to a mask's best chain where no scan tells."""
_LEAST_ERROR = 0.03
_LEAST_CONFIGURATIONS = 4
_DEVIATIONS = 2.0


@dataclass(frozen=True)
class Judgement:
    """What is known of a suggestion before it is run.

    Args:
        predicted: its foretold speedup; None where costs alone already rule it out, or where its stop rule is not foretold.
        bound: what it may reach by all that is known, errors of foretelling allowed for.
        to_beat: the incumbent's speedup.
    """

    predicted: float | None
    bound: float
    to_beat: float

    @property
    def hopeless(self) -> bool:
        """Whether it cannot reach the incumbent."""
        return self.bound < self.to_beat

    def reason(self) -> str:
        """Why it is not run, in words."""
        return f"{HOPELESS}: at most {self.bound:.3f} x, the best has {self.to_beat:.3f} x"


class Prior:
    """Judges suggestions; says nothing of drafters that are not foretold.

    Args:
        oracle: foretells.
        others: foretell masks that are bridged or draft from few tokens.
    """

    def __init__(self, oracle: Oracle, others: Sequence[Oracle] = ()) -> None:
        self._oracles = (oracle, *others)

    def judge(self, study: optuna.Study, config: SpeculativeConfig) -> Judgement | None:
        """Bound a suggestion; None where nothing is foretold of its drafter.

        Prompts differ more than configurations do, so what is foretold is compared with what was measured on the same ones,
        as far as trials decode them.

        Args:
            study: its finished trials tell how far foretelling was off, and what is to be beaten.
            config: the suggestion.
        """
        oracle = next((oracle for oracle in self._oracles if oracle.knows(config)), None)
        foretold = oracle is not None and oracle.foretells(config)
        if oracle is None or not (foretold or config.kind == "layer_skip"):
            return None
        to_beat = incumbent(study, oracle.prompts)
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        error = calibrated_error(finished, oracle.prompts, config.kind)
        if config.kind != "layer_skip":
            predicted = oracle.speedup(config)
            return Judgement(predicted, predicted * math.exp(error), to_beat)
        mask = SkipMask.parse(config.mask, oracle.layers)
        most = oracle.profile.bound(mask, oracle.aids(mask))
        if most * math.exp(error) < to_beat or not config.lossless:  # a lossy rule may accept what no scan counts
            return Judgement(None, most * math.exp(error), to_beat)
        if foretold:
            predicted = oracle.speedup(config)
            return Judgement(predicted, min(most, predicted) * math.exp(error), to_beat)
        # Another draft length or stop rule than were scanned, or siblings: at most a little better than the best that was.
        (best,) = oracle.predict([mask])
        allowed = max(error, _FIRST_ERROR) + (_SIBLINGS if config.siblings else 0.0)
        return Judgement(None, min(most, best.speedup) * math.exp(allowed), to_beat)


def calibrated_error(trials: Iterable[FrozenTrial], prompts: Collection[str], kind: str) -> float:
    """How far, in log speedup, a measured configuration may lie above what was foretold of it, on the same prompts; one
    that decoded none of them tells nothing.

    What is known of other kinds does not count: a prompt lookup's rounds are known without a scan, and it runs no model.
    """
    trials = list(trials)
    foretold = {configuration(trial): trial.user_attrs[PREDICTED] for trial in trials if trial.user_attrs.get(PREDICTED)}
    measured, alike = leaderboard(trials), [config for config in foretold if config.kind == kind]
    decoded = [config for config in alike if measured[config].seconds.keys() & prompts]
    errors = [math.log(measured[config].speedup_on(prompts) / foretold[config]) for config in decoded]
    if len(errors) < _LEAST_CONFIGURATIONS:
        return _FIRST_ERROR
    return max(_LEAST_ERROR, float(np.mean(errors) + _DEVIATIONS * np.std(errors, ddof=1)))
