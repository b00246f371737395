"""Generated pages: writing one, or the check that it is up to date."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]


def write_or_check(name: str, lines: Iterable[str]) -> None:
    """Writes a page. With ``--check`` it stays as it is, and the script ends with exit code 1 where it is stale."""
    page = DOCS / name
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"
    if "--check" not in sys.argv[1:]:
        page.write_text(text, encoding="utf-8")
    elif not page.exists() or page.read_text(encoding="utf-8") != text:
        sys.exit(f"docs/{name} is stale: run .venv/bin/python docs/{Path(sys.argv[0]).name}")
