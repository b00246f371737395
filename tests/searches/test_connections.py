"""URLs of databases: they name their file, whatever its path, and hide passwords."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy

from searches.connections import sqlite_file, sqlite_url, without_password


@pytest.mark.parametrize("name", ["plain", "q?x=1", "50%20off", "a%3Fb%", "#é [x]'y,=+&:@"])
def test_the_url_of_a_file_names_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    url = sqlite_url(file)
    assert (sqlite_file(url), without_password(url)) == (file, url)
    with sqlalchemy.create_engine(url).begin() as connection:
        connection.exec_driver_sql("CREATE TABLE t (a)")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("url", ["http://host/x", "sqlite://", "sqlite:///:memory:", "mlruns", "postgresql://h:x/y"])
def test_other_urls_name_no_file(url: str) -> None:
    assert sqlite_file(url) is None
    assert without_password(url) == url


def test_a_password_is_hidden() -> None:
    assert without_password("postgresql://me:secret@host/it") == "postgresql://me:***@host/it"
