"""The doctor on servers with planted speeds, drafts and outputs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerskip.measure.measure import Task
from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.backends.client import Client, Completion
from searches.backends.engine_process import free_port
from searches.doctor import doctor
from tests.searches.backends.processes import served
from tests.searches.conftest import Launch

pytestmark = pytest.mark.system
SMALL = ("max_prompts=6", "max_new_tokens=12")
DRAFTING = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')


@pytest.fixture
def at_pace(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that each piece takes by the address of the server, in place of the measured ones; one elsewhere."""
    pace: dict[str, float] = {}
    measured = Client.complete

    def planted(self: Client, prompt: Sequence[int] | str, task: Task) -> Completion:
        found = measured(self, prompt, task)
        return replace(found, decode_seconds=pace.get(self.url, 1.0) * sum(size > 0 for size in found.piece_sizes[1:]))

    monkeypatch.setattr(Client, "complete", planted)
    return pace


@pytest.mark.parametrize(
    ("drafting", "seconds", "code", "words"),
    [
        # Rounds of 1, 2, 3, 4 and 1 tokens for the 11 after the first one.
        (
            DRAFTING,
            1.0,
            0,
            ("by position 0.60, 0.40, 0.20, 0.00\n", "per round: 2.20; 100% ", "on 0 of 6", " 2.20 x the plain"),
        ),
        (
            DRAFTING,
            1.0,
            0,
            ("a round takes 1000.0 ms, 1.00 times", "prefers another token in 0 of 72", "tokens of 3 in place of 4"),
        ),
        (DRAFTING, 4.0, 4, ("speculation: on", "4.00 times as long", "0.55 x the plain", "leave speculation off")),
        ((), 1.0, 0, ("speculation: off", "1.00 x", 'No drafts are made. Try --speculative-config \'{"method": "ngram"')),
        ((), 3.0, 0, ("speculation: off", "0.33 x", "No drafts are made")),
        ((*DRAFTING, "--fault", "wrong"), 1.0, 4, ("on 6 of 6", "token in 6 of 72", "is not that of plain decoding")),
        ((*DRAFTING, "--fault", "other_metrics"), 1.0, 0, ("speculation: on", "2.20 x", "Without counts by position")),
        (
            (*DRAFTING, "--fault", "llama_cpp"),
            1.0,
            0,
            ("acceptance: 0.30 of", "per round: 2.20", "2.20 x", "llama-server --metrics"),
        ),
        (
            ("--fault", "llama_cpp"),
            1.0,
            0,
            ("speculation: off", "Try --spec-type ngram-simple --spec-ngram-simple-size-n 4"),
        ),
    ],
    ids=["good", "shorter", "bad", "off", "off and slower", "lossy", "uncounted", "llama.cpp", "llama.cpp off"],
)
def test_a_server_is_named_for_what_it_is(
    drafting: tuple[str, ...],
    seconds: float,
    code: int,
    words: tuple[str, ...],
    at_pace: dict[str, float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with served(*drafting) as client, served() as plain_client:
        at_pace[client.url] = seconds
        config = compose_config("doctor", [f"url={client.url}", f"plain={plain_client.url}", *SMALL])
        ended = pytest.raises(SystemExit, match="^1$") if code else contextlib.nullcontext()
        with ended:
            doctor(config)
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed
    found = [line.partition(":")[0] for line in printed.splitlines()]
    order = ["server", "speculation", "acceptance", "tokens per round", "cost", "output", "speed", ""]
    assert [name for name in order if name in found] == found[:-1]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (
            (),
            0,
            (
                "prefers another token in 0 of 72",
                "less than 2.20 steps",
                "unknown without plain=URL",
                "Start the same model",
            ),
        ),
        (("--fault", "wrong"), 1, ("prefers another token in 6 of 72", "is not that of plain decoding")),
        (("--fault", "rejected"), 1, ("by position 0.00, 0.00", "0 of 72", "leave speculation off")),
        (("--fault", "strict"), 0, ("speculation: on", "output: unknown; plain=URL names a server")),
    ],
    ids=["good", "lossy", "rejected", "untold"],
)
def test_without_a_plain_server_a_server_judges_its_output_itself(
    options: tuple[str, ...], code: int, words: tuple[str, ...], tmp_path: Path, launch: Launch
) -> None:
    with served(*DRAFTING, *options) as client:
        done = launch("doctor", client.url, *SMALL, cwd=tmp_path)
    assert done.returncode == code
    assert all(word in done.stdout for word in words), done.stdout


def test_what_was_measured_until_time_ran_out_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered = Client.complete_all

    def until_the_hang(self: Client, prompts: Sequence[Any], *args: Any) -> list[Completion]:
        if len(json.loads(self.get("/seen"))) == 4:
            self.deadline = time.monotonic() + 0.2
        return answered(self, prompts, *args)

    monkeypatch.setattr(Client, "complete_all", until_the_hang)
    with served(*DRAFTING, "--fault", "hang", "--after", "4") as client:
        doctor(compose_config("doctor", [f"url={client.url}", *SMALL]))
    printed = capsys.readouterr().out
    assert "3 of 6 prompts were sent, because time ran out" in printed
    assert ", 3 prompts, " in printed and "speculation: on\n" in printed and "0 of 36 places" in printed


@pytest.mark.parametrize(
    ("length", "words"), [(0.0, "speculation: off\n"), (2.9, "speculation: on\ntokens per round: 2.90\n")]
)
def test_the_acceptance_length_that_sglang_states_is_reported(
    length: float, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, asked = f'sglang:spec_accept_length{{model_name="m",tp_rank="0"}} {length}\n', Client.get
    monkeypatch.setattr(Client, "get", lambda self, path, *args: page if path == "/metrics" else asked(self, path, *args))
    with served() as client:
        doctor(compose_config("doctor", [f"url={client.url}", *SMALL]))
    assert words in (printed := capsys.readouterr().out)
    assert ("Try --speculative-algorithm NGRAM --speculative-num-draft-tokens 5" in printed) == (length == 0)


def test_servers_that_cannot_be_asked_are_refused_by_field(tmp_path: Path) -> None:
    absent = f"http://127.0.0.1:{free_port()}"
    with served() as client:
        for overrides, words in (
            ([f"url={absent}"], f"^url: nothing answers at {absent}/v1/models$"),
            (["url=here"], "^url: 'here' is not a URL"),
            ([f"url={client.url}", f"plain={absent}"], "^plain: nothing answers"),
            ([f"url={client.url}", "concurrency=0"], "^concurrency: "),
            ([], "^url: is missing"),
        ):
            with pytest.raises(InputError, match=words):
                doctor(compose_config("doctor", overrides))
    with (
        served("--fault", "hang", *DRAFTING) as client,
        pytest.raises(InputError, match="^max_seconds: too few for a prompt: http"),
    ):
        doctor(compose_config("doctor", [f"url={client.url}", *SMALL, "max_seconds=0.3"]))
    with served("--fault", "crash", *DRAFTING) as client, pytest.raises(InputError, match="^url or plain: .*(broke|ended)"):
        doctor(compose_config("doctor", [f"url={client.url}", *SMALL]))


def test_one_prompt_gives_no_speedup(tmp_path: Path, launch: Launch) -> None:
    with served(*DRAFTING) as client, served() as plain_client:
        done = launch("doctor", client.url, f"plain={plain_client.url}", "max_prompts=1", "max_new_tokens=12", cwd=tmp_path)
    assert done.returncode == 0
    assert "Too few prompts were answered" in done.stdout
