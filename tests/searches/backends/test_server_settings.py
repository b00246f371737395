"""The settings of servers: what is refused, which methods a command has places for, and the commands of configurations."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from layerskip import SpeculativeConfig, Target
from searches.app.checks import InputError
from searches.backends.backend import BackendError
from searches.backends.client import RequestFailed, _piece
from searches.backends.selection import closing, supported_space
from searches.backends.server import ServerBackend
from searches.space.search_space import SearchSpace

_URL = "http://127.0.0.1:1"
_SERVED = {"method": "prompt_lookup", "num_speculative_tokens": 2}
_RUNNING: dict[str, Any] = {"baseline_url": _URL, "candidate_url": _URL, "candidate": _SERVED}
_VLLM = "vllm serve m --port {port} --speculative-config {speculative_config}"
_LOOKUP = SpeculativeConfig("prompt_lookup", 3, prompt_lookup_min=2, prompt_lookup_max=4)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"command": _VLLM, "candidate_url": _URL}, "backend.command: starts the servers"),
        ({"command": "serve {num_speculative_tokens}"}, "backend.command: has no {port}"),
        ({"command": "serve {port}"}, "backend.command: has no {speculative_config}"),
        ({}, "backend.baseline_url: is missing"),
        (_RUNNING | {"candidate_url": ""}, "backend.candidate_url: is missing"),
        (_RUNNING | {"baseline_url": "localhost"}, "backend.baseline_url: 'localhost' is not a URL"),
        (_RUNNING | {"candidate": {"method": "nonesuch"}}, "backend.candidate.method: "),
        (_RUNNING | {"candidate": {"method": "none"}}, "backend.candidate: state what candidate_url drafts with"),
    ],
)
def test_settings_are_refused_by_field(settings: dict[str, Any], field: str, tiny_target: Target) -> None:
    with pytest.raises(InputError) as raised:
        ServerBackend(tiny_target, **settings)
    assert str(raised.value).startswith(field)


@pytest.mark.parametrize(
    ("places", "supported"),
    [
        ("{speculative_config}", {"none", "prompt_lookup", "retrieval", "draft_model", "eagle"}),
        ("--lookup {num_speculative_tokens}", {"none", "prompt_lookup"}),
        ("--draft {draft_model} --count {num_speculative_tokens}", {"none", "draft_model"}),
        ("--head {head}", {"none", "eagle"}),
    ],
)
def test_a_command_drafts_with_the_methods_that_it_has_places_for(
    places: str, supported: set[str], tiny_target: Target
) -> None:
    backend = ServerBackend(tiny_target, command=f"serve {{port}} {places}")
    methods = ("none", "prompt_lookup", "retrieval", "draft_model", "eagle", "layer_skip", "lookahead")
    assert {method for method in methods if backend.supports(method) is None} == supported


def test_a_command_is_filled_in_for_a_configuration_and_cut_for_plain_decoding(tiny_target: Target) -> None:
    command = (
        "serve --port {port} --json '{\"a\": 1}'"
        " --lookup {num_speculative_tokens} --n={prompt_lookup_min},{prompt_lookup_max} --last x"
    )
    backend = ServerBackend(tiny_target, command=command)
    kept = ["serve", "--port", "80", "--json", '{"a": 1}']
    assert backend.arguments(_LOOKUP, 80) == [*kept, "--lookup", "3", "--n=2,4", "--last", "x"]
    assert backend.arguments(SpeculativeConfig(), 80) == [*kept, "--last", "x"]
    own = ServerBackend(tiny_target, command=command, baseline_command="plain --port {port}")
    assert own.arguments(SpeculativeConfig(), 80) == ["plain", "--port", "80"]
    assert own.arguments(_LOOKUP, 80) == backend.arguments(_LOOKUP, 80)


def test_a_command_of_vllm_gets_its_own_configuration(tiny_target: Target) -> None:
    backend = ServerBackend(tiny_target, command=_VLLM)
    *front, option, value = backend.arguments(_LOOKUP, 80)
    assert (front, option) == (shlex.split("vllm serve m --port 80"), "--speculative-config")
    assert json.loads(value) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    assert backend.arguments(SpeculativeConfig(), 80) == front
    with pytest.raises(BackendError, match="server: config.method: vLLM has no counterpart of lookahead"):
        backend.arguments(SpeculativeConfig("lookahead", 3), 80)


def test_reduced_vocabularies_are_for_the_own_decoder(tiny_target: Target) -> None:
    space = SearchSpace(
        tiny_target.layers,
        methods=["none", "draft_model"],
        ranges={"draft_model": {"draft_model": ["a/model"]}},
        draft_heads=(16,),
    )
    with pytest.raises(InputError, match=r"^space\.bridges, space\.draft_heads: backend=server has none"):
        supported_space(space, ServerBackend(tiny_target, command=_VLLM))


def test_the_log_of_an_engine_that_failed_for_good_is_printed(
    tiny_target: Target, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, closed = ServerBackend(tiny_target, **_RUNNING), list[str]()
    monkeypatch.setattr(ServerBackend, "close", lambda _: closed.append("closed"))
    with pytest.raises(BackendError), closing(backend):
        raise BackendError("server: it ended", "the last words")
    assert capsys.readouterr().err == "the last words\n"
    assert closed == ["closed"]


@pytest.mark.parametrize("event", [{"choices": 5}, {"choices": [{"token_ids": ["x"]}]}, {"usage": {}}])
def test_an_event_of_another_form_is_no_piece_of_an_answer(event: dict[str, Any]) -> None:
    with pytest.raises(RequestFailed, match="^not a piece of an answer: "):
        _piece(event)
