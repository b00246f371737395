"""Tests of a benchmark's contenders: rows that are left out, added and refused, and transformers' decoding methods."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from layerskip import PromptSet, Sampling, Target, UnsupportedModel, generate, load_target
from layerskip.measure.measure import Decoder, Task
from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.benchmark.contenders import build_contenders, check_rows
from searches.benchmark.peers import Peer
from tests.searches.programs import NO_PEERS
from tests.tiny import save_tiny

pytestmark = pytest.mark.system

LEFT_OUT = (*NO_PEERS, *(f"contenders.{name}=null" for name in ("layer_skip", "draft_model", "cascade")))


def _target(folder: Path, family: str = "llama") -> Target:
    return load_target(str(save_tiny(folder / "model", family)), dtype="float32", device="cpu")


def test_drafters_that_the_target_cannot_verify_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The attention of GPT-Neo does not accept tree masks."""
    target = _target(tmp_path, "gpt_neo")
    fanned = "+contenders.fanned={method:cascade,members:[{method:prompt_lookup},{method:token_recycling}]}"
    config = compose_config(
        "benchmark", ["contenders.layer_skip.mask=layers:1", *NO_PEERS, "contenders.draft_model=null", fanned]
    )
    contenders, rivals, configs = build_contenders(config, target, PromptSet.of(["one"]), Sampling(), contextlib.ExitStack())
    assert {"plain", "prompt_lookup", "layer_skip"} <= contenders.keys()
    printed = capsys.readouterr().out
    for name in ("token_recycling", "fanned"):
        assert name not in contenders.keys() | configs.keys() | rivals.keys()
        assert f"contenders.{name}: left out: " in printed


def test_a_draft_model_that_transformers_refuses_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes two tokenizers of the same size for the same tokenizer."""
    target = _target(tmp_path)
    save_tiny(tmp_path / "other", seed=1)
    config = compose_config("benchmark", [*LEFT_OUT, f"cross_draft={tmp_path / 'other'}"])
    contenders, rivals, _ = build_contenders(config, target, PromptSet.of(["one"]), Sampling(), contextlib.ExitStack())
    assert "cross_tokenizer" in contenders
    assert "transformers_universal" not in contenders.keys() | set(rivals.values())
    assert "peers.transformers_universal: left out: draft_model: " in capsys.readouterr().out


def test_a_row_may_have_another_dtype(tmp_path: Path) -> None:
    config = compose_config("benchmark", [*LEFT_OUT, "+contenders.half={method:none,dtype:bfloat16}"])
    target = _target(tmp_path)
    decoders, *_ = build_contenders(config, target, PromptSet.of(["one"]), Sampling(), contextlib.ExitStack())
    half = decoders["half"]
    assert isinstance(half, Decoder) and (half.target.name, half.target.dtype) == (target.name, "bfloat16")
    assert all(each.target is target for name, each in decoders.items() if name != "half")
    config = compose_config("benchmark", [*LEFT_OUT, "+contenders.half={method:none,dtype:int2}"])
    with pytest.raises(InputError, match=r"^contenders\.half\.dtype: 'int2' is not one of "):
        build_contenders(config, target, PromptSet.of(["one"]), Sampling(), contextlib.ExitStack())


def test_a_row_without_its_rival_is_refused(tmp_path: Path) -> None:
    config = compose_config("benchmark", [*LEFT_OUT, "contenders.prompt_lookup.rival=nonesuch"])
    with pytest.raises(InputError, match=r"^contenders\.prompt_lookup\.rival: 'nonesuch' is not one of "):
        build_contenders(config, _target(tmp_path), PromptSet.of(["one"]), Sampling(), contextlib.ExitStack())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target whose last layers have little effect, so that drafts without them are accepted."""
    folder = save_tiny(tmp_path_factory.mktemp("peers") / "model", num_hidden_layers=4, idle=(2, 3))
    return load_target(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("method", "fields", "drafts"),
    [
        ("plain", {}, False),
        ("prompt_lookup", {"num_speculative_tokens": 4, "prompt_lookup_max": 2}, True),
        ("early_exit", {"num_speculative_tokens": 3, "exit_layer": 2}, True),
        ("assistant", {"num_speculative_tokens": 3, "confidence": None}, True),
    ],
)
def test_methods_of_transformers_decode_what_plain_decoding_does_in_counted_rounds(
    model: Target, method: str, fields: dict[str, Any], drafts: bool
) -> None:
    prompt = model.encode([{"role": "user", "content": "the cat in the hat, the cat in the hat"}])
    peer = Peer(model, method, **fields, draft_model=model.name if method == "assistant" else "")
    known: list[int] = []
    result = peer(prompt, Task(max_new_tokens=24), known.append)
    assert list(result.tokens) == list(generate(model, prompt, max_new_tokens=24).tokens)
    rounds = [done.committed for done in result.stats.rounds]
    assert known[0] + sum(rounds) == len(result.tokens) == 24
    assert (max(rounds) > 1) == drafts
    assert len(known) == 1


def test_a_sampled_continuation_is_that_of_its_seed(model: Target) -> None:
    sampling = Sampling(temperature=1.0, top_k=8, top_p=0.9)
    outputs = [Peer(model, "plain")([5, 6, 7], Task(sampling, 16, seed), lambda _: None).tokens for seed in (1, 1, 2, 3)]
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs}) > 1


def test_peers_are_refused_by_field(model: Target) -> None:
    with pytest.raises(InputError, match="^method: 'beam' is not one of plain, "):
        Peer(model, "beam")
    with pytest.raises(UnsupportedModel, match="its vocabulary is as large as the target's"):
        Peer(model, "universal", draft_model=model.name)
    for override, reason in (
        ("contenders.eagle=5", r"contenders\.eagle: 5 is not a configuration; null leaves the row out"),
        ("+peers.transformers.beams=2", r"peers\.transformers\.beams: is not one of "),
    ):
        with pytest.raises(InputError, match=f"^{reason}"):
            check_rows(compose_config("benchmark", [override]))


def test_a_peer_decodes_in_a_dtype_of_its_own(model: Target) -> None:
    peer = Peer(model, "plain", dtype="bfloat16")
    assert (peer.target.dtype, model.dtype) == ("bfloat16", "float32")
    result = peer([5, 6, 7], Task(max_new_tokens=8), lambda _: None)
    assert result.tokens == generate(load_target(model.name, dtype="bfloat16"), [5, 6, 7], max_new_tokens=8).tokens
