"""Choice of the trees of ``token_recycling`` by a trial."""

from __future__ import annotations

import optuna

from layerskip import SpeculativeConfig
from searches.space.choices import LEAST_PROBABILITY, Choices, Params, clip
from searches.space.registry import SearchedKind, register


def suggest(choices: Choices, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
    """Return a trial's token recycling."""
    return SpeculativeConfig(
        "token_recycling",
        trial.suggest_int("tree_length", *choices.tree_length),
        tree_tokens=trial.suggest_int("tree_tokens", *choices.tree_tokens),
        candidates=trial.suggest_int("candidates", *choices.candidates),
        least_probability=trial.suggest_float("least_probability", *LEAST_PROBABILITY, log=True),
    )


def params(choices: Choices, config: SpeculativeConfig) -> Params:
    """Return the choices that lead to a token recycling."""
    found: Params = {"tree_length": config.draft_length, "tree_tokens": config.tree_tokens}
    return found | {"candidates": config.candidates, "least_probability": config.least_probability}


def _starts(choices: Choices) -> list[SpeculativeConfig]:
    length, size, kept = clip((6, choices.tree_length), (8, choices.tree_tokens), (4, choices.candidates))
    return [SpeculativeConfig("token_recycling", length, tree_tokens=size, candidates=kept)]


register(SearchedKind("token_recycling", suggest, params, _starts))
