"""Composition of configurations: Hydra with this project's ``conf/`` and the benchmark settings of registered drafters."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig

from layerskip.config import kinds
from searches.app.defaults import allow_unlisted, fill_defaults

_CHOICE = re.compile(r"[+~]?\w+(@[\w.]+)?=[\w-]+$")
_ORDER = (
    *("prompt_lookup", "retrieval", "token_recycling", "lookahead", "cascade", "layer_skip"),
    *("draft_model", "cross_tokenizer", "eagle", "medusa"),
)
"""The order of contenders in a benchmark; other kinds follow."""

CONF = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "conf")


def compose_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the configuration of a program as its command line does."""
    store_drafters()
    prepared = prepare_overrides(name, overrides)
    with initialize_config_dir(CONF, version_base="1.3"):
        return fill_defaults(compose(name, prepared))


def prepare_overrides(name: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a command line as Hydra takes them, with those of unlisted fields marked as additions."""
    return allow_unlisted(overrides, _choose(name, tuple(override for override in overrides if _CHOICE.match(override))))


@cache  # its types and names are the same for all registered drafters
def _choose(name: str, choices: tuple[str, ...]) -> DictConfig:
    """Compose the configuration of a program with choices of files alone."""
    with initialize_config_dir(CONF, version_base="1.3"):
        try:
            return compose(name, list(choices))
        except HydraException:  # a choice that does not exist, which Hydra reports, or several of them in a multirun
            return compose(name)


def store_drafters() -> None:
    """Make ``drafter=<kind>`` a choice for every registered kind, and their benchmark settings the default contenders."""
    known = {name: kind.benchmark for name, kind in kinds().items() if kind.benchmark is not None}
    rows = {name: {"kind": name, **known[name]} for name in dict.fromkeys((*_ORDER, *known))}
    store = ConfigStore.instance()
    for kind, row in rows.items():
        store.store(name=kind, group="drafter", node=row)
    store.store(name="every_kind", group="benchmark_contenders", node=rows)
