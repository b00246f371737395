"""Choice of Medusa heads and their trees by a trial."""

from __future__ import annotations

import optuna

from layerskip import SpeculativeConfig
from searches.space.choices import Choices, Params, clip
from searches.space.registry import SearchedKind, register
from searches.space.shared_parameters import head_tree_params, suggest_head_tree, widest


def suggest(choices: Choices, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
    """Return a trial's drafts of Medusa heads."""
    head = str(trial.suggest_categorical("medusa_head", tuple(choices.medusa_heads)))
    length = trial.suggest_int("medusa_length", *choices.model_length)
    width = trial.suggest_int("medusa_candidates", *widest(choices))
    return suggest_head_tree(choices, trial, SpeculativeConfig("medusa", length, head=head, candidates=width))


def params(choices: Choices, config: SpeculativeConfig) -> Params:
    """Return the choices that lead to drafts of Medusa heads."""
    found: Params = {"medusa_head": config.head, "medusa_length": config.draft_length}
    return found | {"medusa_candidates": max(config.candidates, widest(choices)[0])} | head_tree_params(config)


def _starts(choices: Choices) -> list[SpeculativeConfig]:
    depth, width, size = clip((2, choices.model_length), (4, choices.candidates), (6, choices.tree_tokens))
    return [
        SpeculativeConfig("medusa", depth, head=head, candidates=max(2, width), tree_tokens=size)
        for head in choices.medusa_heads
        if choices.trees
    ]


register(SearchedKind("medusa", suggest, params, _starts, available=lambda choices: bool(choices.medusa_heads)))
