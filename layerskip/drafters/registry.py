"""The drafters of this package, found by importing every file in it, and made from configurations."""

from __future__ import annotations

import importlib
import pkgutil

from layerskip import drafters
from layerskip.config import SpeculativeConfig
from layerskip.decoding.drafter import Drafter, drafter_classes
from layerskip.decoding.tree import tree_model
from layerskip.models.architecture import UnsupportedModel, check_rewind
from layerskip.models.target import Target


def load_drafters() -> None:
    """Import every file of the package, so that the methods of all drafters are declared."""
    for module in pkgutil.iter_modules(drafters.__path__):
        importlib.import_module(f"{drafters.__name__}.{module.name}")


def build_drafter(config: SpeculativeConfig, target: Target) -> Drafter:
    """Build the drafter of a configuration, ready for any number of prompts.

    Raises:
        ConfigError, UnsupportedModel: the configuration does not fit the target or the draft model.
        TargetError: the draft model cannot be loaded.
    """
    check_rewind(target.model)
    drafter_class = drafter_classes()[config.method]
    if reason := drafter_class.unsupported(target):
        raise UnsupportedModel(f"{config.method}: {reason}")
    drafter = drafter_class.build(config, target)
    if drafter.tree_tokens:
        tree_model(target.model)  # raises UnsupportedModel if the target cannot verify trees
    return drafter
