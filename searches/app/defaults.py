"""Configuration fields that ``conf/`` does not list, because their defaults stand in code.

``conf/`` shows the fields that most users set. Every further field of the types that its ``_target_`` fields name can be
overridden by the same syntax, ``space.window=[1,4]``; docs/configuration.md lists all of them.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, open_dict

from searches.app.checks import InputError
from searches.app.earlier_names import MOVED, REMOVED, RENAMED

_OWN = ("layerskip.", "searches.")
_OVERRIDE = re.compile(r"(?P<key>\w+(\.\w+)+)=")


def fields_of(path: str) -> dict[str, Any]:
    """Return the fields that a configuration may set of a type or function, with their defaults.

    Args:
        path: its dotted name. Types of other libraries have no fields here.

    Returns:
        ``...`` for a field without a default.

    Raises:
        InputError: the name is one of an earlier version.
    """
    if path in MOVED:
        raise InputError(f"_target_: {path} is now {MOVED[path]}")
    if not path.startswith(_OWN):
        return {}
    made = get_object(path)
    if not dataclasses.is_dataclass(made):
        if inspect.isclass(made):
            return {}
        parameters = inspect.signature(made).parameters.values()
        return {p.name: ... if p.default is p.empty else p.default for p in parameters}
    found = {}
    for field in dataclasses.fields(made):
        if field.init and not field.metadata.get("runtime"):
            factory = field.default_factory
            default = factory() if factory is not dataclasses.MISSING else field.default
            found[field.name] = ... if default is dataclasses.MISSING else default
    return found


def allow_unlisted(overrides: Sequence[str], composed: DictConfig) -> list[str]:
    """Mark the overrides of fields that ``conf/`` does not list as additions for Hydra.

    Args:
        overrides: of a command line.
        composed: the program's configuration without them.

    Raises:
        InputError: an override has a name of an earlier version; the message says today's name.
    """
    found = []
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        if name in REMOVED and name not in composed:
            raise InputError(f"{name}: {REMOVED[name]}")
        for choice in value.split(","):
            if (name, choice) in RENAMED:
                raise InputError(f"{name}={choice}: is now {RENAMED[name, choice]}")
        match = _OVERRIDE.match(override)
        known = match is not None and _is_field(composed, match["key"].split("."))
        found.append(f"++{override}" if known else override)
    return found


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
    if path is None or not dataclasses.is_dataclass(made := get_object(path._value()) if _known(path._value()) else None):
        return
    for name, default in fields_of(_path(made)).items():
        if dataclasses.is_dataclass(default):
            node[name] = node.get(name, {})
            node[name]["_target_"] = _path(type(default))
            _fill(node[name])
        elif name not in node and default is not ...:
            node[name] = list(default) if isinstance(default, tuple) else default


def _known(path: str) -> bool:
    fields_of(path)  # refuses a name of an earlier version
    return path.startswith(_OWN)


def _path(made: Any) -> str:
    return f"{made.__module__}.{made.__qualname__}"
