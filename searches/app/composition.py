"""Composition of configurations: Hydra with this project's ``conf/`` and the benchmark settings of registered drafters.

``conf/`` shows the fields that most users set. Every further field of the types that its ``_target_`` fields name can be
overridden by the same syntax, ``space.protect_first=4``; docs/configuration.md lists all of them.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, open_dict

from layerskip.config import check_text, methods

_OWN = ("layerskip.", "searches.")
_OVERRIDE = re.compile(r"(?P<key>\w+(\.\w+)+)=")
_CHOICE = re.compile(r"[+~]?\w+(@[\w.]+)?=[\w-]+$")
_TEXT = re.compile(r"(?P<start>\+{0,2}(?P<field>[\w.]+)=)(?P<value>.+)", re.DOTALL)
_AS_HYDRA_READS = re.compile(r"""null|'(\\.|[^'\\])*'|"(\\.|[^"\\])*"|.*\$\{[^}]*\}.*""")
_PATHS = (
    *("outputs", "record", "config", "export", "output", "inspect", "model", "corpus", "begin_like", "path"),
    *("url", "plain", "draft", "folder", "cache_folder", "python", "draft_folder", "cross_draft", "registry_root"),
    *("eagle_head", "study.name", "study.storage", "target.name", "tracking.experiment", "tracking.uri"),
)
"""Fields that hold a path, or a name of the user's choice, in addition to those that drafters declare."""

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
    composed = _choose(name, tuple(override for override in quoted if _CHOICE.match(override)))
    matches = [(override, _OVERRIDE.match(override)) for override in quoted]
    return [f"++{each}" if match and _is_field(composed, match["key"].split(".")) else each for each, match in matches]


def literal(text: str) -> str:
    """Return a text as Hydra reads it literally: quoted, with escaped quotes and interpolations."""
    escaped = re.sub(r"(\\*)('|\$\{|$)", lambda match: match[1] * 2 + ("\\" + match[2] if match[2] else ""), text)
    return f"'{escaped}'"


def _quote_path(override: str, several: bool) -> str:
    """Return an override, its value quoted if that is a path, which Hydra might refuse or read as something else.

    A value that is quoted, null or has an interpolation stays. With ``several``, commas separate the jobs of a multirun.
    """
    match = _TEXT.fullmatch(override)
    if match is None or not _is_path(match["field"]):
        return override
    check_text(match["field"], match["value"])
    if _AS_HYDRA_READS.fullmatch(match["value"]) or (several and "," in match["value"]):
        return override
    return match["start"] + literal(match["value"])


def _is_path(field: str) -> bool:
    declared = {each.name for method in methods().values() for each in method.fields if each.path}
    last = field.rpartition(".")[2]
    return field in _PATHS or last in _PATHS or (last in declared and not field.startswith("space.ranges."))  # a list


@cache  # its types and names are the same for all registered drafters
def _choose(name: str, choices: tuple[str, ...]) -> DictConfig:
    """Compose the configuration of a program with choices of files alone."""
    with initialize_config_dir(CONF, version_base="1.3"):
        try:
            return compose(name, list(choices))
        except HydraException:  # a choice that does not exist, which Hydra reports, or several of them in a multirun
            return compose(name)


def store_drafters() -> None:
    """Make the benchmark rows of all registered methods the default contenders."""
    rows = {name: {"method": name, **method.row} for name, method in methods().items() if method.benchmark is not None}
    ConfigStore.instance().store(name="every_method", group="benchmark_contenders", node=rows)


def fields_of(path: str) -> dict[str, Any]:
    """Return the fields that a configuration may set of a type or function, by its dotted name, with their defaults.

    A field without a default has ``...``. Types of other libraries have no fields here.
    """
    if not path.startswith(_OWN):
        return {}
    made = get_object(path)
    if not dataclasses.is_dataclass(made):
        if inspect.isclass(made):
            return {}
        parameters = inspect.signature(made).parameters.values()
        return {p.name: ... if p.default is p.empty else p.default for p in parameters}
    fields = [field for field in dataclasses.fields(made) if field.init and not field.metadata.get("runtime")]
    return {field.name: _default(field) for field in fields}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return ... if field.default is dataclasses.MISSING else field.default


def _is_field(composed: DictConfig, names: Sequence[str]) -> bool:
    """Return whether a dotted name is a field of a type that the configuration instantiates."""
    node: Any = composed
    fields: Mapping[str, Any] = {}
    for name in names[:-1]:
        node = node._get_node(name, validate_access=False) if isinstance(node, DictConfig) else None
        default = fields.get(name)
        if default == {}:
            return True  # a mapping with names of the user's choice, such as space.ranges
        path = node.get("_target_") if isinstance(node, DictConfig) and not node._is_none() else None
        fields = fields_of(path or (_path(type(default)) if dataclasses.is_dataclass(default) else ""))
    return names[-1] in fields


def fill_defaults(config: DictConfig) -> DictConfig:
    """Add the fields that a composed configuration does not set to every dataclass that it instantiates."""
    with open_dict(config):
        _fill(config)
    return config


def _fill(node: DictConfig) -> None:
    for name in list(node):
        if isinstance(child := node._get_node(name), DictConfig) and not child._is_none() and not child._is_missing():
            _fill(child)
    path = node._get_node("_target_")
    if path is None or not path._value().startswith(_OWN) or not dataclasses.is_dataclass(made := get_object(path._value())):
        return
    for name, default in fields_of(_path(made)).items():
        if dataclasses.is_dataclass(default):
            node[name] = node.get(name, {})
            node[name]["_target_"] = _path(type(default))
            _fill(node[name])
        elif name not in node and default is not ...:
            node[name] = list(default) if isinstance(default, tuple) else default


def _path(made: Any) -> str:
    return f"{made.__module__}.{made.__qualname__}"
