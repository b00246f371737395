"""docs/architecture.md names everything at the top of both packages."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("package", "title"), [("layerskip", "the library"), ("searches", "the programs")])
def test_every_module_and_folder_of_a_package_is_in_its_table(package: str, title: str) -> None:
    table = PAGE.partition(f"## Packages of {title}\n")[2].partition("\n## ")[0]
    modules = [path.name for path in (REPOSITORY / package).glob("*.py") if path.name != "__init__.py"]
    folders = [path.parent.name + "/" for path in (REPOSITORY / package).glob("*/__init__.py")]
    assert len(modules) > 5
    assert len(folders) > 5
    assert [name for name in (*modules, *folders, "data/") if f"`{name}`" not in table] == []


def test_every_path_on_the_page_exists() -> None:
    paths = {word.strip("`") for word in PAGE.split() if word.startswith(("`layerskip/", "`searches/"))}
    paths = {path.partition("`")[0] for path in paths}
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
