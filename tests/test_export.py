"""Exports: file layout, atomic writes, and refusals that name the field."""

from __future__ import annotations

import functools
import json
import operator
import os
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import ConfigError, Export, ExportError, Sampling, SpeculativeConfig, StopRule, Target
from layerskip.models.trained_module import save_trained
from tests.families import build

CONFIG = SpeculativeConfig("layer_skip", mask="layers:1", num_speculative_tokens=5, stop=StopRule("threshold", 0.4))
SAMPLING = Sampling(temperature=0.7, top_p=0.9)
EVIDENCE = {"speedup": 1.25, "speedup_low": 1.1, "speedup_high": 1.4, "losslessness": {"verdict": "exact"}}
ENVIRONMENT = {"device": "cpu", "versions": {"torch": "2"}}
SEARCH = {"study": "s", "trials": 40, "seconds": 900.0, "mlflow_run_id": "abc"}


@pytest.fixture
def export(tiny_target: Target) -> Export:
    return Export(tiny_target.describe(), CONFIG, SAMPLING, EVIDENCE, ENVIRONMENT, SEARCH)


@pytest.fixture
def file(export: Export, tmp_path: Path) -> Path:
    export.save(tmp_path / "best.json")
    return tmp_path / "best.json"


def _edit(file: Path, **changes: Any) -> Path:
    """Change fields of the file, with dots in names written as double underscores; None removes a field."""
    fields = json.loads(file.read_text())
    for name, value in changes.items():
        *path, last = name.split("__")
        table = functools.reduce(operator.getitem, path, fields)
        table[last] = value
        if value is None:
            del table[last]
    file.write_text(json.dumps(fields))
    return file


def test_the_file_has_the_layout_of_its_schema(file: Path, tiny_target: Target, tiny_folder: Path) -> None:
    fields = json.loads(file.read_text())
    assert next(iter(fields)) == "schema"
    assert set(fields.pop("engines")) == {"vllm", "sglang", "tensorrt_llm", "llama_cpp", "openvino_genai", "transformers"}
    target = dict(name=str(tiny_folder), revision=None, architecture="LlamaForCausalLM", layers=3, dtype="float32")
    assert fields == {
        "schema": "layerskip.export/2",
        "target": target,
        "config": CONFIG.to_dict(),
        "sampling": {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.0},
        "evidence": EVIDENCE,
        "environment": ENVIRONMENT,
        "search": SEARCH,
    }


def test_a_saved_export_is_loaded_and_some_fields_may_be_missing(export: Export, file: Path, tiny_target: Target) -> None:
    assert Export.load(file) == export
    assert Export.load(str(file), tiny_target) == export
    stored = json.loads(file.read_text())["engines"]
    assert Export.load(_edit(file, engines={"vllm": {"command": ["other"]}})).engines(file) == stored
    assert Export.load(_edit(file, engines=None)) == export
    loaded = Export.load(_edit(file, sampling=None, evidence=None, environment=None, search=None))
    assert loaded == Export(export.target, CONFIG)


def _noted(export: Export, notes: Any) -> Export:
    return replace(export, evidence={"notes": notes})


