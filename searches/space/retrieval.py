"""Choice of the n-grams, trees and datastore of ``retrieval`` by a trial."""

from __future__ import annotations

from dataclasses import replace

import optuna

from layerskip import SpeculativeConfig
from searches.space.choices import LEAST_PROBABILITY, Choices, Params, clip
from searches.space.registry import SearchedKind, register
from searches.space.shared_parameters import ngram_params, suggest_ngram


def suggest(choices: Choices, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
    """Return a trial's retrieval."""
    shortest, longest = suggest_ngram(choices, trial, "retrieval_")
    return SpeculativeConfig(
        "retrieval",
        trial.suggest_int("retrieval_length", *choices.lookup_length),
        ngram_min=shortest,
        ngram_max=longest,
        datastore=str(trial.suggest_categorical("datastore", ("", *choices.datastores))),
        tree_tokens=trial.suggest_int("retrieval_tokens", *choices.tree_tokens),
        least_probability=trial.suggest_float("retrieval_probability", *LEAST_PROBABILITY, log=True),
    )


def params(choices: Choices, config: SpeculativeConfig) -> Params:
    """Return the choices that lead to a retrieval."""
    found = ngram_params(config, "retrieval_")
    found |= {"retrieval_length": config.draft_length, "retrieval_tokens": config.tree_tokens}
    return found | {"retrieval_probability": config.least_probability, "datastore": config.datastore}


def _starts(choices: Choices) -> list[SpeculativeConfig]:
    length, size, longest = clip((16, choices.lookup_length), (24, choices.tree_tokens), (4, choices.ngram))
    first = SpeculativeConfig("retrieval", length, ngram_min=choices.ngram[0], ngram_max=longest, tree_tokens=size)
    return [replace(first, datastore=name) for name in ("", *choices.datastores)]


register(SearchedKind("retrieval", suggest, params, _starts))
