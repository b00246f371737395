"""Servers as back ends, against stand-ins whose tokens, rounds and faults are planted; their settings and commands."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import tests.searches.backends.contract as contract
from layerskip import Measurement, PromptError, PromptSet, Sampling, SpeculativeConfig, Target
from layerskip.measure.measure import Task
from layerskip.measure.measurement import Sample, check_output
from layerskip.prompts import PromptItem
from searches.app.checks import InputError
from searches.backends.backend import CANDIDATE, LOG_LINES, BackendError, Comparison, Workload
from searches.backends.running_engine import request_metrics
from searches.backends.selection import closing
from searches.backends.server import ServerBackend
from searches.study.bench import ModelBench
from tests.searches.backends.processes import STANDIN, running, wait_for
from tests.searches.backends.standin import planted_rounds
from tests.searches.known import lookup

_TASK = Task(max_new_tokens=12)
_PROMPTS = PromptSet(tuple(PromptItem(f"p{place}", "chat", f"prompt {place}") for place in range(4)))
_PER_ENGINE = 2  # processes
Serve = Callable[..., ServerBackend]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds the ids of all processes that stand-ins start."""
    path = tmp_path / "processes"
    path.mkdir()
    return path


def _command(folder: Path, *options: str) -> str:
    words = [*STANDIN, "--port", "{port}", "--folder", str(folder), *options, "--speculative-config", "{speculative_config}"]
    return shlex.join(words)


@pytest.fixture
def serve(tiny_target: Target, folder: Path) -> Iterator[Serve]:
    """Makes back ends of stand-ins with some options, which leave nothing behind."""
    with contextlib.ExitStack() as made:

        def start(*options: str, **settings: Any) -> ServerBackend:
            backend = ServerBackend(tiny_target, command=_command(folder, *options), **settings)
            return made.enter_context(contextlib.closing(backend))

        yield start
    assert running(folder) == []


@pytest.fixture
def backend(serve: Serve) -> ServerBackend:
    return serve()


def _compare(backend: ServerBackend, configs: dict[str, SpeculativeConfig], **more: Any) -> Iterator[dict[str, Sample]]:
    return backend.compare(Comparison(configs, **{"prompts": _PROMPTS, "task": _TASK} | more))


class TestServer(contract.BackendContract):
    @pytest.fixture
    def make(self, folder: Path) -> Callable[[Target], ServerBackend]:
        return lambda target: ServerBackend(target, command=_command(folder))


@pytest.mark.parametrize("fault", ["", "other_metrics"])  # of which the pieces of the answers show the rounds
def test_rows_are_pairs_with_the_planted_rounds(fault: str, serve: Serve) -> None:
    backend = serve("--fault", fault)
    rows = list(_compare(backend, {CANDIDATE: lookup(2)}))
    for row in rows:
        assert [each.accepted for each in row["baseline"].stats.rounds] == [0] * 11
        assert sorted(each.accepted for each in row[CANDIDATE].stats.rounds) == sorted(planted_rounds(11, 2))
        assert row[CANDIDATE].stats.drafted == 2 * len(planted_rounds(11, 2))
    metrics = backend.metrics() | request_metrics(Measurement.of(rows, "baseline", CANDIDATE))
    assert metrics.keys() >= {"startup_seconds", "baseline_startup_seconds", "throughput", "ttft_p50", "baseline_tpot_p95"}
    assert all(value > 0 for value in metrics.values())


def test_configurations_that_do_not_fit_take_turns(backend: ServerBackend, folder: Path) -> None:
    backend.engines = 2
    configs = {str(length): lookup(length) for length in (1, 2, 3)}
    rows = list(_compare(backend, configs))
    assert len(rows) == len(_PROMPTS)
    for row in rows:
        assert row.keys() == {"baseline", *configs}
        for name, config in configs.items():
            assert max(each.drafted for each in row[name].stats.rounds) == config.num_speculative_tokens
            assert row[name].lossless.verdict == "exact"
    assert len(running(folder)) == 2 * _PER_ENGINE
    assert len(list(folder.iterdir())) == 4 * _PER_ENGINE  # plain decoding started once
    backend.engines = 1
    (row,) = _compare(backend, {"1": lookup(1)}, prompts=PromptSet(_PROMPTS.items[:1]))
    assert row.keys() == {"baseline", "1"}
    assert len(running(folder)) == _PER_ENGINE


def test_a_drafter_that_learns_is_warmed_by_no_measured_prompt(backend: ServerBackend, tiny_target: Target) -> None:
    config = SpeculativeConfig("retrieval", 2, prompt_lookup_max=3, tree_tokens=9)
    assert len(list(_compare(backend, {"learns": config}))) == len(_PROMPTS)
    first, *asked = (each["prompt"] for each in json.loads(backend._running[config].client.get("/seen")))
    assert asked == [list(tiny_target.encode(item.messages())) for item in _PROMPTS]
    assert first not in asked


