"""Optimistic bounds on speedups: a suggestion whose bound is below the leader's speedup is pruned without decoding.

There are two bounds, the cheaper one first: the speedup if every drafted token were accepted, from measured costs alone; and
the speedup that a scan of the mask predicts, widened by the errors of earlier predictions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import optuna

from layerskip import DraftPlan, SpeculativeConfig
from layerskip.config import methods
from searches.predict.mask_search import SpeedupPredictor
from searches.study.leaderboard import LeaderboardEntry, leaderboard

CANNOT_WIN = "cannot reach the best"
_FIRST_ERROR = 0.15
"""Log error that is assumed until enough predicted configurations were measured."""
_MIN_ERROR = 0.03
_MIN_CONFIGURATIONS = 4
_DEVIATIONS = 2.0


@dataclass(frozen=True)
class SpeedupBound:
    """The prediction for a suggestion, with its upper bound, prediction errors included, and the leader's speedup.

    There is no prediction if costs alone rule the suggestion out or its stop rule was not scanned.
    """

    predicted: float | None
    upper: float
    to_beat: float

    @property
    def reason(self) -> str:
        """Why the suggestion is pruned; empty if it can reach the leader."""
        if self.upper >= self.to_beat:
            return ""
        return f"{CANNOT_WIN}: at most {self.upper:.3f} x, the best has {self.to_beat:.3f} x"


@dataclass(frozen=True)
class BoundEstimator:
    """Estimator of the highest speedup of a suggestion."""

    predictor: SpeedupPredictor

    def estimate(self, study: optuna.Study, config: SpeculativeConfig) -> SpeedupBound | None:
        """Bound the speedup of a suggestion; return None if nothing is predicted for its drafter.

        The study's finished trials give the errors of earlier predictions and the speedup to beat. Prompts differ more than
        configurations do. Predictions are therefore compared with measurements on the same prompts, as far as trials decode
        them.
        """
        predictor = self.predictor
        predictable = predictor.can_predict(config)
        plan = DraftPlan.parse(config.plan, predictor.layers) if methods()[config.method].plan_field else None
        is_timed = plan is not None and not (config.draft_window or config.siblings) and predictor.profile.times(plan)
        if not predictable and not is_timed:
            return None
        board = leaderboard(study)
        to_beat = board.to_beat(predictor.prompts)
        error = calibrated_error(board.entries.values(), predictor.prompts, config.method)
        by_cost = math.inf if plan is None else predictor.profile.speedup_bound(plan)
        if by_cost * math.exp(error) < to_beat:
            return SpeedupBound(None, by_cost * math.exp(error), to_beat)
        if predictable:
            predicted = predictor.speedup(config)
            return SpeedupBound(predicted, min(by_cost, predicted) * math.exp(error), to_beat)
        # This draft length or stop rule was not scanned: assume a little more than the best that was.
        assert plan is not None  # the speedup of anything else is predicted
        (best,) = predictor.predict([plan])
        return SpeedupBound(None, min(by_cost, best.speedup) * math.exp(max(error, _FIRST_ERROR)), to_beat)


def calibrated_error(entries: Iterable[LeaderboardEntry], prompts: Collection[str], method: str) -> float:
    """Return how far a measured speedup may exceed its prediction, as a log ratio, by those on these prompts."""
    errors = [
        math.log(entry.speedup_on(prompts) / entry.predicted)
        for entry in entries
        if entry.predicted and entry.config.method == method and entry.seconds.keys() & prompts
    ]
    if len(errors) < _MIN_CONFIGURATIONS:
        return _FIRST_ERROR
    return max(_MIN_ERROR, float(np.mean(errors) + _DEVIATIONS * np.std(errors, ddof=1)))
