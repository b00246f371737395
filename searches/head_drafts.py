"""How does a trial choose what a trained head drafts? The head, lengths, and chains or trees, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import optuna

from layerskip import SpeculativeConfig

from .skipping import LEAST_PROBABILITY, Params, stop_params, suggest_stop

if TYPE_CHECKING:
    from .space import SearchSpace


def suggest_head(space: SearchSpace, trial: optuna.trial.BaseTrial, kind: str) -> SpeculativeConfig:
    """A trial's drafts of ``eagle`` or ``medusa``; those of ``eagle`` are chains where no tree can be verified."""
    head = str(trial.suggest_categorical(f"{kind}_head", tuple(space.heads[kind])))
    chain = SpeculativeConfig(kind, trial.suggest_int(f"{kind}_length", *space.model_length), head=head, candidates=1)
    if kind == "eagle" and not space.trees:
        return replace(chain, stop=suggest_stop(trial, kind, space.stops))
    width = trial.suggest_int(f"{kind}_candidates", max(2, space.candidates[0]), max(2, space.candidates[1]))
    if kind == "eagle" and not trial.suggest_int("eagle_tree", 0, 1):
        return replace(chain, stop=suggest_stop(trial, kind, space.stops))
    return replace(
        chain,
        candidates=width,
        tree_tokens=trial.suggest_int(f"{kind}_tokens", *space.tree_tokens),
        least_probability=trial.suggest_float(f"{kind}_probability", *LEAST_PROBABILITY, log=True),
    )


def head_params(space: SearchSpace, config: SpeculativeConfig) -> Params:
    """The choices that lead to such drafts."""
    kind, tree = config.kind, config.candidates > 1
    found: Params = {f"{kind}_head": config.head, f"{kind}_length": config.draft_length}
    if kind == "medusa" or space.trees:
        found[f"{kind}_candidates"] = max(config.candidates, space.candidates[0], 2)
    if kind == "eagle":
        found |= ({"eagle_tree": int(tree)} if space.trees else {}) | ({} if tree else stop_params(config.stop, kind))
    if tree:
        found |= {f"{kind}_tokens": config.tree_tokens, f"{kind}_probability": config.least_probability}
    return found
