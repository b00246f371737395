"""The page of a study in a real Chromium; skipped where none is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from searches.report.page import FAILED, FINISHED, Page, write_page
from tests.browser import CHROMIUM, Browser
from tests.searches.report.pages import engine_study, known_study, workers_study

pytestmark = [pytest.mark.system, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

_PHONE, _DESKTOP = 375, 1440
_MARKS = "document.querySelectorAll('#{} .points path').length"
_CLIPPED = """Array.from(document.querySelectorAll('p, h1, h2, td, li, .chart')).filter(element => {
  const box = element.getBoundingClientRect();
  return box.width && (box.left < 0 || box.right > innerWidth || element.scrollWidth > element.clientWidth + 1);
}).map(element => element.outerHTML.slice(0, 120))"""

_TINY = """Array.from(document.querySelectorAll('p, td, li, .xtick text')).filter(
  element => parseFloat(getComputedStyle(element).fontSize) < 12).length"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests."""
    with Browser() as running:
        yield running


def _show(browser: Browser, page: Path, width: int) -> None:
    """Open a page; check that it renders without a complaint, loads nothing and does not scroll sideways."""
    browser.open(page, width, touch=width == _PHONE)
    browser.evaluate("window.drawn.then(() => null)")
    assert browser.problems == []
    assert [address for address in browser.requests if not address.startswith(("data:", "blob:"))] == [
        page.resolve().as_uri()
    ]
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(_CLIPPED) == []
    # plotly.js states what it does not understand; it would ignore it.
    unknown = "Object.values(figures).flatMap(figure => Plotly.validate(figure.data, figure.layout) ?? [])"
    assert browser.evaluate(unknown) == []
    assert browser.evaluate(_TINY) == 0


@pytest.mark.parametrize("width", [_PHONE, _DESKTOP])
def test_a_finished_study_is_drawn_whole(browser: Browser, width: int, tmp_path: Path) -> None:
    study, finals = known_study()
    path = tmp_path / "report.html"
    write_page(path, study, Page(5, FINISHED, finals=finals))
    _show(browser, path, width)
    counts = {name: browser.evaluate(_MARKS.format(name)) for name in ("history", "acceptance")}
    assert counts == {"history": 5, "acceptance": 4}
    assert browser.evaluate(_MARKS.format("held-out")) == 2 * len(finals.finalists)
    assert browser.evaluate(_MARKS.format("timeline")) == 6  # the interrupted trial, too
    rows = browser.evaluate("Array.from(document.querySelectorAll('tr.best td')).map(cell => cell.textContent)")
    assert rows[:3] == [finals.winner.config.label(), "wins", "1.600"]
    assert browser.evaluate("document.querySelector('h1').textContent") == "Study known <b>&amp;"
    assert "best.json" in browser.evaluate("document.querySelector('pre').textContent")


@pytest.mark.parametrize("width", [_PHONE, _DESKTOP])
def test_workers_and_engines_are_drawn(browser: Browser, width: int, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    study = workers_study()
    write_page(path, study, Page(8, stage="trials"))
    _show(browser, path, width)
    assert browser.evaluate(_MARKS.format("timeline")) == len(study.trials) - 1  # without the duplicate
    study = engine_study()
    write_page(path, study, Page(8, FAILED))
    _show(browser, path, width)
    assert browser.evaluate(_MARKS.format("load")) == 4  # plain decoding, too
