"""Choice by a trial of the parameters that several drafters share: stop rules, n-grams, and trees of trained heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import optuna

from layerskip import SpeculativeConfig, StopRule
from searches.space.choices import LEAST_PROBABILITY, Choices, Params, Range


def suggest_stop(trial: optuna.trial.BaseTrial, prefix: str, stops: Sequence[str]) -> StopRule:
    """Return a trial's stop rule."""
    kind = str(trial.suggest_categorical(f"{prefix}_stop", tuple(stops)))
    if kind == "length":
        return StopRule()
    # Optuna's steps add up to 0.7000000000000001, which would be another rule than the 0.7 of scans.
    return StopRule(kind, round(trial.suggest_float(f"{prefix}_threshold", 0.1, 0.9, step=0.05), 9))


def stop_params(stop: StopRule, prefix: str) -> Params:
    """Return the choices that lead to a stop rule."""
    found: Params = {f"{prefix}_stop": stop.kind}
    if stop.kind != "length":
        found[f"{prefix}_threshold"] = stop.threshold
    return found


def suggest_ngram(choices: Choices, trial: optuna.trial.BaseTrial, prefix: str) -> tuple[int, int]:
    """Return a trial's shortest and longest n-gram."""
    longest = trial.suggest_int(f"{prefix}ngram_max", *choices.ngram)
    # One name per upper end: samplers cannot use a distribution whose bounds move.
    shortest = trial.suggest_int(f"{prefix}ngram_min_of_{longest}", choices.ngram[0], longest)
    return shortest, longest


def ngram_params(config: SpeculativeConfig, prefix: str) -> Params:
    """Return the choices that lead to a configuration's n-grams."""
    return {f"{prefix}ngram_max": config.ngram_max, f"{prefix}ngram_min_of_{config.ngram_max}": config.ngram_min}


def widest(choices: Choices) -> Range:
    """Return the range of a tree's width; 1 would be a chain."""
    return max(2, choices.candidates[0]), max(2, choices.candidates[1])


def suggest_head_tree(choices: Choices, trial: optuna.trial.BaseTrial, config: SpeculativeConfig) -> SpeculativeConfig:
    """Return the configuration with a trial's size of trees and least probability of branches."""
    return replace(
        config,
        tree_tokens=trial.suggest_int(f"{config.kind}_tokens", *choices.tree_tokens),
        least_probability=trial.suggest_float(f"{config.kind}_probability", *LEAST_PROBABILITY, log=True),
    )


def head_tree_params(config: SpeculativeConfig) -> Params:
    """Return the choices that lead to a configuration's trees."""
    return {f"{config.kind}_tokens": config.tree_tokens, f"{config.kind}_probability": config.least_probability}
