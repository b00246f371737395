"""Rows of the tables of fields, from the types of the configuration and from the files of ``conf/``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from layerskip.config import kinds
from pages.configuration.meanings import MEANINGS, TYPES, descriptions, inherited, plain
from pages.generated import DOCS
from searches.app import composition
from searches.app.defaults import fields_of

CONF = DOCS.parent / "conf"
CHOSEN = ("prompts", "sampler", "pruner", "tracking")
"""Parts whose fields depend on the file that is chosen."""

Row = tuple[str, str, str]
compose_config = cache(composition.compose_config)  # most programs are composed several times
_KEY = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?P<value>[^#]*)(#\s*(?P<comment>.*))?$")
_MAPPINGS = {
    "contenders": "a row of the table; null leaves it out",
    "peers": "one of `transformers`' own methods; null leaves it out",
}


def row(name: str, default: str, meaning: str) -> Row:
    """One row of a table. A field without a meaning is an error."""
    if not meaning:
        raise ValueError(f"{name} has no description: write one into its docstring, conf/ or MEANINGS")
    return f"`{name}`", default or "-", meaning


def shown(value: Any) -> str:
    """A default as it is written on a command line."""
    if value is ... or value == "???":
        return "needed"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (list, tuple)):
        return f"`[{','.join(map(str, value))}]`"
    return "`null`" if value is None else "`{}`" if value == {} else "`''`" if value == "" else f"`{value}`"


def typed_rows(part: str) -> Iterator[Row]:
    """One row for each field of the type behind a part."""
    described = descriptions(TYPES[part])
    composed = OmegaConf.select(compose_config("layerskip"), part)
    for name, default in fields_of(TYPES[part]).items():
        if f"{part}.{name}" not in TYPES:
            value = composed.get(name, default)
            value = OmegaConf.to_container(value) if isinstance(value, ListConfig) else value
            yield row(f"{part}.{name}", shown(value), described.get(name, ""))
    if part == "target":
        yield row("target.path", "needed", MEANINGS["target.path"])


def chosen_rows(part: str) -> Iterator[Row]:
    """One row for each field that some choice of a part has."""
    found: dict[str, Row] = {}
    for path in sorted((CONF / part).glob("*.yaml")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if (match := _KEY.match(line)) and match["key"] != "_target_":
                name = f"{part}.{match['key']}"
                meaning = MEANINGS.get(name) or plain(match["comment"] or "")
                found.setdefault(name, row(name, shown(match["value"].strip()), meaning))
    yield from found.values()


def engine_rows(part: str) -> Iterator[Row]:
    """One row for each field of a back end, and of the load that it is measured under."""
    found: dict[str, tuple[Any, str, list[str]]] = {}
    for path in sorted((CONF / part).glob("*.yaml")):
        for group, node in OmegaConf.load(path).items():
            described = descriptions(node._target_)
            for name, default in fields_of(node._target_).items():
                value = found.setdefault(f"{group!s}.{name}", (node.get(name, default), described.get(name, ""), []))
                value[2].append(f"`{path.stem}`")
    for name, (default, meaning, choices) in found.items():
        yield row(name, shown(default), f"with {' and '.join(choices)}: {meaning}" if meaning else "")


def program_rows(program: str) -> Iterator[Row]:
    """One row for each commented or top-level value of a program's own file, and one for each mapping of other names."""
    parents: list[tuple[int, str]] = []
    skipped = False
    for match in map(_KEY.match, (CONF / f"{program}.yaml").read_text(encoding="utf-8").splitlines()):
        if not match:
            continue
        depth, key, value = len(match["indent"]), match["key"], match["value"].strip()
        if depth == 0:
            skipped = not value and key in ("defaults", "hydra", *_MAPPINGS)
            skipped |= program == "layerskip" and key in TYPES  # has a table of its own
        parents = [parent for parent in parents if parent[0] < depth]
        name = ".".join([*(parent for _, parent in parents), key])
        if not value:
            parents.append((depth, key))
        if not skipped and key != "_target_" and (value or match["comment"]):
            name += ".*" if value.startswith("{") else ""
            meaning = plain(match["comment"] or MEANINGS.get(name, "") or inherited(name))
            yield row(name, "needed" if value == "???" else value and f"`{value}`", meaning)
    yield from _mappings(compose_config(program))


def _mappings(config: DictConfig) -> Iterator[Row]:
    """One row for each contender and each peer, and for parts that other tables describe."""
    for group, meaning in _MAPPINGS.items():
        if isinstance(named := config.get(group), DictConfig):
            yield from (row(f"{group}.{name!s}.*", _values(named[name]), meaning) for name in named)
    if "drafter" in config:
        yield row("drafter.*", _values(config.drafter), MEANINGS["drafter.*"])
    if "planted" in config:
        for part in config.planted.search:
            meaning = f"the settings of a search; other fields are those of [`{part}`](#{part})"
            yield row(f"planted.search.{part}.*", "", meaning)


def _values(node: Any) -> str:
    """The values of a mapping as code, without empty ones and mappings."""
    values: Any = OmegaConf.to_container(OmegaConf.create(node), resolve=False)
    kept = [(name, value) for name, value in values.items() if value not in ("", None, "???")]
    return ", ".join(f"`{name}={value}`" for name, value in kept if not isinstance(value, (dict, list)))


def shared(program: str) -> list[str]:
    """Which of the parts above a program reads, and their defaults where these are others than in a study."""
    config, study = compose_config(program), compose_config("layerskip")
    own = OmegaConf.load(CONF / f"{program}.yaml")
    parts = [
        part for part in config if part in (*TYPES, *CHOSEN) and (program not in ("verify", "export") or part not in own)
    ]
    other = []
    for part in parts:
        containers: list[Any] = [OmegaConf.to_container(one[part], resolve=True) for one in (config, study)]
        values, usual = containers
        for name, value in values.items():
            if value != usual.get(name) and not isinstance(value, dict) and OmegaConf.select(own, f"{part}.{name}") is None:
                other.append(f"`{part}.{name}=`{shown(value)}".replace("``", ""))
    lines = [f"Fields above: {', '.join(f'`{part}.*`' for part in parts)}."] if parts else []
    return lines + ([f"Other defaults than there: {', '.join(other)}."] if other else [])


def drafter_rows() -> Iterator[Row]:
    """One row for each kind of drafter."""
    for kind in kinds().values():
        fields = ", ".join(f"`{name}`" for name in (*kind.fields, *kind.options)) or "none"
        yield f"`{kind.name}`", fields, _values(kind.benchmark or {}) or "-"


def drafter_field_rows() -> Iterator[Row]:
    """One row for each field of a drafter's configuration."""
    described = descriptions("layerskip.SpeculativeConfig")
    for name, default in fields_of("layerskip.SpeculativeConfig").items():
        yield row(name, shown(getattr(default, "kind", default)), described[name])


PART_ROWS = dict.fromkeys(TYPES, typed_rows) | dict.fromkeys(CHOSEN, chosen_rows) | {"backend": engine_rows}
"""The rows of each part of the configuration that has fields of its own."""
