"""The doctor on servers with planted speeds, drafts and outputs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.backends.engine_process import free_port
from searches.doctor import doctor
from tests.searches.backends.processes import served
from tests.searches.conftest import Launch

pytestmark = pytest.mark.system
SMALL = ("max_prompts=6", "max_new_tokens=12")
FAST = ("--pause", "0.01")
DRAFTING = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')


@pytest.mark.parametrize(
    ("drafting", "code", "words"),
    [
        ((*DRAFTING, *FAST), 0, ("by position 0.6", "plain server's on 0 of 6", "num_speculative_tokens of")),
        ((*DRAFTING, "--pause", "0.045"), 4, ("speculation: on", "leave speculation off")),
        (FAST, 0, ("speculation: off", 'No drafts were made. Try --speculative-config \'{"method": "ngram"')),
        ((*DRAFTING, *FAST, "--fault", "wrong"), 4, ("plain server's on 6 of 6", "is not that of plain decoding")),
        (
            (*DRAFTING, *FAST, "--fault", "other_metrics"),
            0,
            ("speculation: on", "against the plain server: 2", "Without counters, the best draft length is not known"),
        ),
    ],
    ids=["good", "bad", "off", "lossy", "uncounted"],
)
def test_a_server_is_named_for_what_it_is(
    drafting: tuple[str, ...], code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with served(*drafting) as client, served(*FAST) as plain_client:
        config = compose_config("doctor", [f"url={client.url}", f"plain={plain_client.url}", *SMALL])
        ended = pytest.raises(SystemExit, match="^4$") if code else contextlib.nullcontext()
        with ended:
            doctor(config)
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed
    assert len(printed.splitlines()) < 20  # a page


def test_without_a_plain_server_nothing_is_said_about_speed_and_output(tmp_path: Path, launch: Launch) -> None:
    with served(*DRAFTING) as client:
        done = launch("doctor", client.url, *SMALL, cwd=tmp_path)
    assert done.returncode == 0
    assert "speculation: on" in done.stdout
    assert "output and speedup: unknown; plain=URL names a server" in done.stdout
    assert "Start the same model without speculation" in done.stdout


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
        pytest.raises(InputError, match="^url or plain: "),
    ):
        doctor(compose_config("doctor", [f"url={client.url}", *SMALL, "max_seconds=0.3"]))
