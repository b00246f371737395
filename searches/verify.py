"""Measure an export again on this machine.

Usage: ``python -m searches.verify outputs/<study>/best.json [field=value]``
"""

import sys

from searches.app.application import run
from searches.app.exported import command_line
from searches.verification.verification import verify

if __name__ == "__main__":
    sys.argv[1:] = command_line(sys.argv[1:])
    run("verify", verify)
