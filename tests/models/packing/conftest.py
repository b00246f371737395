"""Fixtures that pack tiny weights and record what is packed."""

from __future__ import annotations

import pytest
from torch import Tensor

from layerskip.models import packing
from tests.models.packing.layers import DTYPES


@pytest.fixture(autouse=True)
def _pack_tiny_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack the weights of tiny models too."""
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(DTYPES, 1))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Record all packed weights."""
    weights: list[Tensor] = []

    def pack_weight(weight: Tensor) -> Tensor | None:
        weights.append(weight)
        return original(weight)

    original = packing.pack_weight
    monkeypatch.setattr(packing, "pack_weight", pack_weight)
    return weights
