"""Train a head or bridges that draft for a target.

Usage: ``python -m searches.train drafter=eagle [field=value]``
"""

from searches.app.application import run
from searches.train.program import train

run("train", train)
