"""A study's plan loads and checks every part at its start, and reports what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from layerskip import ConfigError, PromptSet, SpeculativeConfig, TargetError, generate, load_target
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.models.trained_module import save_trained
from layerskip.prompts import PromptItem
from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.study import plan
from searches.study.plan import Plan, check_prompts, describe
from tests.accelerator import DEVICE
from tests.drafters.test_cross_tokenizer import spelling
from tests.searches.programs import quick
from tests.tiny import save_tiny


def _plan(model: Path, *overrides: str) -> Plan:
    return Plan.of(compose_config("layerskip", [*quick(model, model / "outputs"), *overrides]))


def test_another_draft_model_or_head_in_the_same_folder_is_another_study(tmp_path: Path) -> None:
    model, draft, head = tmp_path / "model", tmp_path / "draft", tmp_path / "head"
    save_tiny(model)
    head.mkdir()

    def described(methods: str, *overrides: str) -> dict[str, object]:
        config = compose_config(
            "layerskip", [*quick(model, tmp_path / "outputs"), f"space.methods=[none,{methods}]", *overrides]
        )
        return describe(config, load_target(str(model), dtype="float32", device=DEVICE), PromptSet.of(["x", "y"]))

    drafts, heads = [], []
    for idle, weights in (((), b"one"), ((0,), b"other")):
        save_tiny(draft, idle=idle)
        drafts.append(described("draft_model", f"space.ranges.draft_model.draft_model=[{draft}]"))
        (head / "pytorch_model.bin").write_bytes(weights)
        heads.append(described("eagle", f"space.ranges.eagle.head=[{head}]"))
    assert drafts[0] != drafts[1]
    assert heads[0] != heads[1]
    (head / "model.safetensors").mkdir()
    with pytest.raises(InputError, match=f"^space: cannot read the head {head}: "):
        described("eagle", f"space.ranges.eagle.head=[{head}]")


def test_engines_are_measured_greedily_beside_the_own_decoder_only(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "chosen_engines", lambda _: ("vllm",))
    for override, reason in (("sampling=nucleus", "greedily"), ("backend=vllm", "beside backend=layerskip on a CPU")):
        with pytest.raises(InputError, match=f"^engines: are measured {reason}"):
            _plan(tiny_folder, override)


def test_heads_draft_chains_if_trees_cannot_be_verified(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "gpt_neo")
    target = load_target(str(model), dtype="float32", device=DEVICE)
    head = EagleHead(EagleShape.of(target))
    save_trained(tmp_path / "head", head.shape.to_dict(), head.weights(), target, {})
    planned = _plan(model, f"space.ranges.eagle.head=[{tmp_path / 'head'}]", "space.methods=[none,eagle]")
    assert planned.space.available_methods == ("none", "eagle")
    chain = SpeculativeConfig("eagle", 3, head=planned.space.values("eagle", "head")[0], top_k=1)
    plain = generate(target, "a prompt", max_new_tokens=12)
    drafted = generate(target, "a prompt", chain, max_new_tokens=12)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted


def test_draft_models_are_loaded_once_at_the_start_by_their_absolute_paths(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    same, other = save_tiny(tmp_path / "same", seed=1), save_tiny(tmp_path / "other", seed=2)
    drafts = "space.ranges.draft_model.draft_model=[same]", f"space.ranges.cross_tokenizer.draft_model=[same,{other}]"
    planned = _plan(tiny_folder, *drafts)
    assert planned.target.drafts.keys() == {str(same), str(other)}
    unused = _plan(tiny_folder, drafts[0], "space.methods=[none,prompt_lookup]")
    assert not unused.target.drafts


def test_an_unusable_draft_model_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    greek = save_tiny(tmp_path / "greek", seed=3)
    spelling("αβγδ").save_pretrained(greek)
    with pytest.raises(TargetError, match="^draft_model: the tokenizer of .*greek is not that of"):
        _plan(tiny_folder, f"space.ranges.draft_model.draft_model=[{greek}]")
    with pytest.raises(ConfigError, match="^draft_model: its tokenizer does not reproduce the target's text"):
        _plan(tiny_folder, f"space.ranges.cross_tokenizer.draft_model=[{greek}]")


def test_a_draft_model_too_large_for_memory_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "build_drafter", Mock(side_effect=MemoryError))
    with pytest.raises(InputError, match=r"^space\.ranges\.draft_model\.draft_model: giant does not fit into memory"):
        _plan(tiny_folder, "space.ranges.draft_model.draft_model=[giant]")


def test_methods_without_a_head_or_a_draft_model_are_printed_and_left_out(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _plan(tiny_folder, "experiment=all_drafters")
    empty = {"eagle": "head", "draft_model": "draft_model", "cross_tokenizer": "draft_model"}
    fields = [f"{method} (space.ranges.{method}.{field} is empty)" for method, field in empty.items()]
    unpacked = "space.methods: quantized left out: its weights are not packed on a CPU\n"
    assert capsys.readouterr().out == f"space.methods: left out: {', '.join(fields)}\n{unpacked}"
    _plan(tiny_folder, "space=prompt_lookup")
    assert capsys.readouterr().out == ""


POSITIONS = 64
TALK = [
    {"id": "q1", "prompt": "the thing"},
    {"id": "q2", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the thing"}]},
    {"id": "q3", "turns": ["the thing", "the other thing"]},
]


@pytest.mark.parametrize(
    ("condition", "refused"), [("messages[0]['role'] == 'system'", "q2"), ("messages | length > 2", "q3")]
)
def test_a_prompt_that_a_chat_template_refuses_is_named(condition: str, refused: str, tmp_path: Path) -> None:
    model, prompts = save_tiny(tmp_path / "model"), tmp_path / "talk.jsonl"
    prompts.write_text("\n".join(map(json.dumps, TALK)), encoding="utf-8")
    words = AutoTokenizer.from_pretrained(model)
    (model / "chat_template.jinja").unlink()
    words.chat_template = f"{{% if {condition} %}}{{{{ raise_exception('refused') }}}}{{% endif %}}x"
    words.save_pretrained(model)
    with pytest.raises(TargetError, match=f"^prompts: {refused}: .*refused"):
        _plan(model, "prompts=jsonl", f"prompts.path={prompts}")


def test_a_prompt_that_leaves_the_table_of_positions_is_named(tmp_path: Path) -> None:
    """All turns of a conversation count."""
    target = load_target(str(save_tiny(tmp_path / "model", "gpt2", max_position_embeddings=POSITIONS)), device="cpu")
    item = PromptItem("q1", "chat", "x", ("y",))
    answered = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "..."}, {"role": "user", "content": "y"}]
    left = POSITIONS - len(target.encode(answered))
    check_prompts(PromptSet((item,)), target, left // 2)
    with pytest.raises(InputError, match=f"^prompts: q1: max_new_tokens: .* exceed the {POSITIONS} positions of GPT2"):
        check_prompts(PromptSet((item,)), target, left // 2 + 1)
