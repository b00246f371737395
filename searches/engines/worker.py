"""A process that decodes with an inference engine, under the interpreter in which the engine is installed.

Of this project it runs only the file of the engine (:mod:`searches.engines.adapters`), which its argument names, so that the
engine's packages and ours need not fit together. Requests and answers are lines of JSON on its standard input and output:
first the settings, answered when the model is loaded. Each further line is a prompt, answered by a line when its first
tokens are known, and by another at the end. It ends with its input.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import types
from collections.abc import Iterable
from typing import Any, TextIO


def main() -> None:
    """Load the engine with the settings of the first line, and decode the prompts of the others."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # what libraries print goes to the log
        _serve(load_adapter(sys.argv[1]), sys.stdin, answers)


def load_adapter(file: str) -> Any:
    """Return what an engine's file defines, by its names."""
    return types.SimpleNamespace(**runpy.run_path(file))


def _serve(adapter: Any, requests: Iterable[str], answers: TextIO) -> None:
    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    lines = iter(requests)
    engine = adapter.Engine(json.loads(next(lines)))
    answer(version=engine.version, precision=engine.precision)
    lengths: list[int] = []  # the number of tokens that are known after each round

    def on_round(count: int) -> None:
        lengths.append(lengths[-1] + count if lengths else count)
        if len(lengths) == 1:
            answer(first=count)

    for line in lines:
        lengths.clear()
        tokens = engine.decode(json.loads(line), on_round)
        if not lengths:  # it showed no token before the end
            on_round(len(tokens))
        answer(tokens=[int(token) for token in tokens], lengths=lengths)


if __name__ == "__main__":
    main()
