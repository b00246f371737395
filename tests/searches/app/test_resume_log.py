"""A log of results: it keeps what was added, drops a partial last line, and names a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerskip import ConfigError
from searches.app.resume_log import ResultLog
from tests.disk import fill


def test_results_are_there_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    log = ResultLog(path)
    log.add("a", {"value": 1})
    log.add("b", [2])
    log.add("c", 3, persist=False)
    assert (list(log), len(log), log["c"], "d" in log) == (["a", "b", "c"], 3, 3, False)
    again = ResultLog(path)
    assert {name: again[name] for name in again} == {"a": {"value": 1}, "b": [2]}
    assert list(ResultLog(None)) == []


@pytest.mark.parametrize("partial", ['["b", {"va', '["b", 2]'])
def test_a_partial_last_line_is_dropped(tmp_path: Path, partial: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'["a", 1]\n{partial}')
    log = ResultLog(path)
    assert list(log) == ["a"]
    log.add("c", 3)
    assert path.read_text() == '["a", 1]\n["c", 3]\n'


@pytest.mark.parametrize("line", ["{", "5", '["a"]', '["a", 1, 2]'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'["a", 1]\n{line}\n["b", 2]\n')
    with pytest.raises(ConfigError, match=f"^outputs: {path} is damaged in line 2; delete it"):
        ResultLog(path)


@pytest.mark.parametrize("line", [b"{\n", b'["a"]\n', bytes(80), bytes(80) + b"\n"])
def test_a_damaged_last_line_is_dropped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'["a", 1]\n' + line)
    assert list(ResultLog(path)) == ["a"]
    assert path.read_bytes() == b'["a", 1]\n'


def test_a_value_that_does_not_fit_on_the_disk_leaves_whole_lines(small_disk: Path) -> None:
    path = small_disk / "log.jsonl"
    log = ResultLog(path)
    log.add("a", 1)
    fill(small_disk, 50_000)
    with pytest.raises(OSError, match="No space left on device") as refusal:
        log.add("b", "x" * 100_000)
    assert refusal.value.filename == str(path)
    (small_disk / "ballast").unlink()
    log.add("c", 3)
    assert list(ResultLog(path)) == ["a", "c"]
