"""Tests of transformers' decoding methods as contenders."""

from __future__ import annotations

from typing import Any

import pytest

from layerskip import Sampling, Target, UnsupportedModel, generate, load_target
from layerskip.measure.measure import Task
from searches.app.checks import InputError
from searches.benchmark.peers import Peer
from tests.tiny import save_tiny

pytestmark = pytest.mark.system


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


def test_memory_is_that_of_a_draft_model_of_its_own(model: Target) -> None:
    assert Peer(model, "plain").memory_bytes() == Peer(model, "static").memory_bytes() == 0
    other = Peer(model, "assistant", draft_model=model.name)
    weights = {each.data_ptr(): each.nbytes for each in model.drafts[model.name].model.parameters()}
    assert sum(weights.values()) <= other.memory_bytes() < 1.1 * sum(weights.values())


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
