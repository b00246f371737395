"""Every method is one file that names the papers it follows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from layerskip import drafters
from layerskip.config import methods

FOLDER = Path(drafters.__path__[0])
PAPERS = {
    "layer_skip": ("2309.08168", "2410.06916"),  # Draft & Verify, SWIFT
    "prompt_lookup": ("2304.04487",),
    "retrieval": ("2311.08252", "2411.04975"),  # REST, SuffixDecoding
    "token_recycling": ("2408.08696",),
    "lookahead": ("2402.02057",),
    "eagle": ("2401.15077", "2406.16858", "2503.01840"),  # EAGLE, -2, -3
    "medusa": ("2401.10774",),
    "draft_model": ("2211.17192",),
    "cross_tokenizer": ("2502.05202",),
    "cascade": (),  # follows none
}


@pytest.mark.parametrize("method", [method for method in methods() if method != "none"])
def test_a_method_is_one_file_that_names_its_papers(method: str) -> None:
    source = (FOLDER / f"{method}.py").read_text(encoding="utf-8")
    head = ast.get_docstring(ast.parse(source)) or ""
    named = re.findall(r"arXiv\s(\d{4}\.\d{5})", head)
    assert set(PAPERS[method]) <= set(named)
    assert bool(named) == bool(PAPERS[method])
