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

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.device.transfer import begin_reading, copy_to_device, read_to_host, waiting
from layerskip.drafters.cascade import Cascade
from layerskip.drafters.cross_tokenizer import CrossTokenizer, Translation
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle import Eagle
from layerskip.drafters.medusa import Medusa
from layerskip.drafters.registry import build_drafter
from layerskip.heads.eagle import EagleHead, EagleShape, read_modules
from layerskip.heads.medusa import MedusaHeads, MedusaShape
from layerskip.heads.readout import Readout
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target
from tests.accelerator import DEVICE, decode_static
from tests.drafters.test_cross_tokenizer import LETTERS, spelling
from tests.families import build

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
        elif name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            self.add(name)
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
            patch.setattr(Tensor, name, _counting(getattr(Tensor, name), name, waits))
        with waits:
            yield waits.counts


def _counting(method: Callable[..., Any], name: str, waits: _Waits) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        waits.add(name)
        return method(*args, **kwargs)

    return call


OPERATIONS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[0]),
    "index": lambda t: [7, 8, 9][t[0]],
    "tolist": lambda t: t.tolist(),
    "nonzero": lambda t: t.nonzero(),
    "a mask": lambda t: t[t > 0],
    "repeat_interleave": lambda t: torch.repeat_interleave(t, t),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_waits_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    values = torch.tensor([1, 2], device=DEVICE)
    with counted(monkeypatch) as waits:
        copy_to_device([1, 2, 3], torch.device(DEVICE))  # does not wait
        with nullcontext() if DEVICE == "cpu" else pytest.raises(RuntimeError, match="synchroniz"):
            OPERATIONS[name](values)
    assert sum(waits.values()) == (DEVICE == "cpu")


@pytest.fixture(scope="module")
def target() -> Target:
    """A model without an end-of-sequence token."""
    return Target(build("llama", 1, vocab_size=12, eos_token_id=None))


def _eagle(target: Target, stop: StopRule | None = None, **tree: Any) -> Eagle:
    torch.manual_seed(0)
    head = EagleHead(EagleShape.of(target, lookback=2), torch.arange(2, 11)).to(DEVICE).eval()
    return Eagle(head, target.model.get_input_embeddings(), Readout(target, head.tokens), 3, stop or StopRule(), **tree)


def _draft_model(target: Target, length: int, stop: StopRule) -> DraftModel:
    return DraftModel(decoding_view(target.model), target.layers, length, stop)


def _medusa(target: Target) -> Medusa:
    torch.manual_seed(0)
    width = int(target.model.config.hidden_size)
    heads = MedusaHeads(MedusaShape(width, 3, read_modules(target))).to(DEVICE).eval()
    return Medusa(heads, Readout(target, None), 3, 3, 12, 0.02)


def _of(method: str, **fields: Any) -> Callable[[Target], Drafter]:
    return lambda target: build_drafter(SpeculativeConfig.from_dict({"method": method} | fields), target)


SKIP = {"mask": "attention:1;mlp:2", "num_speculative_tokens": 3}
LOOKUP = {"method": "prompt_lookup", "prompt_lookup_min": 3}
DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "none": _of("none"),
    "prompt_lookup": _of("prompt_lookup"),
    "retrieval": _of("retrieval", min_token_prob=0.0),
    "token_recycling": _of("token_recycling", min_token_prob=0.0),
    "lookahead": _of("lookahead", window=2, num_speculative_tokens=2),
    "layer_skip": _of("layer_skip", **SKIP),
    "layer_skip with siblings": _of("layer_skip", siblings=2, min_token_prob=0.1, **SKIP),
    "draft_model": lambda target: _draft_model(target, 3, StopRule()),
    # An adaptive rule that never waits for a confidence: the last token of a draft needs none.
    "draft_model of one token": lambda target: _draft_model(target, 1, StopRule("adaptive", 0.5)),
    "eagle": _eagle,
    "eagle trees": lambda target: _eagle(target, top_k=3, tree_tokens=7, min_token_prob=0.02),
    "medusa": _medusa,
    "cascade": _of("cascade", members=[LOOKUP, {"method": "layer_skip", **SKIP}]),
    "priced cascade": _of("cascade", members=[LOOKUP, {"method": "layer_skip", **SKIP}], verify_cost=[1.1, 1.2]),
    "cascade that learns": lambda target: Cascade(
        [DRAFTERS["prompt_lookup"](target), DRAFTERS["token_recycling"](target), DRAFTERS["eagle trees"](target)]
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
    drafter = _draft_model(target, 3, StopRule("threshold", 0.0))
    with counted(monkeypatch) as waits:
        result = decode_static(target, drafter, PROMPT, GREEDY, LENGTH, static=False)
    # The last token of a draft needs no confidence; here the rounds draft 3 tokens, the last one 2.
    assert waits == {"reads": 1 + 5 + 4 * 2 + 1}
    assert len(result.stats.rounds) == 5


def test_a_draft_in_another_vocabulary_waits_once_more(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = spelling(LETTERS[: target.vocabulary])
    translation = Translation(letters, letters)
    drafter = CrossTokenizer(decoding_view(target.model), target.layers, target.vocabulary, translation, 3, StopRule())
    first = decode_static(target, drafter, PROMPT, GREEDY, LENGTH)
    with counted(monkeypatch) as waits:
        result = decode_static(target, drafter, PROMPT, GREEDY, LENGTH)
    assert result == first
    assert all(each.drafted for each in result.stats.rounds)
    assert waits == {"reads": 1 + 2 * len(result.stats.rounds)}
