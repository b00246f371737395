"""Print how inference engines start with an export, or write the files that they need.

Usage: ``python -m searches.export outputs/<study>/best.json [engine=vllm] [model=FOLDER] [draft=FOLDER]``
"""

import sys

from searches.app.application import run
from searches.app.exported import command_line
from searches.exporting.program import export

if __name__ == "__main__":
    sys.argv[1:] = command_line(sys.argv[1:])
    run("export", export, resumable=False, is_printed=True)
