"""docs/configuration.md lists every field of a study, says what it means, and is up to date."""

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
ROWS = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
FIELDS = {name.strip("`"): meaning for name, _, meaning in ROWS}
GROUPS = [name for name, meaning in FIELDS.items() if meaning.startswith("group")]
CHOICES = [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """The names of all values of a configuration; lists are values."""
    for name in map(str, node):
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing() and len(child):
            yield from _leaves(child, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}"


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["build_configuration.py", "--check"])
    monkeypatch.syspath_prepend(REPOSITORY / "docs")  # as for every script that Python runs
    return str(REPOSITORY / "docs" / "build_configuration.py")


def test_the_page_is_up_to_date(builder: str) -> None:
    runpy.run_path(builder, run_name="__main__")  # exits if it is not


@pytest.mark.parametrize("choice", CHOICES)
def test_every_field_of_every_choice_has_a_row(choice: str) -> None:
    assert [leaf for leaf in _leaves(compose_config("layerskip", [choice])) if leaf not in FIELDS] == []
    assert len(FIELDS) > 80


def test_every_program_is_on_the_page() -> None:
    assert [path.name for path in CONF.glob("*.yaml") if f"(../conf/{path.name})" not in PAGE] == ["layerskip.yaml"]


def test_the_files_of_commands_say_what_their_fields_mean(builder: str) -> None:
    module = runpy.run_path(builder)
    for program in module["PROGRAMS"]:
        commented = module["commented_fields"](CONF / f"{program}.yaml")
        known = {*FIELDS, *(name for name, (_, meaning) in commented.items() if meaning)}
        named_by_users = ("drafter.", "contenders.", "peers.")
        leaves = [leaf for leaf in _leaves(compose_config(program)) if not leaf.startswith(named_by_users)]
        assert [leaf for leaf in leaves if leaf not in known] == [], program
