"""Database and server URLs: of a file, and for display."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy

from searches.app.checks import InputError


def sqlite_url(file: Path) -> str:
    """Return the URL of an SQLite database in a file, whatever characters its path has.

    Raises:
        InputError: no URL can name the file, as with a question mark in SQLAlchemy 2.0.
    """
    path = str(file.resolve())
    # MLflow also creates the folder that follows "sqlite:///", as it stands there; with the driver's name it does not.
    quoted = "sqlite+pysqlite:///" + path.replace("%", "%25").replace("?", "%3F")
    for url in (f"sqlite:///{path}", quoted):
        if sqlite_file(url) == Path(path):
            return url
    raise InputError(f"outputs: the path of a database cannot have a question mark here, as in {path}; rename the folder")


def sqlite_file(url: str) -> Path | None:
    """Return the file of an SQLite database; None for another one, and for one in memory."""
    try:
        parts = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):  # of a port that is no number
        return None
    is_file = parts.get_backend_name() == "sqlite" and parts.database not in (None, "", ":memory:")
    return Path(str(parts.database)) if is_file else None


def without_password(url: str) -> str:
    """Return the URL of a database or server with its password hidden."""
    try:
        parts = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return url
    return url if parts.password is None else parts.render_as_string(hide_password=True)
