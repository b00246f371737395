"""How a trial chooses the lengths of the n-grams that a drafter looks up."""

from __future__ import annotations

import optuna

from layerskip import SpeculativeConfig
from searches.space.choices import Choices, Params


def suggest_ngram(choices: Choices, trial: optuna.trial.BaseTrial, prefix: str) -> tuple[int, int]:
    """A trial's shortest and longest n-gram."""
    longest = trial.suggest_int(f"{prefix}ngram_max", *choices.ngram)
    # One name per upper end: samplers cannot use a distribution whose bounds move.
    shortest = trial.suggest_int(f"{prefix}ngram_min_of_{longest}", choices.ngram[0], longest)
    return shortest, longest


def ngram_params(config: SpeculativeConfig, prefix: str) -> Params:
    """The choices that lead to a configuration's n-grams."""
    return {f"{prefix}ngram_max": config.ngram_max, f"{prefix}ngram_min_of_{config.ngram_max}": config.ngram_min}
