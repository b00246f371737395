"""Write docs/configuration.md from the dataclasses behind the configuration and the files of ``conf/``.

Usage: ``.venv/bin/python docs/build_configuration.py [--check]``; with ``--check`` the file stays as it is, and exit
code 1 says that it is out of date.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

from layerskip import SpeculativeConfig
from layerskip.config import kinds
from searches.app import composition
from searches.app.defaults import fields_of

TYPES = {
    "target": "layerskip.load_target",
    "sampling": "layerskip.Sampling",
    "space": "searches.space.search_space.SearchSpace",
    "measure": "searches.study.objective.MeasureSettings",
    "scan": "searches.predict.preparation.ScanSettings",
    "scan.proposals": "searches.predict.proposals.ProposalSettings",
    "bridging": "searches.training.bridge_settings.BridgingSettings",
    "study": "searches.study.study.StudySettings",
}
"""The type behind each part of the configuration."""
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
compose_config = cache(composition.compose_config)  # most programs are composed several times
_KEY = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?P<value>[^#]*)(#\s*(?P<comment>.*))?$")

CHOSEN = ("prompts", "sampler", "pruner", "tracking")
"""Parts whose fields depend on the file that is chosen."""

_MEANINGS = {
    "seed": "seed of everything that is drawn",
    "outputs": "folder of everything that is written",
    "target.path": "with `target=local`: a folder or a `.gguf` file; never looked up on the hub",
    "prompts.path": "with `prompts=jsonl`: a JSON Lines file, one prompt per line",
    "sampler.n_startup_trials": "trials before the sampler uses the results of earlier ones; with `gp`, per kind of drafter",
    "sampler.multivariate": "with `tpe`: true models all parameters together; false each by itself",
    "sampler.group": "with `tpe`: true models the parameters of each kind of drafter as a group of their own",
    "sampler.warn_independent_sampling": "with `cmaes`: whether Optuna warns about parameters that CMA-ES cannot sample",
    "sampler.population_size": "with `nsga2`: trials per generation",
    "pruner.p_threshold": "a trial is stopped when the test that it is slower than the leader gives a p-value below this",
    "pruner.n_startup_steps": "prompts that a trial and the leader must share before it can be stopped",
    "tracking.uri": "an MLflow server, such as `http://localhost:5000`; null: SQLite in the outputs folder",
    "tracking.experiment": "name of the MLflow experiment",
    "coverage.configs.layer_skip.*": "a configuration whose intervals are tested; see [drafters](#drafters)",
    "coverage.configs.prompt_lookup.*": "a second one",
    "drafter.*": "what is trained, `drafter=eagle`, `drafter=medusa` or `drafter=layer_skip`; see [drafters](#drafters)",
}
"""Meanings that stand neither in a docstring nor in a comment of ``conf/``."""

HEAD = ("| field | default | meaning |", "|---|---|---|")

_HEAD = """# Configuration

This page is generated: `.venv/bin/python docs/build_configuration.py`.