def test_a_server_that_a_command_starts_gets_the_users_key(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    assert len(list(_compare(serve("--key", "mine", start_seconds=20), {}))) == 4


def test_so_many_requests_are_in_flight(serve: Serve) -> None:
    backend = serve("--pause", "0.01")
    rows = list(_compare(backend, {"two": lookup(2)}, workload=Workload(3)))
    assert [engine.client.get("/max_in_flight") for engine in backend._running.values()] == ["3", "3"]
    assert sum(each.accepted for row in rows for each in row["two"].stats.rounds) == 4 * sum(planted_rounds(11, 2))
    with pytest.raises(InputError, match=r"^workload\.concurrency: "):
        Workload(0)


def test_changed_outputs_are_different(serve: Serve) -> None:
    lossless = contract.measure(serve("--fault", "wrong"), lookup(2), _PROMPTS, _TASK).lossless
    assert lossless.verdict == "different"
    assert {divergence.position for divergence in lossless.divergences} == {11}
    ended = contract.measure(serve("--only-drafting", "--fault", "ends"), lookup(2), _PROMPTS, _TASK).lossless
    assert ended.to_dict()["different"] == len(_PROMPTS)


@pytest.mark.parametrize(("goal", "temperature"), [("decoding", 0.0), ("throughput", 1.0)])
def test_outputs_that_end_at_once_are_neither_measured_nor_compared(goal: str, temperature: float, serve: Serve) -> None:
    bench = ModelBench(serve("--fault", "ends"), Sampling(temperature=temperature), 12, Workload(goal=goal))
    rows = list(bench.compare({"two": lookup(2)}, _PROMPTS, 1, 0))
    measured = Measurement.of(rows, "baseline", "two")
    assert measured.lossless.verdict == "unchecked"
    assert measured.to_dict()["empty_prompts"] == len(_PROMPTS)
    with pytest.raises(PromptError, match="^prompts: every output ends with its first token"):
        check_output(row["baseline"] for row in rows)


def test_sampled_outputs_are_not_compared_but_greedy_ones_are(backend: ServerBackend) -> None:
    rows = list(_compare(backend, {"two": lookup(2)}, task=Task(Sampling(temperature=1.0), 12)))
    assert [row["two"].lossless.compared for row in rows] == [1, 0, 0, 0]
    assert rows[0]["two"].lossless.basis.startswith("greedy outputs of one prompt")


@pytest.mark.parametrize(
    ("options", "lengths", "reason"),
    [
        (("--only-drafting", "--fault", "crash"), {"two": 2}, "ended with exit code 3, "),
        (("--broken-length", "2"), {"four": 4, "two": 2}, "ended with exit code 1, while it started"),
    ],
)
def test_a_failing_engine_is_an_error_and_the_next_configuration_runs(
    options: tuple[str, ...], lengths: Mapping[str, int], reason: str, serve: Serve, folder: Path
) -> None:
    backend = serve(*options)
    with pytest.raises(BackendError, match=f"^backend: server: {reason}") as error:
        list(_compare(backend, {name: lookup(length) for name, length in lengths.items()}))
    assert error.value.name == "two"
    assert "\n" not in str(error.value) and len(error.value.log_tail.splitlines()) <= LOG_LINES
    assert "a planned crash" in error.value.log_tail
    assert len(wait_for(folder, _PER_ENGINE)) == _PER_ENGINE  # plain decoding alone
    assert len(list(_compare(backend, {}))) == 4


_VLLM = "vllm serve m --port {port} --speculative-config {speculative_config}"
_LOOKUP = SpeculativeConfig("prompt_lookup", 3, prompt_lookup_min=2, prompt_lookup_max=4)


def test_a_command_drafts_with_the_methods_that_it_has_places_for(tiny_target: Target) -> None:
    methods = ("none", "prompt_lookup", "retrieval", "draft_model", "eagle", "layer_skip", "lookahead")
    for places, supported in (
        ("{speculative_config}", {"none", "prompt_lookup", "retrieval", "draft_model", "eagle"}),
        ("--lookup {num_speculative_tokens}", {"none", "prompt_lookup"}),
        ("--draft {draft_model} --count {num_speculative_tokens}", {"none", "draft_model"}),
        ("--head {head}", {"none", "eagle"}),
    ):
        backend = ServerBackend(tiny_target, command=f"serve {{port}} {places}")
        assert {method for method in methods if backend.supports(method) is None} == supported
    for command, missing in (("serve {num_speculative_tokens}", "{port}"), ("serve {port}", "{speculative_config}")):
        with pytest.raises(InputError, match=f"^backend.command: has no {missing}"):
            ServerBackend(tiny_target, command=command)


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


def test_the_log_of_an_engine_that_failed_for_good_is_printed(
    tiny_target: Target, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, closed = ServerBackend(tiny_target, command=_VLLM), list[str]()
    monkeypatch.setattr(ServerBackend, "close", lambda _: closed.append("closed"))
    with pytest.raises(BackendError), closing(backend):
        raise BackendError("server: it ended", "the last words")
    assert capsys.readouterr().err == "the last words\n"
    assert closed == ["closed"]
