"""The registry of searchable drafters, with the choice of the parameters of each kind.

A file of this package that searches a kind of drafter calls :func:`register`. Importing the package imports every file in
it, so a new file is found without being listed anywhere.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import optuna

from layerskip import SpeculativeConfig
from layerskip.config import kinds
from searches import space
from searches.space.choices import Choices, Params

_FIRST = (
    *("none", "layer_skip", "prompt_lookup", "retrieval", "token_recycling", "lookahead"),
    *("eagle", "medusa", "draft_model", "cross_tokenizer", "cascade"),
)
"""The order in which studies list these kinds; others follow. Optuna resumes a study only with the same list of choices."""


@dataclass(frozen=True)
class SearchedKind:
    """Search of one kind of drafter by studies.

    Args:
        kind: of drafter, as registered in :mod:`layerskip.drafters`.
        suggest: a trial's configuration of this kind.
        params: the choices that lead to a configuration; the reverse of ``suggest``.
        starts: configurations to try first, the most promising ones first.
        available: whether the choices have what this kind needs, such as a trained head.
        after_lookup: whether a cascade may put it after a prompt lookup.
    """

    kind: str
    suggest: Callable[[Choices, optuna.trial.BaseTrial], SpeculativeConfig]
    params: Callable[[Choices, SpeculativeConfig], Params]
    starts: Callable[[Choices], Iterable[SpeculativeConfig]] = lambda choices: ()
    available: Callable[[Choices], bool] = lambda choices: True
    after_lookup: bool = True


_NONE = SearchedKind("none", lambda choices, trial: SpeculativeConfig(), lambda choices, config: {}, after_lookup=False)
_KINDS: dict[str, SearchedKind] = {"none": _NONE}


def register(kind: SearchedKind) -> None:
    """Make a kind of drafter available to studies."""
    _KINDS[kind.kind] = kind


def load_kinds() -> None:
    """Import every file of the package, so that all kinds are registered."""
    for module in pkgutil.iter_modules(space.__path__):
        importlib.import_module(f"{space.__name__}.{module.name}")


def all_kinds() -> tuple[str, ...]:
    """Return the names of all kinds that studies can search."""
    return (*(kind for kind in _FIRST if kind in _KINDS), *sorted(_KINDS.keys() - set(_FIRST)))


def searched(kind: str) -> SearchedKind:
    """Return the search of a kind of drafter."""
    return _KINDS[kind]


def available_kinds(choices: Choices) -> tuple[str, ...]:
    """Return the kinds that a trial chooses from."""
    wanted = {"none", *(all_kinds() if choices.kinds is None else choices.kinds)}
    if not choices.trees:
        wanted = {kind for kind in wanted if not kinds()[kind].trees_only}
    found = tuple(kind for kind in all_kinds() if kind in wanted and searched(kind).available(choices))
    second = any(searched(kind).after_lookup for kind in found)
    return found if second and "prompt_lookup" in found else tuple(kind for kind in found if kind != "cascade")


def second_kinds(choices: Choices) -> tuple[str, ...]:
    """Return the kinds that a cascade may put after a prompt lookup."""
    return tuple(kind for kind in available_kinds(choices) if searched(kind).after_lookup)
