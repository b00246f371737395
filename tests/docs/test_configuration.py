"""docs/configuration.md lists every field of a study and of the commands, says what it means, and is up to date."""

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
PROGRAMS = re.findall(r"^## `searches\.(\w+)`$", PAGE, re.M)
GROUPS = re.findall(r"^### `(\w+)`$", PAGE, re.M)
CHOICES = [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
ROWS = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
ELSEWHERE = [name for line in re.findall(r"^Described in.*$", PAGE, re.M) for name in re.findall(r"`([\w.]+)", line)]
FIELDS = [*(row[0].strip("`") for row in ROWS if len(row) == 3), *ELSEWHERE]


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """The names of all values of a configuration; lists are values."""
    for name in map(str, node):
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing() and len(child):
            yield from _leaves(child, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}"


def _missing(config: DictConfig) -> list[str]:
    """The values that no row covers; entries that users name, and drafters, have one row for all."""
    whole = ("contenders.", "peers.", "drafter.")
    return [leaf for leaf in _leaves(config) if leaf not in FIELDS and not leaf.startswith(whole)]


def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build_configuration.py", "--check"])
    monkeypatch.syspath_prepend(REPOSITORY / "docs")  # as for every script that Python runs
    runpy.run_path(str(REPOSITORY / "docs" / "build_configuration.py"), run_name="__main__")  # exits if it is not


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_field_of_every_command_has_a_row(program: str) -> None:
    assert _missing(compose_config(program)) == []


@pytest.mark.parametrize("choice", CHOICES)
def test_every_field_of_every_choice_has_a_row(choice: str) -> None:
    assert _missing(compose_config("layerskip", [choice])) == []


def test_every_program_is_on_the_page() -> None:
    assert {"layerskip", "train", "benchmark", "verify"} <= set(PROGRAMS)
    for path in CONF.glob("*.yaml"):
        assert path.stem in PROGRAMS or f"(../conf/{path.name})" in PAGE, path


def test_every_row_says_what_its_field_means() -> None:
    for row in ROWS:
        assert len(row) == 2 or row[2], row
    assert len(FIELDS) > 100
