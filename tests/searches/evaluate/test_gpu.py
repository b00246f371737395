"""Tests of ``searches.evaluate.gpu``: the floor, rows, failures and the record."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip.models import compiled_layers
from searches.app.composition import compose_config
from searches.evaluate.criteria import random_target
from searches.evaluate.gpu import Rows, compare_compilation, compare_peer, floor_tokens_per_second
from tests.accelerator import DEVICE, compile_anywhere
from tests.searches.conftest import Launch

pytestmark = pytest.mark.system

TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 512,
}  # fmt: skip
PARAMETERS = {"llama_1b": 1_235_814_400, "llama_3b": 3_212_749_824, "llama_8b": 8_030_261_248}
"""As published with the models, tied weights once."""


@pytest.fixture
def overrides(tiny_folder: Path, tmp_path: Path) -> list[str]:
    """Of a small run."""
    target = ["target=local", f"target.path={tiny_folder}", "target.dtype=float32", f"target.device={DEVICE}"]
    return [*target, "measure.max_new_tokens=8", "measure.prompts=2", "shapes=null", f"outputs={tmp_path}"]


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_shapes_have_the_published_numbers_of_parameters(name: str) -> None:
    shape = compose_config("gpu").shapes[name]
    target = random_target(dict(shape), "bfloat16", torch.device("meta"))
    assert target.eos_ids == frozenset()
    assert sum(weight.numel() for weight in target.model.parameters()) == PARAMETERS[name]


def test_the_floor_is_the_time_of_reading_weights_and_cache() -> None:
    floor = floor_tokens_per_second(random_target(TINY, "float32", torch.device(DEVICE)), context=10, bandwidth=1e9)
    attention = 2 * 32 * 32 + 2 * 32 * 16  # query and output; key and value of half as many heads
    weights = 2 * (attention + 3 * 32 * 48 + 2 * 32) + 32 + 512 * 32  # two layers, the last norm, the output layer
    cache = 2 * 2 * 2 * 8  # keys and values, layers, heads, dimensions
    assert floor == pytest.approx(1e9 / (4 * (weights + 10 * cache)))


@pytest.mark.parametrize(("peer", "shape"), [("transformers_static", None), ("transformers", TINY)])
def test_transformers_is_measured_beside_plain_decoding(
    peer: str, shape: dict[str, Any] | None, overrides: list[str]
) -> None:
    row = compare_peer(Rows(compose_config("gpu", overrides)), shape, peer)
    assert row["over_plain"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
    assert row["share_of_floor"] == pytest.approx(row["over_plain"] * row["plain_share_of_floor"])
    assert row["plain_share_of_floor"] > 0
    assert shape or row["losslessness"]["verdict"] == "exact"


@pytest.mark.parametrize("compiles", [True, False])
def test_plain_decoding_has_a_row_with_and_without_compiled_layers(
    compiles: bool, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where compiling fails the row says so."""
    runs = []

    def run(*args: Any) -> Any:
        runs.append(1)
        return compiled_layers._run(*args) if compiles else compiled_layers._run(*args, "one too many")  # type: ignore[call-arg]

    compile_anywhere(monkeypatch)
    monkeypatch.setattr(compiled_layers, "_compiled_run", lambda fuses: run)
    row = compare_compilation(Rows(compose_config("gpu", overrides)), "other")
    assert runs
    if compiles:
        assert row["losslessness"]["verdict"] == "exact"
    else:
        assert row == {"left_out": "its layers could not be compiled"}


def test_a_row_that_fails_or_comes_too_late_leaves_the_others(overrides: list[str], tmp_path: Path) -> None:
    rows = Rows(compose_config("gpu", overrides))
    rows.attempt("broken", partial(compare_peer, rows, TINY | {"num_attention_heads": 0}, "transformers"))
    rows.attempt("good", partial(compare_peer, rows, None, "transformers"))
    rows._deadline = 0.0
    rows.attempt("late", partial(compare_peer, rows, None, "transformers"))
    written = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert [sorted(row) == ["error"] for row in written["rows"].values()] == [True, False, False]
    assert written["rows"]["good"]["tokens_per_second"] > 0
    assert written["rows"]["late"] == {"left_out": "no time was left"}


def test_the_program_writes_its_record_and_fails_with_an_error(overrides: list[str], tmp_path: Path, launch: Launch) -> None:
    done = launch("evaluate.gpu", *overrides, "target.compile=off", "measure.max_new_tokens=1", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("errors in: target transformers, target transformers_static\n")
    record = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert record["schema"] == "layerskip.gpu/2"
    assert record["bandwidth"] > 0
    assert "every output ends with its first token" in record["rows"]["target transformers"]["error"]
