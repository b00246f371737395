"""Choice of the window of ``lookahead`` by a trial."""

from __future__ import annotations

import optuna

from layerskip import SpeculativeConfig
from searches.space.choices import Choices, Params, clip
from searches.space.registry import SearchedKind, register


def suggest(choices: Choices, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
    """Return a trial's lookahead."""
    length = trial.suggest_int("lookahead_length", *choices.lookahead_length)
    window = trial.suggest_int("window", *choices.window)
    candidates = trial.suggest_int("lookahead_candidates", *choices.candidates)
    return SpeculativeConfig("lookahead", length, window=window, candidates=candidates)


def params(choices: Choices, config: SpeculativeConfig) -> Params:
    """Return the choices that lead to a lookahead."""
    found: Params = {"lookahead_length": config.draft_length, "window": config.window}
    return found | {"lookahead_candidates": config.candidates}


def _starts(choices: Choices) -> list[SpeculativeConfig]:
    length, window, kept = clip((2, choices.lookahead_length), (4, choices.window), (4, choices.candidates))
    return [SpeculativeConfig("lookahead", length, window=window, candidates=kept)]


register(SearchedKind("lookahead", suggest, params, _starts))