def test_a_failed_write_leaves_the_old_file_alone_in_its_folder(export: Export, tmp_path: Path) -> None:
    """Values that JSON cannot hold, and a full disk."""
    file = tmp_path / "outputs" / "study" / "best.json"
    export.save(str(file))
    before = file.read_bytes()
    for bad in (float("nan"), Path("/")):
        with pytest.raises((TypeError, ValueError)):
            _noted(export, bad).save(file)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            _noted(export, "x" * 100_000).save(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["best.json"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_process_leaves_a_complete_file(export: Export, file: Path) -> None:
    sizes = set()
    for length in range(8):
        before = file.stat().st_mtime_ns
        writer = os.fork()
        if writer == 0:
            while True:
                _noted(export, "x" * length * 200_000).save(file)
        while file.stat().st_mtime_ns == before:
            time.sleep(0)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        sizes.add(len(Export.load(file).evidence["notes"]))
    assert len(sizes) == 8


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schema": None}, "schema: "),
    ({"schema": "layerskip.export/1"}, r"schema: .*layerskip.export/1.*layerskip.export/2"),
    *(({name: None}, f"{name}: is missing") for name in ("target", "config")),
    *(({name: 3}, f"{name}: ") for name in ("target", "config", "evidence", "engines", "extra")),
    *(({f"target__{name}": None}, f"target.{name}: ") for name in ("name", "architecture", "layers", "dtype")),
    *(({"target__layers": value}, "target.layers: ") for value in ("3", 3.0, True)),
    ({"target__architecture": 7}, "target.architecture: "),
    ({"target__name": "a\x1b[31m"}, "target.name: 'a.x1b.31m' has characters that cannot be printed"),
    ({"config__method": "hydra"}, "config.method: 'hydra'"),
    ({"config__bridge": "best-1234"}, "config.bridge: not a field of method layer_skip; it has "),  # of an earlier version
    ({"config__prompt_lookup_max": 2}, "config.prompt_lookup_max: "),
    ({"config__stop__method": "never"}, "config.stop.method: "),
    ({"sampling__temperature": -1}, "sampling.temperature: -1"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_bad_field_is_refused_by_its_name(file: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=f"^{message}") as refusal:
        Export.load(_edit(file, **changes))
    assert str(file) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "^export: .*best.json") for content in (b"", b"{", b"\xff\xfe", b'{"schema": "layerskip.export/2"')),
        *((content, "^schema: ") for content in (b"[]", b"null", b'"layerskip.export/2"', b"{}")),
        (None, "^export: cannot read"),
    ],
)
def test_a_file_without_an_export_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "best.json").write_bytes(content)
    with pytest.raises(ExportError, match=message):
        Export.load(tmp_path / "best.json")


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [("gpt2", {"num_hidden_layers": 3}, "architecture"), ("llama", {"num_hidden_layers": 4}, "layers")],
)
def test_an_export_for_another_model_is_refused_by_field(
    export: Export, file: Path, family: str, changes: dict[str, int], field: str
) -> None:
    other = Target(build(family, **changes))
    with pytest.raises(ExportError, match=f"^target.{field}: .*{export.target[field]}.*{getattr(other, field)}"):
        Export.load(file, other)
    # A configuration is valid for every dtype, name and revision of a model.
    export.check(Target(build("llama", num_hidden_layers=3).bfloat16(), name="elsewhere", revision="main"))


def test_an_export_with_a_missing_datastore_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    """A datastore can be large and is not part of an export."""
    retrieval = SpeculativeConfig("retrieval", datastore=str(tmp_path / "store"))
    cascade = SpeculativeConfig("cascade", members=(SpeculativeConfig("prompt_lookup"), retrieval))
    for config in (retrieval, cascade):
        Export(tiny_target.describe(), config).save(tmp_path / "best.json")
        with pytest.raises(ExportError, match=r"^config.datastore: there is no .*store"):
            Export.load(tmp_path / "best.json", tiny_target)


def test_a_head_of_another_model_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    save_trained(tmp_path / "head", {}, {"weight": torch.zeros(1)}, tiny_target, {})
    own = SpeculativeConfig("eagle", head=str(tmp_path / "head"))
    cascade = SpeculativeConfig("cascade", members=(SpeculativeConfig("prompt_lookup"), own))
    other = Target(build("llama", 1, num_hidden_layers=3))
    for config in (own, cascade):
        export = Export(tiny_target.describe(), config)
        export.check(tiny_target)
        with pytest.raises(ExportError, match=r"^config\.head: .* was made for another target, .*: its weights are not"):
            export.check(other)


def test_an_export_without_its_head_is_not_written(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^head: there is nothing in {tmp_path} to export$"):
        Export(tiny_target.describe(), SpeculativeConfig("eagle", head=str(tmp_path))).save(tmp_path / "best.json")
    assert not list(tmp_path.iterdir())


def test_a_provisional_export_says_so_on_loading(export: Export, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "provisional" not in Export.load(file).search
    assert caplog.text == ""
    replace(export, search={**export.search, "provisional": True}).save(file)
    assert Export.load(file).search["provisional"]
    assert f"{file} is provisional" in caplog.text
