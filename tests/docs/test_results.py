"""The page of results says what the records say, and names each of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RECORDS = REPOSITORY / "notebooks" / "records"


def _check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "docs" / "build_results.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_page_is_what_the_records_make() -> None:
    done = _check(REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_a_stale_page_is_told_in_one_line(tmp_path: Path) -> None:
    shutil.copytree(RECORDS, tmp_path / "notebooks" / "records")
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    page = tmp_path / "docs" / "results.md"
    page.write_text(page.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    done = _check(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "stale" in done.stderr


def test_every_record_is_on_the_page() -> None:
    page = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    assert [path.name for path in RECORDS.iterdir() if path.name not in page] == []


def test_the_records_are_few() -> None:
    assert len(list(RECORDS.iterdir())) <= 25
