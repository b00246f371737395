"""Tests of ``searches.evaluate.gpu``: floors, rows, counts of tests, and the record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from layerskip import Sampling, Target
from layerskip.measure.measure import Task
from layerskip.models import compiled_layers
from searches.app.composition import compose_config
from searches.benchmarking.peers import Peer
from searches.evaluate import gpu_programs
from searches.evaluate.gpu import PARTS, has_error
from searches.evaluate.gpu_device import describe_device, floor_of, floor_tokens_per_second, read_bytes
from searches.evaluate.gpu_drafting import measure_drafters, measure_verification
from searches.evaluate.gpu_plain import SHAPES, measure_plain, random_llama
from searches.evaluate.gpu_programs import run_study, run_tests
from searches.evaluate.gpu_table import table
from searches.evaluate.gpu_worker import Known, Message, Part, Report, Row
from tests.accelerator import DEVICE
from tests.searches.conftest import Launch
from tests.searches.programs import QUICK, execute
from tests.tiny import save_tiny

TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 64,
}  # fmt: skip
PARAMETERS = {"llama_1b": 1_235_814_400, "llama_3b": 3_212_749_824, "llama_8b": 8_030_261_248}
"""As published with the models, tied weights once."""


def _overrides(folder: Path, *more: str) -> list[str]:
    shape = ",".join(f"{name}:{value}" for name, value in TINY.items())
    small = ["measure.max_new_tokens=8", "measure.prompts=2", "context=16", "tokens=[1,2,4]", f"shapes={{tiny:{{{shape}}}}}"]
    target = [
        "target=local",
        f"target.path={folder}",
        "target.dtype=float32",
        f"target.device={DEVICE}",
        "target.compile=off",
    ]
    return [*target, *small, *more]


def _rows(part: Part, config: DictConfig, known: Known) -> dict[str, Row]:
    messages: list[Message] = []
    part(config, known, Report(messages.append))
    return dict(value for kind, value in messages if kind == "row")


@pytest.fixture(scope="module")
def known(tiny_folder: Path) -> Row:
    return _rows(describe_device, compose_config("gpu", _overrides(tiny_folder)), {})["device"]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_shapes_have_the_published_numbers_of_parameters(name: str) -> None:
    target = random_llama(SHAPES[name], "bfloat16", torch.device("meta"))
    assert sum(weight.numel() for weight in target.model.parameters()) == PARAMETERS[name]
    embedding = 0 if SHAPES[name]["tie_word_embeddings"] else 128_256 * SHAPES[name]["hidden_size"]
    assert read_bytes(target.model) == 2 * (PARAMETERS[name] - embedding)


def test_a_random_llama_is_made_on_the_device_in_its_dtype_and_never_ends() -> None:
    target = random_llama(TINY, "bfloat16", torch.device(DEVICE), seed=3)
    assert {(weight.device.type, weight.dtype) for weight in target.model.parameters()} == {(DEVICE, torch.bfloat16)}
    assert target.eos_ids == frozenset()
    same, other = (random_llama(TINY, "bfloat16", torch.device(DEVICE), seed) for seed in (3, 4))
    assert torch.equal(target.model.lm_head.weight, same.model.lm_head.weight)  # type: ignore[union-attr, arg-type]
    assert not torch.equal(target.model.lm_head.weight, other.model.lm_head.weight)  # type: ignore[union-attr, arg-type]


def test_the_floor_is_the_time_of_reading_weights_and_cache() -> None:
    floor = floor_of(random_llama(TINY, "float32", torch.device(DEVICE)))
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


def test_plain_rows_relate_to_the_floor_and_to_our_decoding(tiny_folder: Path, known: Row) -> None:
    rows = _rows(measure_plain, compose_config("gpu", _overrides(tiny_folder)), known)
    decodings = ("layerskip", "transformers", "transformers_static")
    assert set(rows) == {f"{model} {decoding}" for model in ("target", "tiny") for decoding in decodings}
    for row in rows.values():
        ours = rows[f"{row['model']} layerskip"]
        assert row["over_plain"] == pytest.approx(row["tokens_per_second"] / ours["tokens_per_second"])
        read = row["weight_bytes"] + row["cache_bytes"] * row["context"]
        assert row["share_of_floor"] == pytest.approx(row["tokens_per_second"] * read / known["bandwidth"])
        assert row["new_tokens"] == 7  # after the first one, which belongs to the prompt
    assert rows["tiny layerskip"]["context"] == 16 + 7 / 2


def test_a_model_that_fails_leaves_the_others(tiny_folder: Path, known: Row) -> None:
    config = compose_config("gpu", _overrides(tiny_folder, "shapes.tiny.num_attention_heads=0"))
    rows = _rows(measure_plain, config, known)
    assert {name for name, row in rows.items() if "error" in row} == {name for name in rows if name.startswith("tiny ")}
    assert rows["target transformers_static"]["tokens_per_second"] > 0


def test_every_drafter_has_a_row_and_one_that_fails_leaves_the_others(tmp_path: Path, known: Row) -> None:
    folder = save_tiny(tmp_path / "model", num_hidden_layers=4, idle=(2, 3))
    one = ("eagle_head=/nowhere", "contenders.retrieval=null", "contenders.lookahead=null", f"outputs={tmp_path}")
    rows = _rows(measure_drafters, compose_config("gpu", _overrides(folder, *one)), known)
    shared = {"prompt_lookup", "token_recycling", "cascade", "layer_skip", "draft_model"}
    assert set(rows) == shared | {"eagle", "medusa", "cross_tokenizer"}
    assert {name for name, row in rows.items() if "tokens_per_second" in row} == shared
    assert "/nowhere" in rows["eagle"]["error"]
    assert rows["medusa"] == {"left_out": "it has no head"}
    for row in (rows[name] for name in shared):
        assert row["losslessness"]["verdict"] == "exact"
        assert row["over_plain"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
    assert rows["layer_skip"]["tokens_per_round"] > 1.5  # the skipped layers have no effect
    assert rows["layer_skip"]["config"]["mask"] == "layers:2-3"


@pytest.mark.parametrize("compiles", [True, False])
def test_plain_decoding_has_a_row_with_and_without_compiled_layers(
    compiles: bool, tiny_folder: Path, known: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where compiling fails the row says so."""
    runs = []

    def run(*args: Any) -> Any:
        runs.append(1)
        return compiled_layers._run(*args) if compiles else compiled_layers._run(*args, "one too many")  # type: ignore[call-arg]

    monkeypatch.setattr(compiled_layers, "_compiled_run", lambda fuses: run)
    none = [f"contenders.{name}=null" for name in compose_config("gpu").contenders]
    rows = _rows(measure_drafters, compose_config("gpu", _overrides(tiny_folder, *none, "target.compile=auto")), known)
    ((name, row),) = rows.items()
    assert name == ("plain_compiled" if DEVICE == "cpu" else "plain_uncompiled")
    assert runs
    if compiles:
        assert row["losslessness"]["verdict"] == "exact"
        assert row["over_plain"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
    else:
        assert row == {"left_out": "its layers could not be compiled"}


def test_passes_are_timed_as_chains_and_trees(tiny_folder: Path, known: Row) -> None:
    rows = _rows(measure_verification, compose_config("gpu", _overrides(tiny_folder)), known)
    assert set(rows) == {"chain of 1", "chain of 2", "chain of 4", "tree of 2", "tree of 4"}
    assert {row["context"] for row in rows.values()} == {16}
    for name, row in rows.items():
        assert name == f"{row['shape']} of {row['tokens']}"
        assert row["over_one_token"] > 0


def test_a_pass_runs_over_as_many_tokens_as_its_row_says(
    tiny_folder: Path, known: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    config = compose_config("gpu", _overrides(tiny_folder, "tokens=[1,4]"))
    target = instantiate(config.target)
    monkeypatch.setattr("searches.evaluate.gpu_drafting.instantiate", lambda _: target)
    target.model.get_input_embeddings().register_forward_hook(lambda module, ids, out: widths.append(ids[0].shape[1]))
    _rows(measure_verification, config, known)
    first = widths.index(4)
    assert set(widths[1:first]) == {1}  # after the prompt
    for timed in (widths[first : first + 40], widths[-40:]):  # chains, and trees once their first pass has checked the model
        assert timed == [4, 1] * 20


SOME_TESTS = """
import os, pytest

@pytest.mark.parametrize("words", ["one two", "three"])
def test_passes(words): assert os.environ["LAYERSKIP_TEST_DEVICE"] == "cuda:1"
def test_fails(): assert False
def test_is_skipped(): pytest.skip("no reason")
@pytest.fixture
def broken(): raise ValueError
def test_has_an_error(broken): pass
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_tests_are_counted(workers: int, tmp_path: Path, known: Row) -> None:
    (tmp_path / "test_some.py").write_text(SOME_TESTS, encoding="utf-8")
    config = compose_config("gpu", [f"tests.paths=[{tmp_path}]", f"tests.workers={workers}", "target.device=cuda:1"])
    row = _rows(run_tests, config, known)["tests"]
    assert [row[kind] for kind in ("passed", "failed", "skipped", "errors")] == [2, 1, 1, 1]
    assert sorted(name.rpartition("::")[2] for name in row["failures"]) == ["test_fails", "test_has_an_error"]
    assert row["error"] == "2 tests fail"


def _broken(folder: Path) -> Path:
    """Write tests that cannot be imported."""
    (folder / "test_broken.py").write_text("import nothing_of_this_name", encoding="utf-8")
    return folder / "test_broken.py"


def test_tests_that_do_not_start_are_an_error(tmp_path: Path, known: Row) -> None:
    config = compose_config("gpu", [f"tests.paths=[{_broken(tmp_path)}]", "tests.workers=0"])
    assert _rows(run_tests, config, known)["tests"]["error"].startswith("the tests did not end: ")


def test_a_study_is_summed_up(tiny_folder: Path, tmp_path: Path, known: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    def forked(command: Sequence[str], variables: Any, folder: Path) -> Iterator[str]:
        done = execute(command[2].removeprefix("searches."), *command[3:], cwd=folder)
        assert done.returncode == 0, done.stderr
        yield from done.stdout.splitlines()

    monkeypatch.setattr(gpu_programs, "_lines", forked)
    quick = [f"'{override}'" for override in (*QUICK[3:], "study.n_trials=2", "space.kinds=[none,prompt_lookup]")]
    config = compose_config("gpu", _overrides(tiny_folder, f"outputs={tmp_path}", f"study_overrides=[{','.join(quick)}]"))
    row = _rows(run_study, config, known)["smoke"]
    (best,) = tmp_path.glob("gpu-study/*/best.json")
    assert row["over_plain"] == json.loads(best.read_text(encoding="utf-8"))["evidence"]["speedup"]
    assert sum(row["trials"].values()) == 2


@pytest.mark.parametrize("path", ["/models/it's, {odd} = \\", "/models/plain"])
def test_another_program_gets_the_same_target(path: str) -> None:
    config = compose_config("gpu", ["target=local", "target.path=x", "target.dtype=float16", "target.device=cuda:1"]).target
    config.path = path
    assert compose_config("layerskip", gpu_programs._target_overrides(config)).target == config
    wheel = compose_config("gpu").target
    assert compose_config("layerskip", gpu_programs._target_overrides(wheel)).target.name == "smollm2"


def test_the_record_has_every_finished_row_of_a_run_with_an_error(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    record = tmp_path / "record.json"
    options = [f"record={record}", f"outputs={tmp_path}", "parts=[tests,verification]", f"tests.paths=[{_broken(tmp_path)}]"]
    done = launch("evaluate.gpu", *_overrides(tiny_folder, *options, "tests.workers=0"), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.endswith("errors in: tests\n")
    written = json.loads(record.read_text(encoding="utf-8"))
    assert written["schema"] == "layerskip.gpu/1"
    assert written["device"]["bandwidth"] > 0
    assert [name for name, part in written["parts"].items() if has_error(part)] == ["tests"]
    assert set(written["parts"]["verification"]["rows"]) > {"chain of 4", "tree of 4"}
    assert table(written) in done.stdout


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("parts=[speed]", "parts: 'speed' is not one of tests, plain, "),
        ("tokens=[2,4]", "tokens: has no 1"),
        ("seconds.plain=0", "seconds.plain: "),
        ("target.path=/nowhere", "target.path: there is no folder"),
    ],
)
def test_bad_input_is_one_line(override: str, start: str, tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    done = launch("evaluate.gpu", *_overrides(tiny_folder, override, f"outputs={tmp_path}"), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {start}")
    assert len(done.stderr.splitlines()) == 1


def test_every_part_has_a_table() -> None:
    row = {
        "model": "m",
        "shape": "chain",
        "tokens": 1,
        "seconds": 1.0,
        "over_one_token": 1.0,
        "passed": 3,
        "over_plain": 1.5,
    }
    record = {
        "parts": {
            name: {"rows": {"m layerskip": row, "x": {"error": "no"}}, "error": "over", "log": ["slow"]} for name in PARTS
        },
        "device": {"dtype": "float32", "bandwidth": 1e12},
        "target": {"name": "t"}, "date": "today",
        "environment": {"device_name": "card", "versions": {"torch": "1", "transformers": "2"}},
    }  # fmt: skip
    text = table(record)
    assert all(f"- {name}: x: ERROR: no\n- {name}: ERROR: over\n- {name}: slow" in text for name in PARTS)
    assert "1000 GB/s" in text
