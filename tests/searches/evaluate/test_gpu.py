"""Tests of ``searches.evaluate.gpu``: the floor, rows, failures and the record."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from layerskip import load_target
from layerskip.costs.parts import time_kernels, time_pass
from layerskip.device.trial import HAS_TRITON
from layerskip.models import compiled_layers
from searches.app.composition import compose_config
from searches.evaluate.criteria import random_target
from searches.evaluate.gpu import Rows, compare_compilation, compare_peer, floor_tokens_per_second, rows_of, time_draft
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
    small = ["measure.max_new_tokens=8", "measure.prompts=2", "context=70", "shapes=null", "programs=null"]
    return [*target, *small, f"outputs={tmp_path}"]


def _rows(overrides: list[str]) -> Rows:
    """Rows with two random shapes, of which one cannot be made."""
    config = compose_config("gpu", overrides)
    config.shapes = {"tiny": TINY, "broken": TINY | {"num_attention_heads": 0}}
    return Rows(config)


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


@pytest.mark.parametrize(("peer", "name"), [("transformers_static", "target"), ("transformers", "tiny")])
def test_transformers_is_measured_beside_plain_decoding(peer: str, name: str, overrides: list[str]) -> None:
    row = compare_peer(_rows(overrides), name, peer)
    assert row["over_plain"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
    assert row["share_of_floor"] == pytest.approx(row["over_plain"] * row["plain_share_of_floor"])
    assert row["plain_share_of_floor"] > 0
    assert name == "tiny" or row["losslessness"]["verdict"] == "exact"


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
    rows = _rows(overrides)
    rows.attempt("broken", partial(compare_peer, rows, "broken", "transformers"))
    rows.attempt("good", partial(compare_peer, rows, "target", "transformers"))
    rows.attempt("refused", partial(time_draft, rows, "tiny", "int8"))
    rows.deadline = 0.0
    rows.attempt("late", partial(compare_peer, rows, "target", "transformers"))
    written = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert [sorted(row) == ["error"] for row in written["rows"].values()] == [True, False, False, False]
    assert written["rows"]["good"]["tokens_per_second"] > 0
    assert "not packed" in written["rows"]["refused"]["left_out"]
    assert written["rows"]["late"] == {"left_out": "no time was left"}


def test_a_second_call_measures_what_is_missing(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what failed, or ended the program. With other settings, a call begins anew."""
    monkeypatch.setattr("searches.evaluate.gpu.copy_bandwidth", lambda device: 1e9)
    measured: list[str] = []

    def measure(name: str, error: type[BaseException] | None = None) -> dict[str, Any]:
        measured.append(name)
        if error is not None:
            raise error
        return {"value": len(measured)}

    first = _rows(overrides)
    first.attempt("done", partial(measure, "done"))
    first.attempt("failed", partial(measure, "failed", OSError))
    with pytest.raises(KeyboardInterrupt):
        first.attempt("interrupted", partial(measure, "interrupted", KeyboardInterrupt))
    first.deadline = 0.0
    first.attempt("late", partial(measure, "late"))
    first._write("hung", {"error": "it did not end"})
    second = _rows([*overrides, "seconds=100"])
    names = ["done", "failed", "interrupted", "late", "hung"]
    for name in names:
        second.attempt(name, partial(measure, name))
    assert measured == ["done", "failed", "interrupted", "interrupted", "late"]
    assert second.rows["done"] == {"value": 1} and second.rows["late"] == {"value": 5}
    assert _rows([*overrides, "seed=3"]).rows == {}


def test_rows_of_a_gpu_begin_with_what_says_most(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest random model is made twice at most, and formats of drafts come for all sizes."""
    monkeypatch.setattr("searches.evaluate.gpu.copy_bandwidth", lambda device: 1e9)
    rows = Rows(compose_config("gpu", [each for each in overrides if each not in ("shapes=null", "programs=null")]))
    rows.target = Mock(wraps=rows.target, device=torch.device("cuda"), model=rows.target.model)
    names = [name for name, _ in rows_of(rows)]
    assert len(names) == len(set(names))
    order = ["card", "target, attention", "llama_8b, down", "target, captured pass of 1", "target, verification"]
    order += [
        "llama_8b, captured pass of 1",
        "llama_8b, transformers_static",
        "llama_8b, layer_skip",
        "target, transformers_static",
    ]
    order += [
        "target, lookup_recycling",
        "target, layer_skip",
        "llama_3b, transformers",
        "llama_1b, transformers",
        "study",
        "tests",
    ]
    assert [name for name in names if name in order] == order
    assert {f"{name}, draft of {weights}" for name in PARAMETERS for weights in ("int8", "int4")} <= {*names}


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_kernels_are_timed_beside_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerskip.costs.parts.ROWS", (3,))
    monkeypatch.setattr("layerskip.costs.parts._KEYS", (40,))
    rows = dict(time_kernels(TINY, torch.float16, torch.device(DEVICE)))
    assert len(rows) == 6
    for name, entry in (("attention", "3 to 40"), ("gate and up", "3"), ("down", "3")):
        assert set(found := rows[name]()) == {entry}
        assert min(found[entry].values()) > 0


@pytest.mark.parametrize("packs", [True, False])
def test_the_parts_of_a_pass_add_up_to_it(packs: bool, tiny_folder: Path) -> None:
    """Also where our kernels take the time of none of them."""
    target = load_target(str(tiny_folder), dtype="float32", device=DEVICE, pack_weights=packs)
    row = time_pass(target, rows=4, context=20, captured=False)
    total = row.pop("milliseconds")
    if DEVICE == "cpu":
        assert sum(row.values()) == pytest.approx(total)
        assert min(row["products"], row["other operators"], total) > 0
    else:
        assert row["kernels"] > 0 and len(row["slowest_microseconds"]) > 0


def test_the_program_writes_its_record_and_fails_with_an_error(overrides: list[str], tmp_path: Path, launch: Launch) -> None:
    programs = "programs={study: '{python} -c \"print(7)\"', tests: '{python} -c \"raise SystemExit(5)\"'}"
    overrides = [*overrides, "card=no-such-program", "drafters={prompt_lookup: {method: prompt_lookup}}", programs]
    done = launch("evaluate.gpu", *overrides, "target.compile=off", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("errors in: tests\n")
    record = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert record["schema"] == "layerskip.gpu/3"
    assert record["bandwidth"] > 0
    rows = record["rows"]
    assert rows["card"] == {"left_out": "there is no no-such-program"}
    assert rows["study"] == {"output": "7"} and "error" in rows["tests"]
    assert list(rows["target, verification"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert rows["target, transformers"]["losslessness"]["verdict"] == "exact"
    assert rows["target, prompt_lookup"]["losslessness"]["verdict"] == "exact"
    assert {name.rpartition(", ")[2] for name in rows} >= {"pass of 1", "pass of 16", "transformers_static", "draft of int4"}
