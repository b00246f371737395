"""The library's own decoder as a back end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from layerskip import SpeculativeConfig, Target
from layerskip.config import methods
from layerskip.drafters.registry import drafted_methods
from layerskip.models import compiled_layers, graph_capture
from layerskip.models.compiled_layers import set_compiling
from searches.app.checks import InputError
from searches.backends.backend import Backend, Workload
from searches.backends.layerskip import LayerskipBackend
from tests.searches.backends.contract import LOOKUP, PROMPTS, TASK, BackendContract


class TestLayerskip(BackendContract):
    @pytest.fixture
    def make(self) -> Callable[[Target], Backend]:
        return LayerskipBackend


def test_every_registered_drafter_is_supported(tiny_target: Target) -> None:
    backend = LayerskipBackend(tiny_target)
    assert {method for method in methods() if backend.supports(method) is None} >= {"none", "layer_skip", "cascade"}
    assert set(drafted_methods()) <= set(methods())


def test_seconds_of_capturing_are_figures_of_the_configuration(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """They add up over the comparisons of a trial."""
    monkeypatch.setattr(compiled_layers, "_compiled_run", lambda fuses: compiled_layers._run)
    readings = itertools.count()
    monkeypatch.setattr(graph_capture, "now", lambda _: 1000.0 * next(readings))
    backend = LayerskipBackend(replace(tiny_target, compile="on"))
    other = SpeculativeConfig("prompt_lookup", num_speculative_tokens=7)
    try:
        assert backend.metrics() == {}
        list(backend.compare({"candidate": LOOKUP}, PROMPTS, TASK))
        first = backend.metrics()["startup_seconds"]
        assert first >= 2000.0  # at least a step and a verification were captured
        list(backend.compare({"candidate": LOOKUP}, PROMPTS, TASK))
        assert backend.metrics() == {"startup_seconds": first}
        list(backend.compare({"candidate": other}, PROMPTS, TASK))
        assert backend.metrics().get("startup_seconds", 0.0) < first  # most passes have been captured
    finally:
        set_compiling(tiny_target.model, "auto")


def test_several_requests_are_refused(tiny_target: Target) -> None:
    with pytest.raises(InputError, match=r"^workload\.concurrency: "):
        LayerskipBackend(tiny_target).compare({"candidate": LOOKUP}, PROMPTS, TASK, Workload(2))
