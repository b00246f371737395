"""Train a head or bridges that draft for a target.

Usage: ``python -m searches.train drafter=eagle [field=value]``
"""

from searches.app.application import run
from searches.training.train import train

if __name__ == "__main__":
    run("train", train)
