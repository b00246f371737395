"""Tests the dynamic programme against an exhaustive search, and the layer functions against the model."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from layerskip import SkipMask
from layerskip.models.cache import KVCache
from layerskip.scan.row_model import RowModel
from layerskip.scan.scan import similar_masks
from layerskip.scan.text_batch import run_target
from tests.families import build


def _similarity(one: Tensor, other: Tensor) -> float:
    return float(cosine_similarity(one, other, dim=-1).mean())


def test_similar_masks_equal_an_exhaustive_search() -> None:
    """Layers that add to dimensions of their own, for which the programme is exact."""
    sizes = [0.5, 0.1, 0.9, 0.2, 0.7]
    first = torch.zeros(1, 3, 6)
    first[..., 5] = 1.0

    def step(index: int) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(index), 6) * sizes[index]

    layers = [lambda hidden, index=index: hidden + step(index) for index in range(5)]
    states = [first]
    for layer in layers:
        states.append(layer(states[-1]))
    found = similar_masks(layers, states, range(1, 5), maximum=3)
    for count, mask in enumerate(found, start=1):

        def ends(skipped: tuple[int, ...]) -> Tensor:
            return first + sum(step(i) for i in range(5) if i not in skipped)

        best = max(itertools.combinations(range(1, 5), count), key=lambda skipped: _similarity(ends(skipped), states[-1]))
        assert mask == SkipMask.of(5, set(best), set(best))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3_moe"])
@torch.inference_mode()
def test_layer_functions_equal_the_models_layers(family: str) -> None:
    model = build(family)
    tokens, first = torch.arange(3, 15), 6
    rows = RowModel(model)
    _, text, windows, _ = run_target(rows, tokens, last=1)
    text.length, count = first, len(tokens) - first
    cache = KVCache(rows.layers, first + count)
    cache.copy_from([(text, first)])
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    visible = [(causal if window is None else window)[first:] for window in windows]
    positions = torch.arange(first, len(tokens))
    layers, states = rows.layer_functions(tokens[first:], positions, cache, visible)
    expected = model(input_ids=tokens[None], output_hidden_states=True).hidden_states
    for index, layer in enumerate(layers):
        torch.testing.assert_close(states[index], expected[index][:, first:], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer(states[index]), states[index + 1], rtol=1e-5, atol=1e-5)
