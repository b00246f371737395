"""Writes ``docs/configuration.md`` from ``conf/`` and the types behind it; with ``--check``, says whether it is stale."""

from pages.configuration.page import page
from pages.generated import write_or_check

if __name__ == "__main__":
    write_or_check("configuration.md", page())
