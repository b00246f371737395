"""Rotary positions that are scaled, and prompts that are read in parts, give what transformers or one pass gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import SpeculativeConfig, Target, UnsupportedModel, generate
from layerskip.config import StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle import Eagle
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.models import prefill
from layerskip.models.cache import KVCache
from layerskip.models.forward import Features
from layerskip.models.prefill import parts_of, run_prefill
from layerskip.models.skip_view import decoding_view
from tests.accelerator import DEVICE
from tests.families import build
from tests.models.passes import assert_close, fresh, tokens_of
from tests.reference import generated
from tests.resources import peak_bytes

THRESHOLD = 24
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
    "original_max_position_embeddings": THRESHOLD,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LOOKUP = SpeculativeConfig("prompt_lookup", prompt_lookup_min=1, prompt_lookup_max=2, num_speculative_tokens=6)
SKIP = SpeculativeConfig("layer_skip", mask="attention:1", num_speculative_tokens=5)
TREE = SpeculativeConfig("token_recycling", num_speculative_tokens=3, min_token_prob=0.0)


def longrope_model() -> PreTrainedModel:
    return build("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=THRESHOLD)


def dynamic_model() -> PreTrainedModel:
    return build("llama", rope_parameters=DYNAMIC, max_position_embeddings=THRESHOLD)


def _prompt(length: int) -> list[int]:
    return [3 + 7 * place % 11 for place in range(length)]


@pytest.mark.parametrize("config", [SpeculativeConfig(), LOOKUP, SKIP, TREE], ids=lambda config: config.method)
@pytest.mark.parametrize("length", [THRESHOLD - 16, THRESHOLD + 1, THRESHOLD + 9])
def test_texts_on_one_side_of_the_threshold_equal_those_of_generate(config: SpeculativeConfig, length: int) -> None:
    model, prompt = longrope_model(), _prompt(length)
    assert generate(Target(model), prompt, config, max_new_tokens=16).tokens == generated(model, prompt, 16)


def test_a_text_that_may_cross_the_threshold_is_refused() -> None:
    model = longrope_model()
    with pytest.raises(UnsupportedModel, match=r"^max_new_tokens: Phi3ForCausalLM .* from 24 tokens on \(longrope\)"):
        generate(Target(model), _prompt(THRESHOLD - 15), LOOKUP, max_new_tokens=16)
    # Dynamic scaling is refused everywhere beyond its threshold.
    target = Target(dynamic_model())
    assert generate(target, _prompt(8), LOOKUP, max_new_tokens=16).tokens
    for length in (9, THRESHOLD + 9):
        with pytest.raises(UnsupportedModel, match=r"\(dynamic\)"):
            generate(target, _prompt(length), LOOKUP, max_new_tokens=16)


@pytest.mark.parametrize(
    ("family", "config"), [("gpt2", LOOKUP), ("gptj", SKIP), ("gptj", SpeculativeConfig())], ids=["gpt2", "gptj", "plain"]
)
def test_a_text_fills_a_table_of_positions_and_is_refused_beyond(family: str, config: SpeculativeConfig) -> None:
    """Learned, or of sines. The last token of an output needs no position, as in transformers."""
    model, prompt = build(family, max_position_embeddings=THRESHOLD), _prompt(8)
    assert generate(Target(model), prompt, config, max_new_tokens=17).tokens == generated(model, prompt, 17)
    with pytest.raises(UnsupportedModel, match="^max_new_tokens: 18 tokens after a prompt of 8 exceed the 24 positions"):
        generate(Target(model), prompt, config, max_new_tokens=18)
    with pytest.raises(UnsupportedModel, match="^prompt: 25 tokens exceed the 24 positions"):
        generate(Target(model), _prompt(25), config, max_new_tokens=1)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": THRESHOLD}


@pytest.mark.parametrize(("scaling", "stated"), [({}, THRESHOLD), ({"rope_parameters": YARN}, 2 * THRESHOLD)])
def test_a_prompt_beyond_the_stated_positions_is_warned_of_once(
    scaling: dict[str, Any], stated: int, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target(build("llama", max_position_embeddings=THRESHOLD, **scaling))
    for length in (stated, stated + 1, stated + 2):
        assert generate(target, _prompt(length), LOOKUP, max_new_tokens=4).tokens
    (message,) = caplog.messages
    assert message == f"a prompt of {stated + 1} tokens exceeds the {stated} positions that LlamaForCausalLM states"


FAMILIES = ["llama", "gpt_oss", "gpt_neo", "modernbert-decoder", "deepseek_v3", "gpt2"]
WINDOWED = ["mistral", "gemma3_text", "llama4_text"]  # with windows, which are read in another way by many tokens


def _read(model: PreTrainedModel, tokens: torch.Tensor, features: Features | None = None) -> tuple[torch.Tensor, KVCache]:
    cache = KVCache(model.config.num_hidden_layers, len(tokens) + 3, device=DEVICE)
    with torch.inference_mode():
        return run_prefill(decoding_view(model), tokens, cache, features=features), cache


@pytest.mark.parametrize(
    ("family", "part", "count"), [*((name, 7, 40) for name in FAMILIES + WINDOWED), *((name, 80, 230) for name in WINDOWED)]
)
def test_parts_give_the_result_of_one_pass(family: str, part: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and hidden states are compared with a pass of transformers without a cache; decoding continues after them."""
    model, tokens = build(family), tokens_of(count + 3)
    logits = fresh(model, tokens)
    with torch.inference_mode():
        expected = model(tokens[None], output_hidden_states=True).hidden_states[-1][0, :count]
    monkeypatch.setattr(prefill, "_PART", part)
    assert len(parts_of(count)) > 2
    features = Features()
    last, cache = _read(model, tokens[:count], features)
    assert_close(last[0], logits[count - 1], 2e-4)
    assert_close(features.states, expected, 2e-4)
    assert cache.length == count
    with torch.inference_mode():
        assert_close(run_prefill(decoding_view(model), tokens[count:], cache, last=3), logits[count:], 2e-4)


