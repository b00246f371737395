"""Tests the training of heads: alignment of targets, loss, the closed form, and scaling."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.readout import Readout
from layerskip.heads.training import (
    Batch,
    cross_entropy,
    fit_linear,
    measure_scales,
    most_likely_tokens,
    predict_tokens,
    rescale,
)
from layerskip.models.target import Target
from tests.accelerator import DEVICE
from tests.drafters.contract import target_of
from tests.drafters.heads import UNROLL, eagle_head, feature_texts
from tests.families import build

TARGET = target_of("llama")
EMBEDDINGS, READOUT = TARGET.model.get_input_embeddings(), Readout(TARGET, None)


@pytest.mark.parametrize("whole", [False, True])
def test_wanted_distributions_are_the_targets(whole: bool) -> None:
    texts = feature_texts("llama")[:3]
    head = EagleHead(EagleShape.of(TARGET))
    found = predict_tokens(head, EMBEDDINGS, Batch.of(texts, DEVICE, whole=whole), UNROLL)
    for step, one in enumerate(found):
        expected, own = [], []
        for text in texts:
            probs = TARGET.model(input_ids=text.tokens[None]).logits[0].softmax(-1)
            longest = max(len(t.tokens) for t in texts) - UNROLL - 1
            for place in range(step + 2, min(len(text.tokens), step + 2 + longest)):
                if whole or place >= text.begin:
                    expected.append(probs[place - 1])
                    own.append(int(text.tokens[place]))
        assert one.tokens.tolist() == own
        assert torch.allclose(READOUT(one.target_hidden).softmax(-1), torch.stack(expected), atol=1e-5)


def test_texts_of_a_batch_are_independent() -> None:
    whole, head = feature_texts("llama")[:4], eagle_head("llama")
    lengths = [len(text.tokens) - 3 * place for place, text in enumerate(whole)]
    texts = [replace(t, tokens=t.tokens[:n], features=t.features[:n]) for t, n in zip(whole, lengths, strict=True)]
    with torch.no_grad():
        together = predict_tokens(head, EMBEDDINGS, Batch.of(texts, DEVICE), UNROLL)
        alone = [predict_tokens(head, EMBEDDINGS, Batch.of([text], DEVICE), UNROLL) for text in texts]
    for step, found in enumerate(together):
        rows = found.hidden.split(found.mask.sum(1).tolist())
        for one, some in zip(alone, rows, strict=True):  # a short text alone has fewer rows
            assert len(one[step].hidden) > 0
            torch.testing.assert_close(some[: len(one[step].hidden)], one[step].hidden, rtol=0, atol=1e-5)


def test_the_closed_form_equals_least_squares() -> None:
    texts = feature_texts("llama")
    head = EagleHead(EagleShape.of(TARGET))
    fit_linear(head, EMBEDDINGS, texts, ridge=1e-7)
    rows, wanted = [], []
    for text in texts:
        first = max(1, text.begin - 1)
        rows.append(torch.cat((EMBEDDINGS(text.tokens)[first + 1 :], text.features[first:-1]), -1))
        wanted.append(text.features[first + 1 :])
    table, outputs = torch.cat(rows).detach().double().numpy(), torch.cat(wanted).double().numpy()
    best = np.linalg.lstsq(table, outputs, rcond=None)[0]  # few tokens: embeddings do not span their width
    found = head.fc.weight.T.detach().double().numpy()
    error, minimum = (np.square(table @ weights - outputs).mean() for weights in (found, best))
    assert minimum * 0.999 < error < minimum * 1.01


@pytest.mark.parametrize("lookback", [0, 2])
def test_a_rescaled_head_computes_the_same_function(lookback: int) -> None:
    texts, trained = feature_texts("llama")[:4], eagle_head("llama", lookback=lookback)
    head = copy.deepcopy(trained)
    norm = head.body.layers[0].post_attention_layernorm
    eps = norm.variance_epsilon
    with torch.no_grad():
        before = predict_tokens(trained, EMBEDDINGS, Batch.of(texts, DEVICE), UNROLL)
        rescale(head, 0.1, 2.5)
        assert not torch.allclose(head.fc.weight, trained.fc.weight, rtol=0.1)
        after = predict_tokens(head, EMBEDDINGS, Batch.of(texts, DEVICE), UNROLL)
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one.hidden, other.hidden, atol=1e-4)
    assert norm.variance_epsilon == pytest.approx(eps / 2.5**2)
    rescale(head, 1.0, 1.0)
    assert norm.variance_epsilon == pytest.approx(eps)
    for name, tensor in trained.state_dict().items():
        assert torch.allclose(tensor, head.state_dict()[name], rtol=1e-4)


def test_scales_are_root_mean_squares_over_answers() -> None:
    texts = [replace(text, features=text.features * 5) for text in feature_texts("llama")]
    of_embeddings, of_states = measure_scales(EMBEDDINGS, texts)
    states = torch.cat([text.features[text.begin :] for text in texts])
    embedded = EMBEDDINGS(torch.cat([text.tokens[text.begin :] for text in texts])).detach()
    for some, scale in ((embedded, of_embeddings), (states, of_states)):
        assert 2**-0.5 <= scale / float(some.square().mean().sqrt()) <= 2**0.5
        assert math.frexp(scale)[0] == 0.5  # a power of two


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # Gemma 2 caps its logits
@pytest.mark.parametrize("tokens", [None, (2, 3, 5, 7, 11)])
@pytest.mark.parametrize("rows", [1, 300])
def test_loss_and_gradient_equal_those_of_all_rows_at_once(family: str, tokens: tuple[int, ...] | None, rows: int) -> None:
    target = Target(build(family, 0))
    readout = Readout(target, None if tokens is None else torch.tensor(tokens))
    torch.manual_seed(0)
    hidden = (4 * torch.randn(rows, target.hidden, device=DEVICE)).requires_grad_()
    final = 4 * torch.randn(rows, target.hidden, device=DEVICE)
    expected = torch.nn.functional.cross_entropy(readout(hidden), readout(final).softmax(-1))
    (slope,) = torch.autograd.grad(3 * expected, hidden)
    found = cross_entropy(readout, hidden, final)
    assert torch.allclose(found, expected, rtol=1e-5)
    assert torch.allclose(torch.autograd.grad(3 * found, hidden)[0], slope, atol=1e-7, rtol=1e-4)
    places = readout(hidden).argmax(-1)
    assert most_likely_tokens(readout, hidden).tolist() == [
        place if tokens is None else tokens[place] for place in places.tolist()
    ]
