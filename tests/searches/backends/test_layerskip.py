"""The library's own decoder as a back end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from layerskip import Target
from searches.app.checks import InputError
from searches.backends import layerskip
from searches.backends.backend import Backend, Comparison, Workload
from searches.backends.layerskip import LayerskipBackend
from tests.searches.backends.contract import LOOKUP, PROMPTS, SHORTER, TASK, BackendContract


class TestLayerskip(BackendContract):
    @pytest.fixture
    def make(self) -> Callable[[Target], Backend]:
        return LayerskipBackend


def test_seconds_of_capturing_are_figures_of_the_configuration(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """They add up over the comparisons of a trial."""
    backend, spent = LayerskipBackend(tiny_target), [1.0]
    monkeypatch.setattr(layerskip, "capture_seconds", lambda: sum(spent))
    assert backend.metrics() == {}
    for seconds in (5.0, 2.0):
        backend.compare(Comparison({"candidate": LOOKUP}, PROMPTS, TASK))
        spent.append(seconds)
    assert backend.metrics() == {"startup_seconds": 7.0}
    backend.compare(Comparison({"candidate": SHORTER}, PROMPTS, TASK))
    assert backend.metrics() == {}


def test_several_requests_are_refused(tiny_target: Target) -> None:
    with pytest.raises(InputError, match=r"^workload\.concurrency: "):
        LayerskipBackend(tiny_target).compare(Comparison({"candidate": LOOKUP}, PROMPTS, TASK, Workload(2)))
