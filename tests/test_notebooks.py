"""The notebook runs on the output of the programs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.searches.programs import REPOSITORY

pytestmark = pytest.mark.system

NOTEBOOKS = REPOSITORY / "notebooks"


def _run(name: str) -> str:
    """Execute a notebook and return its text output."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(str(output.get("text", "") or output.get("data", {}).get("text/plain", "")) for output in outputs)


def test_the_study_notebook_reads_a_study(finished_study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERSKIP_OUTPUTS", str(finished_study))
    text = _run("study.ipynb")
    assert "one" in text
    assert "prompt lookup" in text
