"""Fixtures of engines: a target, and an interpreter with stand-ins of OpenVINO's packages."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from layerskip import Target, load_target
from searches.engines import peer as peers
from tests.searches.engines import reference
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


@pytest.fixture
def reference_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a fifth engine, which decodes with transformers; its file is the only one."""
    shutil.copy(reference.__file__, tmp_path / "fifth.py")
    installed = tmp_path / ".engines" / "fifth" / "bin" / "python"
    installed.parent.mkdir(parents=True)
    installed.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    installed.chmod(0o755)
    monkeypatch.setenv("LAYERSKIP_ENGINES", str(tmp_path / ".engines"))
    monkeypatch.setattr(peers, "ADAPTERS", tmp_path)
    monkeypatch.setattr(peers, "ENGINES", ("fifth",))
    return "fifth"
