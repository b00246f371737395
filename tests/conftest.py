"""What all tests share: no network, few threads, and models that are loaded once."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Before anything imports the hub's client or MLflow: both read their environment when imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}

import pytest
import torch

import layerskip
from tests.accelerator import DEVICE
from tests.tiny import save_tiny

# A shell's background jobs ignore SIGINT, and so would every program that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny models gain nothing from more, and on a busy machine threads that wait for each other lose a lot.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))


def pytest_collection_finish() -> None:
    """Let who collects garbage not look through all that was imported, again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a chat template, as ``load_target`` reads it."""
    return save_tiny(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room, where the machine lets us make one."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("cannot mount a file system here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Path) -> layerskip.Target:
    """The tiny Llama in float32."""
    return layerskip.load_target(str(tiny_folder), dtype="float32", device=DEVICE)


@pytest.fixture(scope="session")
def smollm2() -> layerskip.Target:
    """The real SmolLM2-135M-Instruct in float32; loading it takes some 12 seconds."""
    return layerskip.load_target("smollm2", dtype="float32", device=DEVICE)
