"""Layers that cannot be compiled, or only with fewer fusions, give the same outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip.models import compiled_layers as module
from layerskip.models.compiled_layers import CompiledLayers
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
from tests.models.test_compiled_layers import LAYERS, _assert_close, _caches, _compiled_passes, _model, _tokens


@torch.inference_mode()
def test_a_model_that_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line in the log; its passes are captured all the same."""
    model = _model("llama")
    view = decoding_view(model)
    cache, plain = _caches(model, view, 12)

    def fail(*_: object) -> None:
        raise TypeError("no\nsuch thing")

    monkeypatch.setattr(module, "_compiled_run", lambda fuses: fail)
    for width in (3, 1):
        _assert_close(*(forward(view, _tokens(20)[12 : 12 + width], held, last=width) for held in (cache, plain)))
    assert caplog.text.count("run as they are: no") == 1
    assert "such" not in caplog.text
    assert _compiled_passes(cache) == [False, False]


@torch.inference_mode()
def test_layers_whose_products_cannot_be_fused_are_compiled_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU: once, with one line in the log, whether compiling fails or the results differ."""

    def fail(*_: object) -> None:
        raise TypeError("no\nsuch thing")

    def double(*args: Any) -> Any:
        return 2 * module._run(*args)

    monkeypatch.setattr(module, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(module, "_unfused", set())
    for wrong, reason in ((fail, "no"), (double, "the captured pass gives other results")):
        module._unfused.clear()
        asked: list[bool] = []
        monkeypatch.setattr(
            module,
            "_compiled_run",
            lambda fuses, wrong=wrong, asked=asked: asked.append(fuses) or (wrong if fuses else module._run),
        )
        with torch.inference_mode(False):
            model = _model("llama")
        view = decoding_view(model)
        cache, plain = _caches(model, view, 12)
        for width in (3, 1):
            _assert_close(*(forward(view, _tokens(20)[12 : 12 + width], held, last=width) for held in (cache, plain)))
        assert _compiled_passes(cache) == [True, True]
        assert asked[0]
        assert not any(asked[-2 * LAYERS :])
        assert not CompiledLayers(view, "model.layers").fuses  # nor are those of other views of such models
        assert [record.message.rpartition(": ")[2] for record in caplog.records] == [reason]
        caplog.clear()
