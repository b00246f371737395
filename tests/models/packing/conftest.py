"""Tiny weights are laid out, and what is laid out is seen."""

from __future__ import annotations

import pytest
from torch import Tensor

from layerskip.models import packing
from tests.models.packing.layers import DTYPES


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are tiny, and laid out all the same."""
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(DTYPES, 1))


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """All that is laid out."""
    made: list[Tensor] = []

    def lay_out(weight: Tensor) -> Tensor | None:
        made.append(weight)
        return original(weight)

    original = packing.lay_out
    monkeypatch.setattr(packing, "lay_out", lay_out)
    return made
