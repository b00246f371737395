"""Compare masks with and without bridges.

Usage: ``python -m searches.bridges [field=value]``
"""

from searches.app.application import run
from searches.bridges.program import bridges

run("bridges", bridges)
