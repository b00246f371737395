"""How a trial chooses the trees that a trained head drafts."""

from __future__ import annotations

from dataclasses import replace

import optuna

from layerskip import SpeculativeConfig
from searches.space.choices import LEAST_PROBABILITY, Choices, Params, Range


def widest(choices: Choices) -> Range:
    """The range of a tree's width; 1 would be a chain."""
    return max(2, choices.candidates[0]), max(2, choices.candidates[1])


def suggest_head_tree(choices: Choices, trial: optuna.trial.BaseTrial, config: SpeculativeConfig) -> SpeculativeConfig:
    """The configuration with a trial's size of trees and least probability of branches."""
    return replace(
        config,
        tree_tokens=trial.suggest_int(f"{config.kind}_tokens", *choices.tree_tokens),
        least_probability=trial.suggest_float(f"{config.kind}_probability", *LEAST_PROBABILITY, log=True),
    )


def head_tree_params(config: SpeculativeConfig) -> Params:
    """The choices that lead to a configuration's trees."""
    return {f"{config.kind}_tokens": config.tree_tokens, f"{config.kind}_probability": config.least_probability}
