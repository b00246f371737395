"""Tests of ``searches.evaluate.gpu``: floors, rows, parts that hang or fail, and the record."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import Sampling, Target
from layerskip.measure.measure import Task
from layerskip.models import compiled_layers
from searches.app.composition import compose_config
from searches.benchmark.peers import Peer
from searches.evaluate import gpu
from searches.evaluate.criteria import random_target
from searches.evaluate.gpu import PARTS, Part, Row, floor_of, floor_tokens_per_second, has_error
from tests.accelerator import DEVICE
from tests.searches.conftest import Launch
from tests.tiny import save_tiny

pytestmark = pytest.mark.system

TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 64,
}  # fmt: skip
PARAMETERS = {"llama_1b": 1_235_814_400, "llama_3b": 3_212_749_824, "llama_8b": 8_030_261_248}
"""As published with the models, tied weights once."""


def _overrides(folder: Path, *more: str) -> list[str]:
    shape = ",".join(f"{name}:{value}" for name, value in TINY.items())
    small = ["measure.max_new_tokens=8", "measure.prompts=2", "context=16", "tokens=[1,3]", f"+shapes.tiny={{{shape}}}"]
    small += [f"shapes.{name}=null" for name in PARAMETERS]
    target = ["target=local", f"target.path={folder}", "target.dtype=float32", f"target.device={DEVICE}"]
    return [*target, "target.compile=off", *small, *more]


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., dict[str, Row]]:
    """Runs a part in this process and returns its rows."""

    def run(name: str, overrides: list[str]) -> dict[str, Row]:
        part = Part(compose_config("gpu", [*overrides, f"outputs={tmp_path}"]), {}, name, tmp_path / "record.json")
        PARTS[name](part)
        return part.rows

    return run


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_shapes_have_the_published_numbers_of_parameters(name: str) -> None:
    shape = compose_config("gpu").shapes[name]
    target = random_target(dict(shape), "bfloat16", torch.device("meta"))
    assert target.eos_ids == frozenset()
    assert sum(weight.numel() for weight in target.model.parameters()) == PARAMETERS[name]


def test_the_floor_is_the_time_of_reading_weights_and_cache() -> None:
    floor = floor_of(random_target(TINY, "float32", torch.device(DEVICE)))
    attention = 2 * 32 * 32 + 2 * 32 * 16  # query and output; key and value of half as many heads
    weights = 2 * (attention + 3 * 32 * 48 + 2 * 32) + 32 + 64 * 32  # two layers, the last norm, the output layer
    cache = 2 * 2 * 2 * 8  # keys and values, layers, heads, dimensions
    assert floor == {"weight_bytes": 4 * weights, "cache_bytes": 4 * cache}
    assert floor_tokens_per_second(floor, context=10, bandwidth=1e9) == pytest.approx(1e9 / (4 * (weights + 10 * cache)))


def test_transformers_static_cache_gives_the_same_tokens(tiny_target: Target) -> None:
    task, prompt = Task(Sampling(), 12), tiny_target.encode("the thing is in there")
    plain, static = (Peer(tiny_target, method)(prompt, task, lambda _: None) for method in ("plain", "static"))
    assert static.tokens == plain.tokens
    assert len(static.stats.rounds) == len(plain.stats.rounds) == 11


def test_plain_rows_relate_to_the_floor_and_to_our_decoding(tiny_folder: Path, rows: Callable[..., dict[str, Row]]) -> None:
    found = rows("plain", _overrides(tiny_folder, "large=64"))
    decodings = ("layerskip", "transformers", "transformers_static")
    assert set(found) == {f"{model} {decoding}" for model in ("target", "tiny") for decoding in decodings}
    for row in found.values():
        ours = found[f"{row['model']} layerskip"]
        assert row["over_plain"] == pytest.approx(row["tokens_per_second"] / ours["tokens_per_second"])
        assert row["share_of_floor"] == pytest.approx(row["tokens_per_second"] / row["floor_tokens_per_second"])
    assert found["tiny layerskip"]["context"] == 16 + 7 / 2  # after the first one, which belongs to the prompt


def test_every_drafter_has_a_row_and_one_that_fails_leaves_the_others(
    tmp_path: Path, rows: Callable[..., dict[str, Row]]
) -> None:
    folder = save_tiny(tmp_path / "model", num_hidden_layers=4, idle=(2, 3))
    one = ("eagle_head=/nowhere", "contenders.retrieval=null", "contenders.lookahead=null")
    found = rows("drafters", _overrides(folder, *one))
    shared = {"prompt_lookup", "token_recycling", "cascade", "layer_skip", "draft_model"}
    assert set(found) == shared | {"eagle", "medusa", "cross_tokenizer"}
    assert {name for name, row in found.items() if "tokens_per_second" in row} == shared
    assert "/nowhere" in found["eagle"]["error"]
    assert found["medusa"] == {"left_out": "it has no head"}
    for row in (found[name] for name in shared):
        assert row["losslessness"]["verdict"] == "exact"
        assert row["over_plain"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
    assert found["layer_skip"]["mean_acceptance_length"] > 1.5  # the skipped layers have no effect
    assert found["layer_skip"]["config"]["mask"] == "layers:2-3"


@pytest.mark.parametrize("compiles", [True, False])
def test_plain_decoding_has_a_row_with_and_without_compiled_layers(
    compiles: bool, tiny_folder: Path, rows: Callable[..., dict[str, Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where compiling fails the row says so."""
    runs = []

    def run(*args: Any) -> Any:
        runs.append(1)
        return compiled_layers._run(*args) if compiles else compiled_layers._run(*args, "one too many")  # type: ignore[call-arg]

    monkeypatch.setattr(compiled_layers, "_compiled_run", lambda fuses: run)
    none = [f"contenders.{name}=null" for name in compose_config("gpu").contenders]
    ((name, row),) = rows("drafters", _overrides(tiny_folder, *none, "target.compile=auto")).items()
    assert name == ("plain_compiled" if DEVICE == "cpu" else "plain_uncompiled")
    assert runs
    if compiles:
        assert row["losslessness"]["verdict"] == "exact"
        assert row["over_plain"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
    else:
        assert row == {"left_out": "its layers could not be compiled"}


def test_chains_and_trees_are_timed_beside_a_step(tiny_folder: Path, rows: Callable[..., dict[str, Row]]) -> None:
    found = rows("verification", _overrides(tiny_folder))
    assert list(found) == ["1 drafted", "3 drafted"]
    for row in found.values():
        assert row["context"] == 16
        assert row["chain_over_step"] == pytest.approx(row["chain_seconds"] / row["step_seconds"])
        assert row["tree_over_step"] > 0


def test_the_record_has_every_finished_row_of_a_run_with_an_error(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    record = tmp_path / "record.json"
    options = [
        f"record={record}",
        f"outputs={tmp_path}",
        "parts=[plain,verification]",
        "large=64",
        "seconds.verification=250",
    ]
    options += ["shapes.tiny.num_attention_heads=0", "seconds.verification=250"]
    done = launch("evaluate.gpu", *_overrides(tiny_folder, *options), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.endswith("errors in: plain\n")
    written = json.loads(record.read_text(encoding="utf-8"))
    assert written["schema"] == "layerskip.gpu/1"
    assert written["device"]["bandwidth"] > 0
    assert [name for name, part in written["parts"].items() if has_error(part)] == ["plain"]
    assert set(written["parts"]["verification"]["rows"]) == {"1 drafted", "3 drafted"}


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os, time; os.system('sleep 600 &'); time.sleep(600)", "0.5 seconds were over"),
        ("import os; os._exit(7)", "the process ended with code 7"),
        ("raise SystemExit(1)", None),
    ],
)
def test_a_part_that_hangs_or_crashes_ends(
    program: str, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid()))\n{program}\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert gpu._run_alone([], 0.5 if error and "over" in error else 60) == error
    group = int((tmp_path / "pid").read_text()) if (tmp_path / "pid").exists() else 0
    for _ in range(100):
        try:
            os.killpg(group or 2**22, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("what the part has started still runs")
