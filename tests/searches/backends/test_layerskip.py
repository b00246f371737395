"""The library's own decoder as a back end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from layerskip import Target
from layerskip.config import kinds
from layerskip.drafters.registry import drafted_kinds
from searches.app.checks import InputError
from searches.backends.backend import Backend, Load
from searches.backends.layerskip import LayerskipBackend
from tests.searches.backends.contract import LOOKUP, PROMPTS, TASK, BackendContract


class TestLayerskip(BackendContract):
    @pytest.fixture
    def make(self) -> Callable[[Target], Backend]:
        return LayerskipBackend


def test_every_registered_drafter_is_supported(tiny_target: Target) -> None:
    backend = LayerskipBackend(tiny_target)
    assert {kind for kind in kinds() if backend.supports(kind) is None} >= {"none", "layer_skip", "cascade"}
    assert set(drafted_kinds()) <= set(kinds())


def test_several_requests_are_refused(tiny_target: Target) -> None:
    with pytest.raises(InputError, match=r"^load\.concurrency: "):
        LayerskipBackend(tiny_target).compare({"candidate": LOOKUP}, PROMPTS, TASK, Load(2))
