"""Configuration of all tests: no network, few threads, and models that are loaded once."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set before the hub's client and MLflow are imported, which read their environment on import.
os.environ |= {"HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
# One thread per pytest-xdist worker, for NumPy and SciPy too.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} if "PYTEST_XDIST_WORKER" in os.environ else {}

import gguf
import pytest
import torch

import layerskip
from tests.accelerator import DEVICE
from tests.tiny import save_tiny

# Background jobs of a shell ignore SIGINT, and the programs that the tests start and interrupt would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny models do not gain from more threads, and on a busy machine waiting threads are slow.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))


def _files_with(text: str) -> set[str]:
    """Return the names of the test files that contain a text, relative to the repository."""
    tests = Path(__file__).parent
    files = {path: path.relative_to(tests.parent).as_posix() for path in tests.rglob("test_*.py")}
    return {name for path, name in files.items() if text in path.read_text(encoding="utf-8")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of few slow tests, so that no worker waits long for the last file of another one."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = _files_with("smollm2: Target") | _files_with("tests.searches.programs") | _files_with("launch: Launch")
        files = [item.nodeid.partition("::")[0] for item in items]
        counts = Counter(files)
        order = {file: (file not in slow, -counts[file], file) for file in counts}
        items[:] = [item for _, item in sorted(zip(files, items, strict=True), key=lambda pair: order[pair[0]])]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """With ``--dist loadfile``, run all files that use the real model in one worker, which loads it once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
    real = _files_with("smollm2: Target")

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "smollm2" if file in real else file

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Exclude all imported objects from garbage collection, which would scan them again and again, and collect less often.

    So few other objects are left that Python would look through all of them all the time. Tests that need a collection ask
    for one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama with a chat template."""
    return save_tiny(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own; skips the test if it cannot be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    completed = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(folder)], capture_output=True)
    if completed.returncode:
        pytest.skip("cannot mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Path) -> layerskip.Target:
    """The tiny Llama in float32."""
    return layerskip.load_target(str(tiny_folder), dtype="float32", device=DEVICE)


@pytest.fixture(scope="session")
def smollm2() -> layerskip.Target:
    """SmolLM2-135M-Instruct in float32.

    Transformers parses the file three times and builds the table of names once per tensor; here each is made once, which
    saves two thirds of the time of loading.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return layerskip.load_target("smollm2", dtype="float32", device=DEVICE)
