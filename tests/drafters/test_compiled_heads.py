"""Compiled passes of heads draft what they draft as they are."""

from __future__ import annotations

import pytest

from layerskip.drafters.eagle import Eagle
from layerskip.drafters.medusa import Medusa
from layerskip.models.compiled_layers import set_compiling
from layerskip.models.graph_capture import CapturingCache
from tests.accelerator import DEVICE, decode_static
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, Recorder, generated, target_of
from tests.drafters.members import member_of
from tests.models.compilers import rewrite_only

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="stands in for a GPU")


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_compiled_heads_draft_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("llama")
    graphs = rewrite_only(monkeypatch)
    found = []
    for mode in ("off", "on"):
        drafter = member_of(method, target)
        assert isinstance(drafter, Eagle | Medusa)
        module = drafter.head.body if isinstance(drafter, Eagle) else drafter.heads
        set_compiling(module, mode)
        recorder = Recorder(drafter)
        for prompt in PROMPTS[1:3]:
            tokens = decode_static(target, recorder, prompt, GREEDY, LENGTH).tokens
            assert tokens == generated("llama", prompt, LENGTH)
        found.append(recorder.drafts)
        set_compiling(module, "auto")
        cache = drafter._cache if isinstance(drafter, Eagle) else drafter._captured
        assert isinstance(cache, CapturingCache)
        captured = [one.layers is not None for passes in cache._passes.values() for one in passes.values()]
        assert captured and all(captured) == (mode == "on")
        assert bool(graphs) == (mode == "on")
    assert found[0] == found[1]
