"""Search for the fastest lossless decoding of a target, confirm it on held-out prompts, and export it.

Usage: ``python -m searches.layerskip [group=choice] [field=value]``
"""

from searches.app.application import run
from searches.sweep import search

if __name__ == "__main__":
    run("layerskip", search)
