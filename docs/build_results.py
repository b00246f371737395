"""Writes ``docs/results.md`` from the records in ``notebooks/records``; with ``--check``, says whether the page is stale."""

from pages.generated import write_or_check
from pages.results.page import page

if __name__ == "__main__":
    write_or_check("results.md", page())
