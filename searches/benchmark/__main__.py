"""Measure named configurations and transformers' own decoding methods side by side.

Usage: ``python -m searches.benchmark [config=best.json] [field=value]``
"""

from searches.app.application import run
from searches.benchmark.program import benchmark

run("benchmark", benchmark, resumable=False)
