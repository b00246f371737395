"""Work without enough memory is left out, and memory is released; other errors stay errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from searches.app import memory
from searches.app.memory import within_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError,
        lambda: torch.OutOfMemoryError("CUDA"),
        lambda: RuntimeError("cannot allocate memory"),
    ],
)
def test_memory_is_released_once_nothing_refers_to_what_did_not_fit(
    error: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    released: list[bool] = []

    def work() -> int:
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        raise error()

    monkeypatch.setattr(memory, "release_memory", lambda: released.append(held[0]() is None))
    assert within_memory(work) is None
    assert released == [True]


def test_other_errors_and_results_are_passed_on() -> None:
    def work() -> int:
        raise RuntimeError("a defect")

    assert within_memory(lambda: 5) == 5
    with pytest.raises(RuntimeError, match="a defect"):
        within_memory(work)
