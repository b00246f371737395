"""Configuration of all tests: no network, few threads, and models that are loaded once.

The process that starts the workers reads this file, too. It needs none of the libraries that take seconds to import, so
functions import them.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Set before the hub's client and MLflow are imported, which read their environment on import.
os.environ |= {"HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
os.environ["LAYERSKIP_ENGINES"] = os.devnull  # tests name the engines that they run
# One thread per pytest-xdist worker, for NumPy, SciPy and the compiler too, which need not try what the processor can.
os.environ |= (
    {
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1"),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    if "PYTEST_XDIST_WORKER" in os.environ
    else {}
)
# Without a GPU, Triton's kernels are interpreted.
os.environ |= {"TRITON_INTERPRET": "1"} if os.environ.get("LAYERSKIP_TEST_DEVICE", "cpu") == "cpu" else {}

import pytest

from tests.accelerator import DEVICE
from tests.resources import keep_imports

if TYPE_CHECKING:
    from layerskip import Target

# Background jobs of a shell ignore SIGINT, and the programs that the tests start and interrupt would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _files_with(pattern: str) -> set[str]:
    """Return the names of the test files that match a regular expression, relative to the repository."""
    tests = Path(__file__).parent
    files = {path: path.relative_to(tests.parent).as_posix() for path in tests.rglob("test_*.py")}
    return {name for path, name in files.items() if re.search(pattern, path.read_text(encoding="utf-8"))}


def _scopes() -> dict[str, str]:
    """Return the scopes of files that share what takes seconds to make: the real model, or processes and a study."""
    forking = _files_with(r"from tests\.searches\.(programs import [^)]*\b(FORKS|Fork|execute|fork)\b|workers\.members)")
    programs = forking | _files_with("finished_study: Path")
    return dict.fromkeys(programs, "programs") | dict.fromkeys(_files_with("smollm2: Target"), "smollm2")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of few slow tests, so that no worker waits long for the last file of another one."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        scopes, slow = _scopes(), _files_with(r"tests\.searches\.programs|launch: Launch")
        files = [item.nodeid.partition("::")[0] for item in items]
        counts = Counter(files)
        order = {file: (scopes.get(file, "~"), file not in slow, -counts[file], file) for file in counts}
        items[:] = [item for _, item in sorted(zip(files, items, strict=True), key=lambda pair: order[pair[0]])]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """With ``--dist loadfile``, run all files of a scope in one worker."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
    scopes = _scopes()

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return scopes.get(file, file)

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Use few threads and collect little garbage.

    Tiny models do not gain from more threads, and on a busy machine waiting threads are slow.
    """
    import torch

    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))
    gc.collect()
    keep_imports()


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The threads that torch uses in the test."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama with a chat template."""
    from tests.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def finished_study(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of a finished study named ``one``, which began with five trials."""
    from tests.searches.programs import command, environment, quick

    outputs = tmp_path_factory.mktemp("finished") / "outputs"
    result = subprocess.run(
        command("layerskip", *quick(tiny_folder, outputs, "study.n_trials=5", "study.name=one")),
        cwd=outputs.parent, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Finalists" in result.stdout
    return outputs


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
def tiny_target(tiny_folder: Path) -> Target:
    """The tiny Llama in float32."""
    from layerskip import load_target

    return load_target(str(tiny_folder), dtype="float32", device=DEVICE)


@pytest.fixture(scope="session")
def smollm2() -> Target:
    """SmolLM2-135M-Instruct in float32."""
    from layerskip import load_target
    from tests.tiny import reading_once

    with pytest.MonkeyPatch.context() as patch:
        reading_once(patch)
        return load_target("smollm2", dtype="float32", device=DEVICE)
