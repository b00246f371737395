"""A log of results: it keeps what was added, drops a partial last line, and names a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerskip import ConfigError
from searches.app.resume_log import ResultLog


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
