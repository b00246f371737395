"""The contract holds for an engine with processes and failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from layerskip import SpeculativeConfig, Target
from searches.backends.backend import Backend
from tests.searches.backends.contract import LOOKUP, BackendContract, FailingEngine, ServesSeveral
from tests.searches.backends.fake import BROKEN, FakeBackend


class TestFake(BackendContract, FailingEngine, ServesSeveral):
    config = replace(LOOKUP, match="first")
    other = replace(config, num_speculative_tokens=2)

    @pytest.fixture
    def make(self) -> Callable[[Target], Backend]:
        return FakeBackend

    @pytest.fixture
    def broken(self) -> SpeculativeConfig:
        return replace(LOOKUP, num_speculative_tokens=BROKEN)
