"""Engines as back ends: the contract of all back ends, with transformers as an engine that is one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerskip import Export, SpeculativeConfig, Target, load_target
from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.backends.backend import BackendError, Workload
from searches.backends.selection import exported_backend
from searches.engines.backend import EngineBackend
from searches.space.search_space import SearchSpace
from tests.engines.known import SIZES, interpreter
from tests.searches.backends.contract import BackendContract, measure
from tests.tiny import save_tiny

pytestmark = pytest.mark.system


@pytest.fixture
def make(reference_engine: str, tmp_path: Path) -> Callable[[Target], EngineBackend]:
    return lambda target: EngineBackend(target, engine=reference_engine, cache_folder=str(tmp_path / "engines"))


class TestEngineBackend(BackendContract):
    """The contract, and what is particular to engines in processes."""

    def test_an_engine_that_does_not_start_fails_alone(
        self, make: Callable[[Target], EngineBackend], tiny_target: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BROKEN", "load")
        backend = make(tiny_target)
        with pytest.raises(BackendError, match="^backend: fifth: .*no such model"):
            measure(backend, self.config)
        backend.close()


@pytest.mark.slow
class TestOpenVino(BackendContract):
    """The contract of an engine that ``make engines`` installs."""

    @pytest.fixture
    def tiny_target(self, tmp_path: Path) -> Target:
        """It soon repeats itself."""
        return load_target(str(save_tiny(tmp_path / "model", idle=(0, 1, 2), **SIZES)), dtype="float32", device="cpu")

    @pytest.fixture
    def make(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
        python = Path(interpreter("openvino_genai"))
        monkeypatch.setenv("LAYERSKIP_ENGINES", str(python.parents[2]))
        folder = tmp_path_factory.getbasetemp() / "real engines"
        return lambda target: EngineBackend(target, engine="openvino_genai", cache_folder=str(folder))


def test_what_engines_do_not_have_is_refused_by_field(
    make: Callable[[Target], EngineBackend], tiny_target: Target, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="^backend.engine: 'sixth' is not one of fifth$"):
        EngineBackend(tiny_target, engine="sixth")
    with pytest.raises(InputError, match="^backend.schedule: "):
        EngineBackend(tiny_target, engine="fifth", schedule=[[1, 2, 3]])
    space = make(tiny_target).restrict(SearchSpace(tiny_target.layers, methods=["none", "prompt_lookup"]))
    assert space.values("prompt_lookup", "prompt_lookup_min") == (1, 1)
    export = Export({}, SpeculativeConfig(), environment={"backend": {"name": "engine", "engine": "fifth"}})
    backend, workload = exported_backend(compose_config("verify"), export, tiny_target)
    assert isinstance(backend, EngineBackend) and backend.engine == "fifth" and workload == Workload()
    with pytest.raises(InputError, match="^backend.engine: the export was measured with fifth"):
        exported_backend(compose_config("verify", ["backend=engine", "backend.engine=vllm"]), export, tiny_target)
