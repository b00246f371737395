"""The streaming client, against a server whose answers are planted."""

from __future__ import annotations

import json

import pytest

from layerskip import Sampling
from layerskip.measure.measure import Task
from searches.backends.client import Client, RequestFailed
from searches.backends.engine_process import free_port
from tests.searches.backends.processes import served
from tests.searches.backends.standin import planted, planted_rounds

_PROMPT = [41, 52, 63]


def _drafting(tokens: int) -> list[str]:
    return ["--speculative-config", json.dumps({"num_speculative_tokens": tokens})]


@pytest.mark.parametrize("fault", ["", "strict", "plain_text"])
def test_tokens_texts_and_sizes_of_pieces_are_the_servers(fault: str) -> None:
    with served("--fault", fault, *_drafting(2)) as client:
        found = client.complete(_PROMPT, Task(max_new_tokens=10))
    expected = planted(_PROMPT, 10)
    assert found.text == "".join(f" {token}" for token in expected)
    assert found.tokens == (None if fault else tuple(expected))
    assert found.count == 10
    if not fault:  # without ids, a piece counts as one token until the usage at the end
        assert found.piece_sizes == (1, *(length + 1 for length in planted_rounds(9, 2)))
        assert found.decoded == 9
    assert found.first_seconds > 0 and found.decode_seconds > 0


def test_a_server_gets_all_parameters_of_sampling_and_a_strict_one_those_that_have_an_effect() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=20, repetition_penalty=1.1)
    with served() as client:
        client.complete(_PROMPT, Task(sampling, 3, seed=5))
        (asked,) = json.loads(client.get("/seen"))
    assert asked["prompt"] == _PROMPT and asked["max_tokens"] == 3 and asked["seed"] == 5 and asked["model"] == "standin"
    assert {name: asked[name] for name in sampling.to_dict()} == sampling.to_dict()
    with served("--fault", "strict") as client:
        client.complete(_PROMPT, Task(Sampling(temperature=0.7), 3))
        (asked,) = json.loads(client.get("/seen"))
    assert asked.keys() >= {"temperature", "seed"} and not asked.keys() & {"top_k", "min_p", "repetition_penalty"}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("crash", "broke|the stream ended before the answer"),
        ("hang", "no answer within 0.3 seconds"),
        ("", "no answer within 0.3 seconds"),  # each piece comes in time
        ("html", "not a piece of an answer: '<html>an error page</html>'"),
        ("not_json", "not a piece of an answer: 'data: {nonsense'"),
        ("other_form", "not a piece of an answer"),
        ("refused", r'^the server reports {"message": "out of memory"}$'),
        ("no_tokens", "the answer has no tokens"),
        ("no_text", "the answer has no text, and 8 tokens"),
        ("too_many", "the answer has 11 tokens, and at most 8 were asked for"),
    ],
)
def test_an_answer_without_sense_is_an_error_with_the_reason(fault: str, reason: str) -> None:
    limit = 0.3 if "0.3" in reason else 20.0
    options = ("--fault", fault) if fault else ("--pause", "0.1")
    with served(*options, limit_seconds=limit) as client, pytest.raises(RequestFailed, match=reason):
        client.complete(_PROMPT, Task(max_new_tokens=8))


@pytest.mark.parametrize("fault", ["ends", "ends_uncounted"])
def test_an_answer_that_ends_at_once_is_one_token(fault: str) -> None:
    with served("--fault", fault) as client:
        found = client.complete(_PROMPT, Task(max_new_tokens=8))
    assert (found.text, found.tokens, found.count, found.decoded, found.decode_seconds) == ("", None, 1, 0, 0.0)
    assert found.first_seconds > 0


def test_a_server_that_is_none_is_not_ready() -> None:
    assert not Client(f"http://127.0.0.1:{free_port()}").ready()
    with pytest.raises(ValueError, match="is not a URL"):
        Client("localhost:8000")
