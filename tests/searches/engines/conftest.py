"""Fixtures of engines: a target, and an interpreter with stand-ins of OpenVINO's packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from layerskip import Target, load_target
from tests.searches.engines.packages import OPENVINO, OPENVINO_GENAI
from tests.tiny import save_tiny

_CONVERTER = """
import json, os, sys
if os.environ.get("BROKEN") == "convert":
    sys.exit("loading\\nan unknown architecture\\n")
folder = sys.argv[-1]
os.makedirs(folder)
source = sys.argv[sys.argv.index("--model") + 1]
assert os.path.exists(os.path.join(source, "model.safetensors"))
json.dump({"from": source}, open(os.path.join(folder, "converted.json"), "w"))
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny(tmp_path_factory.mktemp("target"))), dtype="float32", device="cpu")


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter in which stand-ins of the engine's packages are installed."""
    packages = tmp_path / "packages"
    (packages / "optimum" / "commands").mkdir(parents=True)
    (packages / "openvino_genai.py").write_text(OPENVINO_GENAI)
    (packages / "openvino.py").write_text(OPENVINO)
    (packages / "optimum" / "commands" / "optimum_cli.py").write_text(_CONVERTER)
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)
