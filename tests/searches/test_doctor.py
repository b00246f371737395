"""The doctor on servers with planted speeds, drafts and outputs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.backends.client import Client
from searches.backends.engine_process import EngineProcess, free_port
from searches.doctor import doctor
from tests.searches.backends.processes import STANDIN
from tests.searches.conftest import Launch

pytestmark = pytest.mark.system
SMALL = ("max_prompts=6", "max_new_tokens=12")
FOUR = '{"method": "ngram", "num_speculative_tokens": 4}'


@contextlib.contextmanager
def server(*options: str) -> Iterator[str]:
    """Start a stand-in and yield its address."""
    port = free_port()
    process = EngineProcess([*STANDIN, "--port", str(port), "--after", "0", *options], os.environ, "stand-in", 2.0)
    try:
        process.wait_until(Client(f"http://127.0.0.1:{port}").ready, 20.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("drafting", "code", "words"),
    [
        (
            ("--speculative-config", FOUR, "--pause", "0.01"),
            0,
            ("by position 0.6", "output: differs from the plain server's on 0 of 6", "num_speculative_tokens of"),
        ),
        (("--speculative-config", FOUR, "--pause", "0.045"), 4, ("speculation: on", "leave speculation off")),
        (("--pause", "0.01"), 0, ("speculation: off", 'No drafts were made. Try --speculative-config \'{"method": "ngram"')),
        (
            ("--speculative-config", FOUR, "--pause", "0.01", "--fault", "wrong"),
            4,
            ("speculation: on", "output: differs from the plain server's on 6 of 6", "is not that of plain decoding"),
        ),
        (
            ("--speculative-config", FOUR, "--pause", "0.01", "--fault", "other_metrics"),
            0,
            ("speculation: on", "against the plain server: 2", "Without counters, the best draft length is not known"),
        ),
    ],
    ids=["good", "bad", "off", "lossy", "uncounted"],
)
def test_a_server_is_named_for_what_it_is(
    drafting: tuple[str, ...], code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with server(*drafting) as url, server("--pause", "0.01") as plain:
        config = compose_config("doctor", [f"url={url}", f"plain={plain}", *SMALL])
        ended = pytest.raises(SystemExit, match="^4$") if code else contextlib.nullcontext()
        with ended:
            doctor(config)
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed
    assert len(printed.splitlines()) < 20  # a page


def test_without_a_plain_server_nothing_is_said_about_speed_and_output(tmp_path: Path, launch: Launch) -> None:
    with server("--speculative-config", FOUR) as url:
        done = launch("doctor", url, *SMALL, cwd=tmp_path)
    assert done.returncode == 0
    assert "speculation: on" in done.stdout
    assert "output and speedup: unknown; plain=URL names a server" in done.stdout
    assert "Start the same model without speculation" in done.stdout


def test_servers_that_cannot_be_asked_are_refused_by_field(tmp_path: Path) -> None:
    absent = f"http://127.0.0.1:{free_port()}"
    with server() as url:
        for overrides, words in (
            ([f"url={absent}"], f"^url: nothing answers at {absent}/v1/models$"),
            (["url=here"], "^url: 'here' is not a URL"),
            ([f"url={url}", f"plain={absent}"], "^plain: nothing answers"),
            ([f"url={url}", "concurrency=0"], "^concurrency: "),
            ([], "^url: is missing"),
        ):
            with pytest.raises(InputError, match=words):
                doctor(compose_config("doctor", overrides))
    with server("--fault", "hang", "--speculative-config", FOUR) as url, pytest.raises(InputError, match="^url or plain: "):
        doctor(compose_config("doctor", [f"url={url}", *SMALL, "max_seconds=0.3"]))
