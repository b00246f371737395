"""Choice of a cascade by a trial: a prompt lookup, and another drafter after it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import optuna

from layerskip import SpeculativeConfig
from searches.space import registry
from searches.space.choices import Choices, Params, clip
from searches.space.prompt_lookup import lookup


def make_cascade(choices: Choices, *members: SpeculativeConfig) -> SpeculativeConfig:
    """Return a cascade with the costs that the choices know."""
    costs = () if choices.draft_cost is None else choices.draft_cost(members)
    return SpeculativeConfig("cascade", members=members, verify_cost=choices.verify_cost, draft_cost=costs)


def after_lookup(choices: Choices, seconds: Iterable[SpeculativeConfig]) -> list[SpeculativeConfig]:
    """Return the first of some configurations after a lookup; an empty list if the study has no cascades."""
    if "cascade" not in registry.available_kinds(choices):
        return []
    (shortest,) = clip((2, choices.ngram))
    first = replace(lookup(choices, 8, 4), ngram_min=shortest)
    return [make_cascade(choices, first, second) for second in itertools.islice(seconds, 1)]


def suggest(choices: Choices, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
    """Return a trial's cascade."""
    # Not "then", whose list of choices was shorter once: Optuna keeps one list for each name.
    second = str(trial.suggest_categorical("second", registry.second_kinds(choices)))
    members = [registry.searched(kind).suggest(choices, trial) for kind in ("prompt_lookup", second)]
    return make_cascade(choices, *members)


def params(choices: Choices, config: SpeculativeConfig) -> Params:
    """Return the choices that lead to a cascade."""
    found: Params = {}
    for member in config.members:
        found |= registry.searched(member.kind).params(choices, member)
    return found | {"second": config.members[1].kind}


registry.register(registry.SearchedKind("cascade", suggest, params, after_lookup=False))
