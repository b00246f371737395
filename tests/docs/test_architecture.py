"""docs/architecture.md names everything at the top of both packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["layerskip", "searches"])
def test_every_module_and_folder_of_a_package_is_in_the_picture(package: str) -> None:
    picture = re.search(rf"^{package}/(.*?)(```|──)", PAGE, re.S | re.M)
    assert picture is not None
    modules = [path.name for path in (REPOSITORY / package).glob("*.py") if path.name != "__init__.py"]
    folders = [path.parent.name + "/" for path in (REPOSITORY / package).glob("*/__init__.py")]
    assert len(modules) > 5
    assert len(folders) > 5
    assert [name for name in (*modules, *folders, "data/") if name not in picture[1].split()] == []


def test_every_path_on_the_page_exists() -> None:
    paths = re.findall(r"`((?:layerskip|searches)/[\w./]*)", PAGE)
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
