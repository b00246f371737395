"""Work shared by several processes: one of them does each part, and a killed one leaves its part to the others."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from searches.app.file_lock import exclusive, exclusive_if_free, share_work


def test_a_lock_is_free_until_it_is_held(tmp_path: Path) -> None:
    with exclusive_if_free(tmp_path / "file") as mine, exclusive_if_free(tmp_path / "file") as again:
        assert (mine, again) == (True, False)
    with exclusive(tmp_path / "file"), exclusive_if_free(tmp_path / "file") as mine:
        assert not mine


def test_work_of_other_processes_comes_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    free = threading.Event()

    def work(key: str) -> str:
        done.append(key)
        if key == "c":
            free.set()
        return key.upper()

    found: dict[str, str] = {}
    shared = threading.Thread(target=lambda: found.update(share_work({key: tmp_path / key for key in "abc"}, work)))
    with exclusive(tmp_path / "b"):
        shared.start()
        assert free.wait(10)
        assert done == ["a", "c"]
    shared.join(10)
    assert done == ["a", "c", "b"]
    assert found == {"a": "A", "b": "B", "c": "C"}
    assert capsys.readouterr().out.count("waiting for another program") <= 1


def test_an_error_releases_the_lock(tmp_path: Path) -> None:
    def fails(key: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        share_work({"a": tmp_path / "a"}, fails)
    assert share_work({"a": tmp_path / "a"}, str.upper) == {"a": "A"}
