"""``sampler=auto`` takes the sampler of a registry's folder; what is missing is one line that names the field."""

from __future__ import annotations

import sys
from pathlib import Path

import optuna
import pytest

from searches.app.application import explain, instantiate_part
from searches.app.composition import compose_config

STAND_IN = """
from optuna.samplers import GridSampler

class AutoSampler(GridSampler):
    def __init__(self, seed):
        super().__init__({"n": [1, 2, 3, 4, 5]}, seed)
"""


def _auto(*overrides: str) -> optuna.samplers.BaseSampler:
    sampler = instantiate_part(compose_config("layerskip", ["sampler=auto", *overrides]), "sampler", seed=3)
    assert isinstance(sampler, optuna.samplers.BaseSampler)
    return sampler


def _registry(folder: Path, text: str) -> str:
    package = folder / "samplers" / "auto_sampler"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text, encoding="utf-8")
    return f"sampler.registry_root={folder}"


def test_the_sampler_of_a_registry_proposes_the_trials(tmp_path: Path) -> None:
    pytest.importorskip("optunahub")
    sampler = _auto(_registry(tmp_path / "a, b", STAND_IN))
    study = optuna.create_study(sampler=sampler)
    study.optimize(lambda trial: float(trial.suggest_int("n", 1, 5)), n_trials=5)
    assert sorted(trial.params["n"] for trial in study.trials) == [1, 2, 3, 4, 5]  # random draws would repeat


def _line(*overrides: str) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  Hydra wraps it
        _auto(*overrides)
    return explain(caught.value) or "a defect"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    override = _registry(tmp_path, STAND_IN)
    monkeypatch.setitem(sys.modules, "optunahub", None)
    assert _line(override) == "sampler: auto needs optunahub; this package's extra optunahub installs it"


@pytest.mark.parametrize("text", [None, "import = 3", "raise KeyError"])
def test_a_folder_without_a_usable_sampler_is_named(text: str | None, tmp_path: Path) -> None:
    pytest.importorskip("optunahub")
    override = f"sampler.registry_root={tmp_path}" if text is None else _registry(tmp_path, text)
    line = _line(override)
    assert line.startswith(f"sampler.registry_root: {tmp_path}: cannot be loaded: ") and "\n" not in line


def test_a_failed_download_hints_at_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    optunahub = pytest.importorskip("optunahub")

    def fail(package: str) -> None:
        raise OSError("no network:\ngithub.com")

    monkeypatch.setattr(optunahub, "load_module", fail)
    assert _line() == ("sampler: auto: cannot be loaded: no network: github.com; sampler.registry_root names a copy")
