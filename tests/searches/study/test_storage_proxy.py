"""Workers that reach a study's database through Optuna's gRPC proxy alone, started as docs/scale.md says."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from optuna.trial import TrialState

from searches.app.checks import InputError
from searches.backends.engine_process import free_port
from searches.study import storage
from tests.searches.programs import FORKS, REPOSITORY, Fork, quick, runs, sqlite, tracked

pytest.importorskip("grpc")
pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")]
PARTS = ("config", "evidence", "environment", "search")
PAGE = REPOSITORY / "docs" / "scale.md"


def _serve(folder: Path, port: int) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    own = {"sqlite:///studies.db": f"sqlite:///{folder / 'studies.db'}", "0.0.0.0": "localhost", "13000": str(port)}
    for written, used in own.items():
        assert block.count(written) == 1
        block = block.replace(written, used)
    exec(block, {})


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[str]:
    """A proxy of an SQLite database in a process of its own."""
    port = free_port()
    process = FORKS.Process(target=_serve, args=(tmp_path, port))
    process.start()
    yield f"grpc://localhost:{port}"
    process.kill()
    process.join()


@pytest.mark.parametrize("place", ["localhost:free", "localhost:x"])
def test_a_proxy_that_does_not_answer_is_refused_in_one_line(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place.replace("free", str(free_port()))
    monkeypatch.setattr(storage, "_PROXY_SECONDS", 0.1)
    with pytest.raises(InputError, match=f"^study.storage: cannot open grpc://{place}: .+$"):
        storage.open_database(f"grpc://{place}")


def test_two_workers_end_a_study_through_a_proxy(proxy: str, tiny_folder: Path, tmp_path: Path) -> None:
    """They share nothing but the proxy and MLflow; each folder ends with the export."""
    mlflow = sqlite(tracked(tmp_path))
    given = f"study.storage={proxy}", f"tracking.uri={mlflow}", "study.name=it", "study.n_trials=4"
    outputs = [tmp_path / name for name in ("one", "two")]
    first, second = (quick(tiny_folder, folder, *given, "space.methods=[none,prompt_lookup]") for folder in outputs)
    with (
        Fork("searches.layerskip", *first, cwd=tmp_path) as one,
        Fork("searches.layerskip", *second, cwd=tmp_path) as two,
    ):
        for worker in (one, two):
            ended = worker.wait()
            assert ended.returncode == 0, ended.stdout + ended.stderr
    opened = storage.open_database(f"sqlite:///{tmp_path / 'studies.db'}")
    trials = opened.get_all_trials(opened.get_study_id_from_name("it"))
    finished = [trial.number for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert len(finished) == 4
    assert TrialState.RUNNING not in {trial.state for trial in trials}
    assert Counter(int(run.data.tags["trial_number"]) for run in runs(mlflow, "trial")) == Counter(finished)
    exports = [json.loads((folder / "it" / "best.json").read_text(encoding="utf-8")) for folder in outputs]
    assert [exports[0][part] for part in PARTS] == [exports[1][part] for part in PARTS]
