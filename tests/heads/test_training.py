"""The training of heads: alignment, loss, the closed form, scaling, induction, and the store of hidden states."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from layerskip import UnsupportedModel
from layerskip.config import ConfigError
from layerskip.heads import feature_store
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.feature_store import FeatureStore, check_readout, read_features
from layerskip.heads.induction import add_induction_heads
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
from layerskip.texts.training_texts import TrainingText
from tests.accelerator import DEVICE
from tests.drafters.contract import target_of
from tests.drafters.members import UNROLL, eagle_head, feature_texts
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
    short = replace(texts[0], tokens=texts[0].tokens[:UNROLL], features=texts[0].features[:UNROLL])
    assert predict_tokens(head, EMBEDDINGS, Batch.of([short], DEVICE), UNROLL) == []


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


TEXTS = [TrainingText((3, 4, 5, 6, 7), 2), TrainingText((5, 4, 3), 1), TrainingText((8, 9, 10, 11), 3)]


def test_stored_features_are_the_models_hidden_states_and_a_damaged_text_is_refused(tmp_path: Path) -> None:
    states = TARGET.model(input_ids=torch.tensor([TEXTS[1].tokens]), output_hidden_states=True).hidden_states
    expected = states[-1][0]
    assert torch.allclose(read_features(TARGET, TEXTS[1].tokens), expected, atol=1e-5)
    (tmp_path / ".000002.safetensors.partial").write_bytes(b"a text that was being written")
    for _ in range(2):  # read, then found
        store = FeatureStore(tmp_path, TARGET)
        store.fill(TEXTS, 10**6)
        assert store.texts == TEXTS
        assert (store[1].tokens.tolist(), store[1].begin) == ([5, 4, 3], 1)
        assert torch.equal(store[1].features, expected.to(torch.bfloat16))
    for content in (b"{", b""):
        (tmp_path / "000001.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=r"^features: .*000001\.safetensors is damaged; delete [^\n]*$"):
            store.fill(TEXTS, 10**6)


def test_a_larger_budget_reads_more_texts_and_a_smaller_one_hides_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, width = [], 32 * 2  # bytes of a token's states
    monkeypatch.setattr(feature_store, "read_features", lambda *given: read.append(given[1]) or read_features(*given))
    for budget, known in ((8 * width, 2), (12 * width - 1, 2), (12 * width, 3), (5 * width, 1), (10**6, 3)):
        store = FeatureStore(tmp_path, TARGET)
        store.fill(TEXTS, budget)
        assert len(store.texts) == known
    assert read == [text.tokens for text in TEXTS]
    with pytest.raises(ConfigError, match=rf"^features: {tmp_path} holds hidden states of other texts"):
        store.fill(TEXTS[1:], 10**6)


def test_a_family_whose_logits_are_not_its_output_layers_is_refused() -> None:
    for family in ("llama", "gemma2", "granite", "qwen2"):
        check_readout(Target(build(family)))
    check_readout(Target(build("hyperclovax")))
    for odd in (build("hyperclovax", logits_scaling=3.0), build("modernbert-decoder")):
        with pytest.raises(UnsupportedModel, match=f"^{type(odd).__name__}: no head can be trained"):
            check_readout(Target(odd))


WIDE = Target(build("llama", 0, vocab_size=200, hidden_size=256, eos_token_id=None))
TEXT = torch.randperm(200, generator=torch.Generator().manual_seed(2))
WIDE_EMBEDDINGS = WIDE.model.get_input_embeddings()
SHAPE = replace(EagleShape.of(WIDE, lookback=2), heads=4, key_value_heads=2, head_dim=64)


def _head(shape: EagleShape, tokens: torch.Tensor | None = None) -> EagleHead:
    """A head whose linear map is zero."""
    torch.manual_seed(0)
    head = EagleHead(shape, tokens).eval()
    torch.nn.init.zeros_(head.fc.weight)
    return head


@torch.no_grad()
def _predicted(head: EagleHead, tokens: list[int]) -> list[int]:
    """The head's predictions after every token except the first."""
    embedded = WIDE_EMBEDDINGS(torch.tensor([tokens]))
    hidden = head(head.with_lookback(embedded, len(tokens) - 1), torch.randn(1, len(tokens) - 1, SHAPE.hidden))
    readout = Readout(WIDE, head.tokens)
    return readout.tokens_at(readout(hidden[0]).argmax(-1)).tolist()


def _copied(head: EagleHead, drafted: torch.Tensor) -> float:
    """The share of right predictions when thirty tokens occur the second and the third time."""
    once = drafted[torch.randperm(len(drafted), generator=torch.Generator().manual_seed(1))[:30]].tolist()
    wanted = [*once, *once][1:]
    predicted = _predicted(head, [*once, *once, *once])[len(once) - 1 :]
    return sum(a == b for a, b in zip(predicted, wanted, strict=False)) / len(wanted)


@pytest.mark.parametrize(
    ("changes", "few"),
    [({"lookback": 1}, False), ({"lookback": 4}, True), ({"key_value_heads": 4}, False), ({"key_value_heads": 1}, False)],
)
def test_what_followed_a_token_is_copied(changes: dict[str, int], few: bool) -> None:
    """For every lookback, with own or shared keys, and for a part of the vocabulary."""
    drafted = torch.arange(20, WIDE.vocabulary, 2) if few else torch.arange(WIDE.vocabulary)
    head = _head(replace(SHAPE, **changes), drafted if few else None)
    without = _copied(head, drafted)
    add_induction_heads(head, WIDE_EMBEDDINGS, Readout(WIDE, head.tokens), TEXT)
    assert _copied(head, drafted) >= 0.9
    assert without <= 0.1
