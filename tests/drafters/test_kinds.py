"""Every kind of drafter is one file, small, that names what it follows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from layerskip import SpeculativeConfig, drafters

FOLDER = Path(drafters.__path__[0])
OURS = {"cascade"}  # follows no paper


@pytest.mark.parametrize("kind", [kind for kind in SpeculativeConfig._FIELDS if kind != "none"])
def test_a_kind_is_one_small_file_with_its_paper_at_its_head(kind: str) -> None:
    source = (FOLDER / f"{kind}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 250
    head = ast.get_docstring(ast.parse(source)) or ""
    assert bool(re.search(r"arXiv\s\d{4}\.\d{5}", head)) == (kind not in OURS)
