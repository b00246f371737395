"""Workers that reach a study's database through Optuna's gRPC proxy alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from searches.app.checks import InputError
from searches.study import storage
from tests.searches.programs import FORKS

pytest.importorskip("grpc")


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def _serve(url: str, port: int) -> None:
    optuna.storages.run_grpc_proxy_server(optuna.storages.get_storage(url), host="localhost", port=port)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[str]:
    """A proxy of an SQLite database in a process of its own."""
    port = _free_port()
    process = FORKS.Process(target=_serve, args=(f"sqlite:///{tmp_path / 'study.db'}", port))
    process.start()
    yield f"grpc://localhost:{port}"
    process.kill()
    process.join()


@pytest.mark.parametrize("place", [f"localhost:{_free_port()}", "localhost:x", "localhost:99999"])
def test_a_proxy_that_does_not_answer_is_refused_in_one_line(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_PROXY_SECONDS", 0.1)
    with pytest.raises(InputError, match=f"^study.storage: cannot open grpc://{place}: .+$"):
        storage.open_database(f"grpc://{place}")
