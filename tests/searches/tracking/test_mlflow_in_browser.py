"""MLflow's own pages of a study in a real Chromium; skipped where none is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from searches.backends.engine_process import free_port
from tests.browser import CHROMIUM, Browser
from tests.searches.programs import runs, sqlite
from tests.searches.tracking.server import served

pytestmark = [pytest.mark.system, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


@pytest.fixture(scope="module")
def server(finished_study: Path) -> Iterator[str]:
    """The URL of MLflow's server on the store of a finished study."""
    with served(finished_study, free_port()) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests."""
    with Browser() as running:
        yield running


def _wait_for_words(browser: Browser, url: str, *words: str) -> None:
    """Open a page, and wait until it shows all words."""
    browser.open(url, 1440, 1200)
    for word in words:
        browser.wait_for(f"document.body.innerText.includes({word!r})")


def _version(outputs: Path) -> str:
    """The version of the winner; other tests may have gone on with the study, so that it need not be the first."""
    return str(MlflowClient(sqlite(outputs)).get_model_version_by_alias("one", "best").version)


def test_the_page_of_a_study_shows_its_dataset_its_source_and_its_model(
    browser: Browser, server: str, finished_study: Path
) -> None:
    (run,) = runs(sqlite(finished_study), "study")
    digest, commit = run.data.tags["prompts_digest"][:36], str(run.data.tags["git_commit"])[:7]
    page = f"{server}/#/experiments/{run.info.experiment_id}/runs"
    _wait_for_words(browser, page, "Source", "Dataset", f"packaged ({digest})", "python -m searches.layerskip")
    shown = (f"packaged ({digest})", "Registered models", f"v{_version(finished_study)}", commit)
    shown += (run.data.tags["instruction_set"],)
    _wait_for_words(browser, f"{page}/{run.info.run_id}", *shown)


def test_the_system_metrics_of_a_study_are_drawn(browser: Browser, server: str, finished_study: Path) -> None:
    (run,) = runs(sqlite(finished_study), "study")
    page = f"{server}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}/system-metrics"
    _wait_for_words(browser, page, "cpu_utilization_percentage", "system_memory_usage_megabytes")


def test_the_winner_is_the_registered_version_with_the_alias_best(
    browser: Browser, server: str, finished_study: Path
) -> None:
    _wait_for_words(browser, f"{server}/#/models/one", f"Version {_version(finished_study)}", "@\xa0best")
