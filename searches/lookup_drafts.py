"""How does a trial choose what is looked up, in the text itself or in a datastore? N-grams, lengths and trees, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import optuna

from layerskip import SpeculativeConfig

from .skipping import LEAST_PROBABILITY, Params

if TYPE_CHECKING:
    from .space import SearchSpace

_PREFIXES = {"prompt_lookup": "", "retrieval": "retrieval_"}


def suggest_lookup(space: SearchSpace, trial: optuna.trial.BaseTrial, kind: str) -> SpeculativeConfig:
    """A trial's drafts of ``prompt_lookup`` or ``retrieval``."""
    longest = trial.suggest_int(f"{_PREFIXES[kind]}ngram_max", *space.ngram)
    # Its own name per upper end: a distribution whose bounds move is of no use to the samplers.
    shortest = trial.suggest_int(f"{_PREFIXES[kind]}ngram_min_of_{longest}", space.ngram[0], longest)
    if kind == "prompt_lookup":
        return SpeculativeConfig(
            kind,
            trial.suggest_int("lookup_length", *space.lookup_length),
            ngram_min=shortest,
            ngram_max=longest,
            match=str(trial.suggest_categorical("match", ("last", "first"))),
        )
    return SpeculativeConfig(
        kind,
        trial.suggest_int("retrieval_length", *space.lookup_length),
        ngram_min=shortest,
        ngram_max=longest,
        datastore=str(trial.suggest_categorical("datastore", ("", *space.datastores))),
        tree_tokens=trial.suggest_int("retrieval_tokens", *space.tree_tokens),
        least_probability=trial.suggest_float("retrieval_probability", *LEAST_PROBABILITY, log=True),
    )


def lookup_params(config: SpeculativeConfig) -> Params:
    """The choices that lead to such drafts."""
    prefix = _PREFIXES[config.kind]
    found: Params = {
        f"{prefix}ngram_max": config.ngram_max,
        f"{prefix}ngram_min_of_{config.ngram_max}": config.ngram_min,
    }
    if config.kind == "prompt_lookup":
        return found | {"lookup_length": config.draft_length, "match": config.match}
    found |= {"retrieval_length": config.draft_length, "retrieval_tokens": config.tree_tokens}
    return found | {"retrieval_probability": config.least_probability, "datastore": config.datastore}
