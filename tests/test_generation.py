"""The front door against transformers' own ``generate``, on a real model in float32 and on tiny ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layerskip import ConfigError, Sampling, SpeculativeConfig, Target, TargetError, generate, load_target
from tests.accelerator import DEVICE
from tests.exhaustive import representative
from tests.reference import generated
from tests.tiny import save_tiny

FRUITS = "List three fruits, one per line."
EMOJIS = "Reply with three emojis."
CHAT = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Capital of Italy?"}]
LOOKUP = SpeculativeConfig("prompt_lookup", prompt_lookup_max=2, num_speculative_tokens=6)
SKIP = SpeculativeConfig("layer_skip", mask="layers:1", num_speculative_tokens=5)
methods = pytest.mark.parametrize("config", [SpeculativeConfig(), SKIP, LOOKUP], ids=lambda config: config.method)


@pytest.fixture(scope="module")
def idle_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A tiny model whose layer 1 has little effect, so that drafts without it are accepted."""
    folder: Path = save_tiny(tmp_path_factory.mktemp("idle") / "llama", idle=(1,))
    return load_target(str(folder), dtype="float32", device=DEVICE)


# The model's answer to FRUITS: "1. Banana\n2. Apple\n3. Grapefruit".
STOPS = {
    "over several tokens and inside one": ["rap"],
    "only the end": ["zebra", "<|im_end|>"],
    "begins in the prompt": ["\n1"],
    "the first of several": ["Grape", "zebra", " Apple", "Apple\n"],
    "one token": ["."],
    "over several tokens": ["nana\n2"],
    "inside a token": ["App"],
}


@pytest.mark.parametrize("where", representative(list(STOPS)[:2], list(STOPS)[2:]))
def test_a_stop_string_ends_the_output_of_a_real_model_where_transformers_ends_it(smollm2: Target, where: str) -> None:
    stops, words = STOPS[where], smollm2.tokenizer
    assert words is not None
    result = generate(smollm2, FRUITS, LOOKUP, max_new_tokens=24, stop_strings=stops)
    assert result.tokens == generated(smollm2.model, smollm2.encode(FRUITS), 24, stop_strings=stops, tokenizer=words)
    assert result.text == words.decode(result.tokens, skip_special_tokens=True)
    assert result.finish == ("eos" if where == "only the end" else "stop")


def test_a_character_of_several_tokens_stops_where_transformers_stops(smollm2: Target) -> None:
    first = generate(smollm2, EMOJIS, max_new_tokens=12).text[0]
    result = generate(smollm2, EMOJIS, max_new_tokens=12, stop_strings=first)
    stops = {"stop_strings": [first], "tokenizer": smollm2.tokenizer}
    assert result.tokens == generated(smollm2.model, smollm2.encode(EMOJIS), 12, **stops)
    assert 1 < len(result.tokens) < 12
    assert (result.text, result.finish) == (first, "stop")


@methods
@pytest.mark.parametrize("prompt", ["the on in", CHAT, [9, 30, 31, 32, 30, 31]], ids=["text", "chat", "ids"])
def test_every_form_of_prompt_is_continued_as_in_transformers(
    idle_target: Target, config: SpeculativeConfig, prompt: object
) -> None:
    expected = generated(idle_target.model, idle_target.encode(prompt), 40)  # type: ignore[arg-type]
    for length in (1, 2, 17, 40):
        result = generate(idle_target, prompt, config, max_new_tokens=length)  # type: ignore[arg-type]
        assert result.tokens == expected[:length]
        assert result.text == idle_target.decode(result.tokens)
        assert (len(result.tokens), result.finish) == (length, "length")


@methods
def test_a_stop_string_is_found_at_every_position_of_a_draft(idle_target: Target, config: SpeculativeConfig) -> None:
    text, prompt = generate(idle_target, "the", max_new_tokens=24).text, idle_target.encode("the")
    for start in range(0, len(text) - 2, 3):
        stop = text[start : start + 2]
        result = generate(idle_target, "the", config, max_new_tokens=24, stop_strings=stop)
        expected = generated(idle_target.model, prompt, 24, stop_strings=[stop], tokenizer=idle_target.tokenizer)
        assert (result.tokens, result.finish) == (expected, "stop")
        assert stop in result.text


@methods
@pytest.mark.parametrize("given", [True, False], ids=["seed", "torch's random state"])
def test_sampling_is_reproducible(idle_target: Target, config: SpeculativeConfig, given: bool) -> None:
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        options = {"seed": seed} if given else {}
        outputs.append(generate(idle_target, "the", config, sampling=Sampling(1.0), max_new_tokens=30, **options).tokens)
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": []}, TargetError, "prompt: "),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens: 0"),
        ({"stop_strings": ""}, ValueError, "stop_strings: "),
        ({"stop_strings": ["a", 7]}, ValueError, "stop_strings: 7 "),
        ({"config": SpeculativeConfig("layer_skip", mask="layers:3")}, ConfigError, "mask: .*layer 3"),
        ({"config": SpeculativeConfig("draft_model", draft_model="/no/draft")}, TargetError, "draft_model: .*/no/draft"),
    ],
)
def test_invalid_arguments_are_refused_by_name(
    tiny_target: Target, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        generate(tiny_target, **{"prompt": "the"} | arguments)  # type: ignore[arg-type]
