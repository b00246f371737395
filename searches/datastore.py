"""Build or inspect a datastore that ``retrieval`` drafts from.

Usage: ``python -m searches.datastore [field=value]``
"""

from searches.app.application import run
from searches.training.datastores import datastore

if __name__ == "__main__":
    run("datastore", datastore, is_printed=True)
