"""How a trial chooses a stop rule."""

from __future__ import annotations

from collections.abc import Sequence

import optuna

from layerskip import StopRule
from searches.space.choices import Params


def suggest_stop(trial: optuna.trial.BaseTrial, prefix: str, stops: Sequence[str]) -> StopRule:
    """A trial's stop rule."""
    kind = str(trial.suggest_categorical(f"{prefix}_stop", tuple(stops)))
    if kind == "length":
        return StopRule()
    # Optuna's steps add up to 0.7000000000000001, which would be another rule than the 0.7 of scans.
    return StopRule(kind, round(trial.suggest_float(f"{prefix}_threshold", 0.1, 0.9, step=0.05), 9))


def stop_params(stop: StopRule, prefix: str) -> Params:
    """The choices that lead to a stop rule."""
    found: Params = {f"{prefix}_stop": stop.kind}
    if stop.kind != "length":
        found[f"{prefix}_threshold"] = stop.threshold
    return found
