"""Tests drafts that begin at the first skip against drafts that run all layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerskip.mask import SkipMask
from layerskip.models.target import Target
from layerskip.scan.scan import Scanner
from tests.drafters.contract import PROMPTS
from tests.families import build
from tests.scan.test_scan import FAMILIES, GREEDY, continuation_of


@pytest.mark.parametrize("family", FAMILIES)
def test_only_wrong_drafts_run_the_layers_before_the_first_skip(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late begins do not change any confidence or agreement."""
    monkeypatch.setattr("layerskip.scan.parallel_drafts._FEW", 0)
    monkeypatch.setattr("layerskip.scan.parallel_drafts._WORTH", 1)
    target = Target(build(family))
    continuations = [continuation_of(target, i, prompt, GREEDY, 12) for i, prompt in enumerate(PROMPTS)]
    scanner, whole = (Scanner(target, continuations, GREEDY, depth=3) for _ in range(2))
    whole._drafts._late = False
    mask = SkipMask.parse(f"mlp:{target.layers - 1}", target.layers)
    rows: list[int] = []
    blocks = scanner._texts.model._model_copy.get_submodule(scanner._texts.model.architecture.path)
    name = scanner._texts.model.architecture.blocks[0].mlp[0]
    blocks.get_submodule(f"0.{name}").register_forward_hook(lambda _module, args, _output: rows.append(args[0].shape[-2]))
    for floor in (None, 0.0):
        (found,), (expected,) = scanner.scan([mask], floor=floor), whole.scan([mask], floor=floor)
        for one, other in zip(found.traces, expected.traces, strict=True):
            np.testing.assert_allclose(one.confidence, other.confidence, rtol=1e-3, atol=1e-5)
            np.testing.assert_array_equal(one.agreed, other.agreed)
        assert bool(rows) == (floor is not None)


def test_a_family_whose_layers_pass_on_more_than_hidden_states_runs_all_layers(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    continuations = [continuation_of(tiny_target, i, prompt, GREEDY, 12) for i, prompt in enumerate(PROMPTS)]
    mask = SkipMask.parse("mlp:2", tiny_target.layers)
    (expected,) = Scanner(tiny_target, continuations, GREEDY, depth=3).scan([mask])
    monkeypatch.setattr(
        "layerskip.scan.text_batch.TextBatch.layer_input", lambda self, layer, starts: torch.zeros(1, len(starts), 1)
    )
    (found,) = Scanner(tiny_target, continuations, GREEDY, depth=3).scan([mask])
    for one, other in zip(found.traces, expected.traces, strict=True):
        np.testing.assert_allclose(one.confidence, other.confidence, rtol=1e-4)