@pytest.mark.parametrize("scaled", [longrope_model, dynamic_model])
def test_scaling_by_the_last_position_needs_one_pass(
    scaled: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond its threshold, where a first part alone would have other positions."""
    model, tokens = scaled(), tokens_of(40)
    expected = fresh(model, tokens)[-1:]
    monkeypatch.setattr(prefill, "_PART", 7)
    assert_close(_read(model, tokens)[0], expected, 2e-4)
    monkeypatch.setattr(prefill, "scaling_depends_on_length", lambda *_: False)
    assert not torch.allclose(_read(model, tokens)[0], expected, atol=1e-2)


@pytest.mark.skipif(DEVICE == "cuda", reason="counts memory of the CPU")
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_memory_grows_with_the_length_of_a_prompt(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the cache, which is allocated first. One pass with sliding windows needs a mask of the squared length."""
    model = build(family, max_position_embeddings=4096)

    def peak(count: int) -> int:
        tokens, cache = tokens_of(count), KVCache(model.config.num_hidden_layers, count, device=DEVICE)
        run_prefill(decoding_view(model), tokens[:1], cache)
        cache.length = 0
        return peak_bytes(lambda: run_prefill(decoding_view(model), tokens, cache))

    with torch.inference_mode():
        whole = peak(2048)
        monkeypatch.setattr(prefill, "_PART", 128)
        short, long = peak(512), peak(2048)
    assert long < 4.5 * short
    assert family == "llama" or whole > 4 * long


def _drafter(kind: str, target: Target) -> Drafter:
    torch.manual_seed(0)
    if kind == "draft_model":
        model = build("llama", 2, vocab_size=target.vocabulary, num_hidden_layers=2)
        return DraftModel(decoding_view(model), 2, 3, StopRule())
    head = EagleHead(EagleShape.of(target, lookback=2 if "lookback" in kind else 0)).to(DEVICE).eval()
    for weights in (head.body.layers[0].self_attn.o_proj.weight, head.body.layers[0].mlp.down_proj.weight):
        torch.nn.init.normal_(weights, std=0.3)  # an untrained head ignores the tokens before the last
    return Eagle(head, target, 3, StopRule(), 2 if "tree" in kind else 1)


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "eagle tree", "eagle lookback"])
def test_drafters_read_a_prompt_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rounds show that a drafter has the same states, not only that the output is the target's."""
    target = Target(build("llama", 1, vocab_size=12, eos_token_id=None))
    prompt, results = (tokens_of(60) % 12).tolist(), []
    for part in (1024, 7):
        monkeypatch.setattr(prefill, "_PART", part)
        results.append(decode(target, _drafter(kind, target), prompt, Sampling(temperature=1.0), 30, seed=4))
    assert results[0] == results[1]
    assert 0 < results[0].stats.accepted < results[0].stats.drafted