Every program is a [Hydra](https://hydra.cc) application. `group=choice` picks a file of `conf/<group>/`, and `field=value`
overrides one field:

```bash
.venv/bin/python -m searches.layerskip experiment=smoke study.n_trials=12 space.kinds=[none,prompt_lookup] --cfg job
```

`--cfg job` prints the fields that `conf/` lists instead of running the program; most users need no others. All
other fields below have their defaults in code and are overridden in the same way, for example `space.window=[1,4]`. A study
logs its complete configuration to MLflow as `config.yaml`. A row `name.*` stands for all fields below `name`.
"""


def arguments(docstring: str | None) -> dict[str, str]:
    """The descriptions in the ``Args`` section of a docstring, by name."""
    section = re.search(r"Args:\n(.*?)(\n\s*\n|\Z)", inspect.cleandoc(docstring or ""), re.S)
    found: dict[str, str] = {}
    name = ""
    for line in (section[1] if section else "").splitlines():
        if match := re.match(r" {4}(\w+): (.*)", line):
            name = match[1]
            found[name] = match[2]
        elif name:
            found[name] += " " + line.strip()
    return {name: plain(followed(name, text)) for name, text in found.items()}


def followed(name: str, text: str) -> str:
    """A description; that of the same argument of a class if it only refers to that class."""
    if match := re.fullmatch(r"see :class:`~?([\w.]+)`\.?", text):
        return arguments(inspect.getdoc(get_object(match[1])))[name]
    return text


def plain(text: str) -> str:
    """A description as Markdown, without references to Python objects."""
    text = re.sub(r" \(:\w+:`[^`]*`\)", "", text)
    text = re.sub(r":\w+:`~?([\w.]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    return re.sub(r"\bNone\b", "null", text).replace("``", "`").replace("|", "\\|").rstrip(".")


def shown(value: Any) -> str:
    """A default as it is written on a command line."""
    if value is ... or value == "???":
        return "needed"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (list, tuple)):
        return f"`[{','.join(map(str, value))}]`"
    return "`null`" if value is None else "`{}`" if value == {} else "`''`" if value == "" else f"`{value}`"


def row(name: str, default: str, meaning: str) -> str:
    """One row of a table.

    Raises:
        ValueError: the meaning is unknown.
    """
    if not meaning:
        raise ValueError(f"{name} has no description: write one into its docstring, conf/ or {Path(__file__).name}")
    return f"| `{name}` | {default or '-'} | {meaning} |"


def descriptions(path: str) -> dict[str, str]:
    """What the fields of a type mean, from its docstring and from those of the types that it inherits from."""
    made = get_object(path)
    found: dict[str, str] = {}
    for one in reversed(getattr(made, "__mro__", (made,))):
        found |= arguments(inspect.getdoc(one))
    return found


def table(part: str) -> Iterator[str]:
    """One row for each field of a part of the configuration."""
    described = descriptions(TYPES[part])
    composed = OmegaConf.select(compose_config("layerskip"), part)
    yield from HEAD
    for name, default in fields_of(TYPES[part]).items():
        if f"{part}.{name}" not in TYPES:
            value = composed.get(name, default)
            value = OmegaConf.to_container(value) if isinstance(value, ListConfig) else value
            yield row(f"{part}.{name}", shown(value), described.get(name, ""))
    if part == "target":
        yield row("target.path", "needed", _MEANINGS["target.path"])


def chosen(part: str) -> Iterator[str]:
    """One row for each field that some choice of a part has."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "conf" / part).glob("*.yaml")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if (match := _KEY.match(line)) and match["key"] != "_target_":
                name = f"{part}.{match['key']}"
                value = match["value"].strip()
                meaning = _MEANINGS.get(name) or plain(match["comment"] or "")
                found.setdefault(name, row(name, shown(value), meaning))
    if found:
        yield from HEAD
        yield from found.values()


def engines() -> Iterator[str]:
    """One row for each field of a back end, and of the load that it is measured under."""
    found: dict[str, tuple[Any, str, list[str]]] = {}
    for path in sorted((ROOT / "conf" / "backend").glob("*.yaml")):
        for part, node in OmegaConf.load(path).items():
            described = descriptions(node._target_)
            for name, default in fields_of(node._target_).items():
                value = found.setdefault(f"{part}.{name}", (node.get(name, default), described.get(name, ""), []))
                value[2].append(f"`{path.stem}`")
    if found:
        yield from HEAD
    for name, (default, meaning, choices) in found.items():
        yield row(name, shown(default), f"with {' and '.join(choices)}: {meaning}" if meaning else "")


def keys(program: str) -> Iterator[str]:
    """One row for each commented or top-level value of a program's own file, and one for each mapping of other names."""
    parents: list[tuple[int, str]] = []
    skipped = False
    yield from HEAD
    for line in (ROOT / "conf" / f"{program}.yaml").read_text(encoding="utf-8").splitlines():
        match = _KEY.match(line)
        if not match:
            continue
        depth, key, value = len(match["indent"]), match["key"], match["value"].strip()
        if depth == 0:
            skipped = not value and key in ("defaults", "hydra", "contenders", "peers")
            skipped |= program == "layerskip" and key in TYPES  # has a table of its own
        parents = [parent for parent in parents if parent[0] < depth]
        name = ".".join([*(parent for _, parent in parents), key])
        if not value:
            parents.append((depth, key))
        if not skipped and key != "_target_" and (value or match["comment"]):
            name += ".*" if value.startswith("{") else ""
            meaning = plain(match["comment"] or _MEANINGS.get(name, "") or inherited(name))
            yield row(name, "needed" if value == "???" else value and f"`{value}`", meaning)
    yield from mappings(compose_config(program))


def mappings(config: DictConfig) -> Iterator[str]:
    """One row for each contender and each peer, and for parts that other tables describe."""
    for name, node in ((name, config._get_node(name)) for name in config):
        if name == "contenders" and isinstance(node, DictConfig):
            for contender in node:
                yield row(f"contenders.{contender}.*", values(node[contender]), "a row of the table; null leaves it out")
        elif name == "peers":
            for peer in node:
                yield row(f"peers.{peer}.*", values(node[peer]), "one of `transformers`' own methods; null leaves it out")
        elif name == "drafter":
            yield row("drafter.*", values(node), _MEANINGS["drafter.*"])
        elif name == "planted":
            for part in node.search:
                meaning = f"the settings of a search; other fields are those of [`{part}`](#{part})"
                yield row(f"planted.search.{part}.*", "", meaning)


def values(node: DictConfig) -> str:
    """The values of a mapping as code, without empty ones and mappings."""
    plainly = OmegaConf.to_container(node, resolve=False)
    assert isinstance(plainly, dict)
    kept = {key: value for key, value in plainly.items() if not isinstance(value, (dict, list)) and value not in ("", None)}
    return ", ".join(f"`{key}={value}`" for key, value in kept.items() if value != "???")


def shared(program: str) -> Iterator[str]:
    """Which of the parts above a program reads, and their defaults where these are others than in a study."""
    config, study = compose_config(program), compose_config("layerskip")
    own = OmegaConf.load(ROOT / "conf" / f"{program}.yaml")
    parts = [
        str(part)
        for part in config
        if part in (*TYPES, *CHOSEN) and (program not in ("verify", "export") or part not in own)
    ]
    other = []
    for part in parts:
        values, usual = (OmegaConf.to_container(one[part], resolve=True) for one in (config, study))
        assert isinstance(values, dict)
        assert isinstance(usual, dict)
        for name, value in values.items():
            if value != usual.get(name) and not isinstance(value, dict) and OmegaConf.select(own, f"{part}.{name}") is None:
                other.append(f"`{part}.{name}=`{shown(value)}".replace("``", ""))
    if not parts:
        return
    yield f"Fields above: {', '.join(f'`{part}.*`' for part in parts)}."
    if other:
        yield f"Other defaults than there: {', '.join(other)}."
    yield ""


def inherited(name: str) -> str:
    """What a field means whose name ends like one of a known part, such as ``planted.search.measure.prompts``."""
    part, _, field = name.rpartition(".")
    known = next((one for one in sorted(TYPES, key=len, reverse=True) if part == one or part.endswith(f".{one}")), None)
    return descriptions(TYPES[known]).get(field, "") if known else ""


def drafters() -> Iterator[str]:
    """One row for each kind of drafter, and one for each field of a configuration."""
    yield from ("| kind | fields | benchmark's defaults |", "|---|---|---|")
    for kind in kinds().values():
        fields = ", ".join(f"`{name}`" for name in (*kind.fields, *kind.options)) or "none"
        defaults = [(name, value) for name, value in (kind.benchmark or {}).items() if value not in ("", "???")]
        listed = ", ".join(f"`{name}={value}`" for name, value in defaults if not isinstance(value, (dict, list)))
        yield f"| `{kind.name}` | {fields} | {listed or '-'} |"
    yield from ("", *HEAD)
    described = arguments(inspect.getdoc(SpeculativeConfig))
    for name, field in SpeculativeConfig.__dataclass_fields__.items():
        default = field.default.kind if name in ("stop", "accept") else field.default
        yield row(name, shown(default), described[name])


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    lines += ["## The study: `python -m searches.layerskip`", "", *keys("layerskip"), ""]
    for part in (*TYPES, *CHOSEN, "backend", "experiment"):
        choices = ", ".join(f"`{part}={path.stem}`" for path in sorted((ROOT / "conf" / part).glob("*.yaml")))
        fields = [*(table(part) if part in TYPES else chosen(part) if part in CHOSEN else ())]
        fields += [*engines()] if part == "backend" else []
        lines += [f"### `{part}`", "", *([f"Choices: {choices}.", ""] if choices else [])]
        lines += [*fields, ""] if fields else []
    lines += ["## Drafters", "", *drafters(), ""]
    lines += ["## Other programs", ""]
    for path in sorted((ROOT / "conf").glob("*.yaml")):
        if path.stem != "layerskip":
            evaluates = (ROOT / "searches" / "evaluate" / path.name).with_suffix(".py").exists()
            program = f"evaluate.{path.stem}" if evaluates else path.stem
            lines += [f"### `python -m searches.{program}`", "", *shared(path.stem), *keys(path.stem), ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit("docs/configuration.md is out of date: run .venv/bin/python docs/build_configuration.py")
