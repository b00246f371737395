"""An example of the pages that runs as a program: ``python -m tests.docs.example <file>``.

GGUF files are parsed once, as in the tests' own process.
"""

import runpy
import sys

import pytest

from tests.tiny import reading_once

if __name__ == "__main__":
    reading_once(pytest.MonkeyPatch())
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
