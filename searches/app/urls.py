"""Addresses of databases and servers, as they may be shown."""

from __future__ import annotations

import sqlalchemy


def without_password(url: str) -> str:
    """A database's or server's URL as it may be shown."""
    try:
        return sqlalchemy.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return url
