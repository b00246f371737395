"""The arguments of ``python -m searches.verify``: a leading path is the export."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from searches.app.exported import command_line


@pytest.mark.parametrize(
    "path",
    [
        "best.json",
        "out puts/a,b/best.json",
        "it's.json",
        "a\\b.json",
        "a\\'b.json",
        "tail\\",
        "[x](y){z}.json",
        "null",
        "12",
    ],
)
def test_a_leading_path_reaches_hydra_unchanged(path: str) -> None:
    first, *rest = command_line([path, "seed=1"])
    override = OverridesParser.create().parse_override(first)
    assert (override.key_or_group, override.value(), rest) == ("export", path, ["seed=1"])


@pytest.mark.parametrize("arguments", [[], ["export=best.json"], ["--help"], ["-m", "seed=0,1"], ["~prompts"]])
def test_other_arguments_are_left_to_hydra(arguments: list[str]) -> None:
    assert command_line(arguments) == arguments
