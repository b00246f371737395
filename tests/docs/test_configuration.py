"""docs/configuration.md lists every field of the configuration, says what it means, and is up to date."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig

from searches.app.composition import compose_config

REPOSITORY = Path(__file__).parents[2]
CONF = REPOSITORY / "conf"
PAGE = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
SHARED = (
    *("target", "sampling", "space", "measure", "scan", "bridging", "study"),
    *("prompts", "sampler", "pruner", "tracking", "backend"),
)
CHOICES = [f"{group}={path.stem}" for group in (*SHARED, "experiment") for path in sorted((CONF / group).glob("*.yaml"))]


def _sections() -> dict[str, str]:
    """The text below each heading, by what stands in its backticks."""
    parts = re.split(r"^##+ (.*)\n", PAGE, flags=re.M)[1:]
    named = zip(parts[::2], parts[1::2], strict=True)
    return {(re.search(r"`(?:python -m )?(.*)`", title) or [title] * 2)[1]: text for title, text in named}


def _rows(text: str) -> list[list[str]]:
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines() if line.startswith("|")
    ]
    return [row for row in cells if row[0] not in ("field", "kind", "---")]


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """The names of all values of a configuration; lists are values."""
    for name in map(str, node):
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing() and len(child):
            yield from _leaves(child, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}"


SECTIONS = _sections()


def _missing(config: DictConfig, section: str) -> list[str]:
    """The values that no row of a program's section covers, nor a part of the page that the section refers to."""
    named = [row[0].strip("`") for row in _rows(SECTIONS[section])]
    referred = re.findall(r"`(\w+)\.\*`", SECTIONS[section].partition("\n\n|")[0])
    for part in SHARED if section == "searches.layerskip" else referred:
        named += [row[0].strip("`") for title in (part, f"{part}.proposals") for row in _rows(SECTIONS.get(title, ""))]
    whole = tuple(name.removesuffix("*") for name in named if name.endswith(".*"))
    return [leaf for leaf in _leaves(config) if leaf not in named and not leaf.startswith(whole)]


def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build_configuration.py", "--check"])
    monkeypatch.syspath_prepend(REPOSITORY / "docs")  # as for every script that Python runs
    runpy.run_path(str(REPOSITORY / "docs" / "build_configuration.py"), run_name="__main__")  # exits if it is not


@pytest.mark.parametrize("program", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_every_field_of_every_program_has_a_row(program: str) -> None:
    evaluates = (REPOSITORY / "searches" / "evaluate" / f"{program}.py").exists()
    section = f"searches.evaluate.{program}" if evaluates else f"searches.{program}"
    assert _missing(compose_config(program), section) == []


@pytest.mark.parametrize("choice", CHOICES)
def test_every_field_of_every_choice_has_a_row(choice: str) -> None:
    assert choice.startswith("experiment=") or f"`{choice}`" in SECTIONS[choice.partition("=")[0]]
    assert _missing(compose_config("layerskip", [choice]), "searches.layerskip") == []


def test_every_row_says_what_its_field_means() -> None:
    for title, text in SECTIONS.items():
        rows = _rows(text)
        for row in rows:
            assert len(row) == 3 and all(row), row
            assert "_target_" not in row[0]
            assert not re.fullmatch(r"see `\w+`", row[2]), row
        names = [row[0] for row in rows if title != "Drafters"]
        assert len(set(names)) == len(names), title


def test_no_field_of_a_study_has_two_rows() -> None:
    names = [row[0] for title in ("searches.layerskip", *SHARED, "scan.proposals") for row in _rows(SECTIONS[title])]
    assert sorted(names) == sorted(set(names))
