"""Write docs/configuration.md from the dataclasses behind the configuration and the files of ``conf/``.

Usage: ``python docs/build_configuration.py [--check]``; with ``--check`` the file stays as it is, and exit code 1 says that
it is out of date.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.utils import get_object

from layerskip import SpeculativeConfig
from layerskip.config import kinds
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
_KEY = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?P<value>[^#]*)(#\s*(?P<comment>.*))?$")

_COMMON = {"seed": "seed of everything that is drawn", "outputs": "folder of everything that is written"}

_HEAD = """# Configuration

This page is generated: `python docs/build_configuration.py`.

Every program is a [Hydra](https://hydra.cc) application. `group=choice` picks a file of `conf/<group>/`, and `field=value`
overrides one field:

```bash
python -m searches.layerskip experiment=smoke study.n_trials=12 space.kinds=[none,prompt_lookup] --cfg job
```

`--cfg job` prints the fields that `conf/` lists instead of running the program; most users need no others. All
other fields below have their defaults in code and are overridden in the same way, for example `space.window=[1,4]`. A study
logs its complete configuration to MLflow as `config.yaml`.
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
    return {name: plain(text) for name, text in found.items()}


def plain(text: str) -> str:
    """A description as Markdown, without references to Python objects."""
    text = re.sub(r":\w+:`~?([\w.]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    return re.sub(r"\bNone\b", "null", text).replace("``", "`").replace("|", "\\|").rstrip(".")


def shown(value: Any) -> str:
    """A default as it is written on a command line."""
    if value is ...:
        return "needed"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (list, tuple)):
        return f"`[{','.join(map(str, value))}]`"
    return "`null`" if value is None else "`{}`" if value == {} else "`''`" if value == "" else f"`{value}`"


def descriptions(part: str) -> dict[str, str]:
    """What the fields of a part mean, from the docstrings of its type and of the types that it inherits from."""
    made = get_object(TYPES[part])
    found: dict[str, str] = {}
    for one in reversed(getattr(made, "__mro__", (made,))):
        found |= arguments(inspect.getdoc(one))
    return found


def table(part: str) -> Iterator[str]:
    """One row for each field of a part of the configuration."""
    described = descriptions(part)
    yield from ("| field | default | meaning |", "|---|---|---|")
    for name, default in fields_of(TYPES[part]).items():
        if f"{part}.{name}" not in TYPES:
            yield f"| `{part}.{name}` | {shown(default)} | {described.get(name, '')} |"


def keys(path: Path) -> Iterator[str]:
    """One row for each commented or top-level value of a program's own file."""
    parents: list[tuple[int, str]] = []
    skipped = False
    yield from ("| field | default | meaning |", "|---|---|---|")
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _KEY.match(line)
        if not match:
            continue
        depth, key, value = len(match["indent"]), match["key"], match["value"].strip()
        if depth == 0:
            skipped = not value and key in ("defaults", "hydra", "contenders", "peers")
        parents = [parent for parent in parents if parent[0] < depth]
        name = ".".join([*(parent for _, parent in parents), key])
        if not value:
            parents.append((depth, key))
        if not skipped and (value or match["comment"]):
            meaning = plain(match["comment"] or _COMMON.get(name, "") or inherited(name))
            yield f"| `{name}` | {f'`{value}`' if value else ''} | {meaning} |"


def inherited(name: str) -> str:
    """What a field means whose name ends like one of a known part, such as ``planted.search.measure.prompts``."""
    part, _, field = name.rpartition(".")
    known = next((one for one in sorted(TYPES, key=len, reverse=True) if part == one or part.endswith(f".{one}")), None)
    return descriptions(known).get(field, "") if known else ""


def drafters() -> Iterator[str]:
    """One row for each kind of drafter, and one for each field of a configuration."""
    yield from ("| kind | fields | benchmark's defaults |", "|---|---|---|")
    for kind in kinds().values():
        fields = ", ".join(f"`{name}`" for name in (*kind.fields, *kind.options)) or "none"
        defaults = [(name, value) for name, value in (kind.benchmark or {}).items() if value not in ("", "???")]
        row = ", ".join(f"`{name}={value}`" for name, value in defaults if not isinstance(value, (dict, list)))
        yield f"| `{kind.name}` | {fields} | {row} |"
    yield from ("", "| field | default | meaning |", "|---|---|---|")
    described = arguments(inspect.getdoc(SpeculativeConfig))
    for name, field in SpeculativeConfig.__dataclass_fields__.items():
        default = field.default.kind if name in ("stop", "accept") else field.default
        yield f"| `{name}` | {shown(default)} | {described[name]} |"


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    lines += ["## The study: `python -m searches.layerskip`", "", *keys(ROOT / "conf" / "layerskip.yaml"), ""]
    for part in TYPES:
        folder = ROOT / "conf" / part
        choices = ", ".join(f"`{part}={path.stem}`" for path in sorted(folder.glob("*.yaml")))
        lines += [f"### `{part}`", "", *([f"Choices: {choices}.", ""] if choices else []), *table(part), ""]
    for part in ("prompts", "sampler", "pruner", "tracking", "experiment"):
        choices = ", ".join(f"`{part}={path.stem}`" for path in sorted((ROOT / "conf" / part).glob("*.yaml")))
        lines += [f"### `{part}`", "", f"Choices: {choices}.", ""]
    lines += ["## Drafters", "", *drafters(), ""]
    lines += ["## Other programs", ""]
    for path in sorted((ROOT / "conf").glob("*.yaml")):
        if path.stem != "layerskip":
            evaluates = (ROOT / "searches" / "evaluate" / path.name).with_suffix(".py").exists()
            program = f"evaluate.{path.stem}" if evaluates else path.stem
            lines += [f"### `python -m searches.{program}`", "", *keys(path), ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit("docs/configuration.md is out of date: run python docs/build_configuration.py")
