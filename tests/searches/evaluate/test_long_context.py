"""Tests of ``searches.evaluate.long_context`` on models that are smaller still."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.searches.conftest import Launch

pytestmark = pytest.mark.system

PROGRAM = "evaluate.long_context"
SMALL = (
    *("sizes.hidden_size=32", "sizes.intermediate_size=48", "sizes.head_dim=8", "models.windows.sliding_window=64"),
    *("lengths=[256,128,512]", "new_tokens=6", "repeats=1"),
)


def test_memory_and_times_of_every_length_are_recorded(tmp_path: Path, launch: Launch) -> None:
    done = launch(PROGRAM, *SMALL, f"outputs={tmp_path}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "long-context.json").read_text())
    assert record["rows"].keys() == {"full", "windows"}
    for rows in record["rows"].values():
        assert [row["tokens"] for row in rows] == [128, 256, 512]
        assert all(row["prefill_seconds"] > 0 and row["step_seconds"] > 0 for row in rows)
    # The cache alone: keys and values of 2 layers, 4 heads of 8 and 2 heads of 8, in float32.
    full, windows = (record["rows"][name][-1]["peak_bytes"] for name in ("full", "windows"))
    assert full > 512 * 2 * 2 * 4 * 8 * 4
    assert windows > 512 * 2 * 2 * 2 * 8 * 4
