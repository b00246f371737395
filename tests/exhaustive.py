"""Choice between the parameters of `make test` and the exhaustive ones of `make lossless`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

EXHAUSTIVE = os.environ.get("LAYERSKIP_ALL_PROMPTS") == "1"


def representative(few: Iterable[T], others: Iterable[T] = ()) -> list[T]:
    """Return parameters that cover every code path, and all ``others`` where ``LAYERSKIP_ALL_PROMPTS=1``."""
    return [*few, *(others if EXHAUSTIVE else ())]
