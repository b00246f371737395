"""Composition of configurations: Hydra with this project's ``conf/`` and the benchmark settings of registered drafters."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from types import NoneType
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Sweep
from hydra.errors import HydraException
from omegaconf import DictConfig

from layerskip.config import kinds
from layerskip.rules import check_text
from searches.app.defaults import allow_unlisted, fill_defaults

_CHOICE = re.compile(r"[+~]?\w+(@[\w.]+)?=[\w-]+$")
_TEXT = re.compile(r"(?P<start>\+{0,2}(?P<field>[\w.]+)=)(?P<value>.+)", re.DOTALL)
_ITEM = re.compile(r"""'(\\.|[^'\\])*'(?=,|$)|"(\\.|[^"\\])*"(?=,|$)|[^,]+""")  # of a list; commas in quotes belong to it
_PATHS = (
    *("outputs", "record", "config", "export", "output", "inspect", "model", "corpus", "begin_like", "warm_start", "path"),
    *("folder", "python", "head", "draft", "bridge", "datastore", "draft_folder", "draft_head", "cross_draft"),
    *("eagle_head", "medusa_head", "study.name", "study.storage", "target.name", "tracking.experiment", "tracking.uri"),
)
"""Fields that hold a path, or a name of the user's choice; ``head`` also stands for ``contenders.eagle.head``."""
_PATH_LISTS = ("datastores", "eagle_heads", "medusa_heads", "drafts", "cross_drafts", "paths")
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
    """Return the overrides of a command line as Hydra takes them.

    Paths that its grammar would refuse or split are quoted, and unlisted fields are marked as additions.
    """
    several = not {"-m", "--multirun", "hydra.mode=MULTIRUN"}.isdisjoint(overrides)
    quoted = [_quote_path(override, several) for override in overrides]
    return allow_unlisted(quoted, _choose(name, tuple(override for override in quoted if _CHOICE.match(override))))


def literal(text: str) -> str:
    """Return a text as Hydra reads it literally: quoted, with escaped quotes and interpolations."""
    escaped = re.sub(r"(\\*)('|\$\{|$)", lambda match: match[1] * 2 + ("\\" + match[2] if match[2] else ""), text)
    return f"'{escaped}'"


def _quote_path(override: str, several: bool) -> str:
    """Return an override, its value quoted if that is a path, or paths, that Hydra would refuse or read as something else.

    Args:
        override: of any field.
        several: whether commas separate the jobs of a multirun.
    """
    match = _TEXT.fullmatch(override)
    if match is None:
        return override
    start, field, value = match["start"], match["field"], match["value"]
    last, read = field.rpartition(".")[2], _read(value)
    if field in _PATHS or last in _PATHS:
        check_text(field, value)
        if several and not isinstance(read, Sweep):
            return start + _quoted_items(value)
        return start + (value if several else _quoted(value))
    if last in _PATH_LISTS and value[0] + value[-1] == "[]" and not all(isinstance(item, str) for item in read or [None]):
        return f"{start}[{_quoted_items(value[1:-1])}]"
    return override


def _quoted_items(values: str) -> str:
    return ",".join(_quoted(item[0]) for item in _ITEM.finditer(values))


def _quoted(value: str) -> str:
    read = _read(value)
    is_kept = isinstance(read, (str, NoneType, dict)) or (type(read) is int and str(read) == value)
    return value if is_kept else literal(value)


def _read(value: str) -> Any:
    """Return what Hydra reads: a text, None for ``null``, a list, a sweep of several values, ...; False if it refuses it."""
    try:
        override = OverridesParser.create().parse_override(f"value={value}")
        return override._value if override.is_sweep_override() else override.value()
    except HydraException:
        return False


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
