"""Choice of an EAGLE head by a trial, and of chains or trees."""

from __future__ import annotations

from dataclasses import replace

import optuna

from layerskip import SpeculativeConfig, StopRule
from searches.space.choices import Choices, Params, clip
from searches.space.registry import SearchedKind, register
from searches.space.shared_parameters import head_tree_params, stop_params, suggest_head_tree, suggest_stop, widest


def suggest(choices: Choices, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
    """Return a trial's drafts; chains where the target cannot verify trees."""
    head = str(trial.suggest_categorical("eagle_head", tuple(choices.eagle_heads)))
    length = trial.suggest_int("eagle_length", *choices.model_length)
    chain = SpeculativeConfig("eagle", length, head=head, candidates=1)
    width = trial.suggest_int("eagle_candidates", *widest(choices)) if choices.trees else 1
    if width == 1 or not trial.suggest_int("eagle_tree", 0, 1):
        return replace(chain, stop=suggest_stop(trial, "eagle", choices.stops))
    return suggest_head_tree(choices, trial, replace(chain, candidates=width))


def params(choices: Choices, config: SpeculativeConfig) -> Params:
    """Return the choices that lead to an EAGLE head's drafts."""
    tree = config.candidates > 1
    found: Params = {"eagle_head": config.head, "eagle_length": config.draft_length}
    if choices.trees:
        found |= {"eagle_candidates": max(config.candidates, widest(choices)[0]), "eagle_tree": int(tree)}
    return found | (head_tree_params(config) if tree else stop_params(config.stop, "eagle"))


def _starts(choices: Choices) -> list[SpeculativeConfig]:
    depth, width, size = clip((3, choices.model_length), (4, choices.candidates), (8, choices.tree_tokens))
    trees = [
        SpeculativeConfig("eagle", depth, head=head, candidates=max(2, width), tree_tokens=size)
        for head in choices.eagle_heads
        if choices.trees
    ]
    # Tokens after one that the head was unsure of are seldom accepted.
    stop = StopRule("threshold", 0.5) if "threshold" in choices.stops else StopRule(choices.stops[0])
    (length,) = clip((5, choices.model_length))
    chains = [SpeculativeConfig("eagle", length, candidates=1, head=head, stop=stop) for head in choices.eagle_heads]
    return [*trees, *chains]


register(SearchedKind("eagle", suggest, params, _starts, available=lambda choices: bool(choices.eagle_heads)))
