"""The registry of drafters, which makes a drafter of a configuration.

A file of this package that holds a drafter calls :func:`register` at its end. Importing the package imports every file in
it, so a new file is found without being listed anywhere.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from layerskip import drafters
from layerskip.config import ConfigError, Kind, SpeculativeConfig, add_kind
from layerskip.decoding.drafter import Drafter, NoDraft
from layerskip.decoding.tree import tree_model
from layerskip.models.architecture import check_rewind
from layerskip.models.target import Target

Build = Callable[[SpeculativeConfig, Target], Drafter]

_BUILD: dict[str, Build] = {"none": lambda config, target: NoDraft()}


def register(kind: Kind, build: Build) -> None:
    """Make a kind of drafter available to configurations, ``generate``, the benchmark and the search.

    Args:
        kind: its name and the fields that it reads.
        build: builds the drafter of a configuration of this kind; raises ``ConfigError`` if it does not fit the target.
    """
    add_kind(kind)
    _BUILD[kind.name] = build


def drafted_kinds() -> tuple[str, ...]:
    """Return the kinds that have a drafter, plain decoding included. Other engines may know further kinds."""
    return tuple(_BUILD)


def load_drafters() -> None:
    """Import every file of the package, so that all drafters are registered."""
    for module in pkgutil.iter_modules(drafters.__path__):
        importlib.import_module(f"{drafters.__name__}.{module.name}")


def build_drafter(config: SpeculativeConfig, target: Target) -> Drafter:
    """Build the drafter of a configuration, ready for any number of prompts.

    Raises:
        ConfigError: the configuration does not fit the target.
        UnsupportedModel: the target, or the draft model, does not support this kind of decoding.
        TargetError: the draft model cannot be loaded.
    """
    check_rewind(target.model)
    if config.kind not in _BUILD:
        raise ConfigError(f"kind: {config.kind!r} has no drafter")
    drafter = _BUILD[config.kind](config, target)
    if drafter.tree_tokens:
        tree_model(target.model)  # raises UnsupportedModel if the target cannot verify trees
    return drafter
