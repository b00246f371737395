"""Compare masks with and without bridges.

Usage: ``python -m searches.bridges [field=value]``
"""

from searches.app.application import run
from searches.bridging.bridges import bridges

if __name__ == "__main__":
    run("bridges", bridges)
