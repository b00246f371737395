"""How often the host waits for the device: once in every round, in the one function that reads.

On a CPU nothing waits, so the operations that would wait on CUDA are counted. On CUDA torch itself refuses them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from layerskip.config import StopRule
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.device.transfer import begin_reading, copy_to_device, read_to_host, waiting
from layerskip.drafters.cascade import Cascade
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle import Eagle
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target
from tests.accelerator import DEVICE, decode_static
from tests.drafters.contract import target_of
from tests.drafters.members import SECONDS, eagle_head, member_of

GREEDY = Sampling()
SAMPLINGS = {"greedy": GREEDY, "sampled": Sampling(1.0), "warped": Sampling(0.8, 5, 0.9, 0.02, 1.2)}
PROMPT = [3, 4, 5, 3, 4, 5, 3, 4]
LENGTH = 20

# Values that Python reads, and shapes that depend on values.
WAITING = {
    *("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "argwhere", "masked_select"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "tensor_split"),
}
READING = ("tolist", "numpy", "cpu", "__array__")
"""Methods of tensors that copy to the host, and do nothing to count where it is the device."""


class _Waits(TorchDispatchMode):
    """Counts the operations that wait, apart from those of ``read_to_host``, whose calls are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.reading = False

    def add(self, name: str) -> None:
        if not self.reading:
            self.counts[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING:
            self.add(name)
        elif name == "index" and any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1]):
            self.add("index by a mask")
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the waits of everything that runs; calls of the two functions that may wait count as ``reads``."""
    waits = _Waits()
    with monkeypatch.context() as patch:

        def allowed(read: Callable[..., Any], *tensors: Tensor) -> Any:
            waits.reading = True
            try:
                with waiting("default"):
                    return read(*tensors)
            finally:
                waits.reading = False

        def read(*tensors: Tensor) -> list[Any]:
            waits.add("reads")
            return allowed(read_to_host, *tensors)

        def begin(tensor: Tensor) -> Callable[[], Any]:
            waits.add("reads")
            return partial(allowed, begin_reading(tensor))  # which may not wait itself

        for name, module in list(sys.modules.items()):
            for function, replacement in ((read_to_host, read), (begin_reading, begin)):
                if name.startswith("layerskip.") and getattr(module, function.__name__, None) is function:
                    patch.setattr(module, function.__name__, replacement)
        if DEVICE != "cpu":
            with waiting("error"):
                yield waits.counts
            return
        for name in READING:
            method = getattr(Tensor, name)
            patch.setattr(Tensor, name, lambda *given, name=name, method=method: (waits.add(name), method(*given))[1])
        with waits:
            yield waits.counts


@pytest.mark.parametrize("operation", [lambda t: t[0].item(), lambda t: t.tolist(), lambda t: t[t > 0]])
def test_an_operation_that_waits_is_noticed(monkeypatch: pytest.MonkeyPatch, operation: Callable[[Tensor], object]) -> None:
    values = torch.tensor([1, 2], device=DEVICE)
    with counted(monkeypatch) as waits:
        copy_to_device([1, 2, 3], torch.device(DEVICE))  # does not wait
        with nullcontext() if DEVICE == "cpu" else pytest.raises(RuntimeError, match="synchroniz"):
            operation(values)
    assert sum(waits.values()) == (DEVICE == "cpu")


@pytest.fixture(scope="module")
def target() -> Target:
    """A model without an end-of-sequence token."""
    return target_of("llama")


def _eagle_trees(target: Target) -> Drafter:
    return Eagle(eagle_head("llama"), target, 3, StopRule(), 3, 7, 0.02)


METHODS = ("none", *SECONDS, "draft_model", "eagle")
DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    **{method: partial(member_of, method) for method in (*METHODS, "cascade")},
    "eagle trees": _eagle_trees,
    "cascade with trees": lambda target: Cascade(
        [member_of("prompt_lookup", target), member_of("token_recycling", target), _eagle_trees(target)]
    ),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_round_waits_for_the_device_once(
    target: Target, monkeypatch: pytest.MonkeyPatch, name: str, sampling: str
) -> None:
    """With the static shapes of a GPU; the run before it records every pass and compares it with the computed one."""
    drafter = DRAFTERS[name](target)
    first = decode_static(target, drafter, PROMPT, SAMPLINGS[sampling], LENGTH, seed=0)
    drafter.reset_state()
    with counted(monkeypatch) as waits:
        result = decode_static(target, drafter, PROMPT, SAMPLINGS[sampling], LENGTH, seed=0)
    assert result == first
    assert waits == {"reads": 1 + len(result.stats.rounds)}
    assert (result.stats.drafted > 0) == (name != "none")
    assert (result.stats.accepted > 0) == (name != "none") or sampling != "greedy"


def test_a_stop_rule_waits_for_every_confidence(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above prove nothing unless the confidence that a stop rule reads is counted."""
    if DEVICE != "cpu":
        pytest.skip("a GPU refuses it")
    drafter = DraftModel(decoding_view(target.model), target.layers, 3, StopRule("threshold", 0.0))
    with counted(monkeypatch) as waits:
        result = decode_static(target, drafter, PROMPT, GREEDY, LENGTH, static=False)
    # The last token of a draft needs no confidence; here the rounds draft 3 tokens, the last one 2.
    assert waits == {"reads": 1 + 5 + 4 * 2 + 1}
    assert len(result.stats.rounds) == 5
