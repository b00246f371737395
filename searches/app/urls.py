"""Database and server URLs for display."""

from __future__ import annotations

import sqlalchemy


def without_password(url: str) -> str:
    """Return the URL of a database or server with its password hidden."""
    try:
        return sqlalchemy.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return url
