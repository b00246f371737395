"""Choice of the n-grams and drafts of ``prompt_lookup`` by a trial."""

from __future__ import annotations

import optuna

from layerskip import SpeculativeConfig
from searches.space.choices import Choices, Params, clip
from searches.space.registry import SearchedKind, register
from searches.space.shared_parameters import ngram_params, suggest_ngram


def suggest(choices: Choices, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
    """Return a trial's prompt lookup."""
    shortest, longest = suggest_ngram(choices, trial, "")
    return SpeculativeConfig(
        "prompt_lookup",
        trial.suggest_int("lookup_length", *choices.lookup_length),
        ngram_min=shortest,
        ngram_max=longest,
        match=str(trial.suggest_categorical("match", tuple(choices.matches))),
    )


def params(choices: Choices, config: SpeculativeConfig) -> Params:
    """Return the choices that lead to a prompt lookup."""
    return ngram_params(config, "") | {"lookup_length": config.draft_length, "match": config.match}


def lookup(choices: Choices, length: int, longest: int) -> SpeculativeConfig:
    """Return a lookup of this draft length and longest n-gram, or the nearest ones in their ranges."""
    length, longest = clip((length, choices.lookup_length), (longest, choices.ngram))
    match = choices.matches[0]
    return SpeculativeConfig("prompt_lookup", length, ngram_min=choices.ngram[0], ngram_max=longest, match=match)


def every_lookup(choices: Choices) -> list[SpeculativeConfig]:
    """Return every prompt lookup that the choices allow."""
    first, last = choices.ngram
    sizes = [(low, high) for high in range(first, last + 1) for low in range(first, high + 1)]
    lengths = range(choices.lookup_length[0], choices.lookup_length[1] + 1)
    return [
        SpeculativeConfig("prompt_lookup", length, ngram_min=low, ngram_max=high, match=match)
        for low, high in sizes
        for match in choices.matches
        for length in lengths
    ]


def _starts(choices: Choices) -> list[SpeculativeConfig]:
    return [lookup(choices, 8, 3), lookup(choices, 4, 2)]


register(SearchedKind("prompt_lookup", suggest, params, _starts, after_lookup=False))
