"""What heads learn: targets that line up with the text, a closed form that is the best linear map, and what is counted."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from layerskip.eagle import EagleHead, EagleShape
from layerskip.medusa import MedusaHeads, MedusaShape
from layerskip.readout import Readout
from layerskip.training import Batch, agreements, fit_linear, foretell, loss_of
from tests.drafters.contract import target_of
from tests.drafters.heads import UNROLL, eagle_head, thoughts

TARGET = target_of("llama")
EMBEDDINGS, READOUT = TARGET.model.get_input_embeddings(), Readout(TARGET, None)


def test_what_is_wanted_is_what_the_target_says_there() -> None:
    texts = thoughts("llama")[:3]
    head = EagleHead(EagleShape.of(TARGET))
    found = foretell(head, EMBEDDINGS, READOUT, Batch.of(texts, head), UNROLL)
    for step, one in enumerate(found):
        expected, own = [], []
        for text in texts:
            probs = TARGET.model(input_ids=text.tokens[None]).logits[0].softmax(-1)
            longest = max(len(t.tokens) for t in texts) - UNROLL - 1
            for place in range(step + 2, min(len(text.tokens), step + 2 + longest)):
                if place >= text.begin:
                    expected.append(probs[place - 1])
                    own.append(int(text.tokens[place]))
        assert one.own.tolist() == own
        assert torch.allclose(one.wanted, torch.stack(expected), atol=1e-5)


def test_texts_of_a_batch_do_not_see_each_other() -> None:
    texts, head = thoughts("llama")[:4], eagle_head("llama")
    with torch.no_grad():
        together = foretell(head, EMBEDDINGS, READOUT, Batch.of(texts, head), UNROLL)
        alone = [foretell(head, EMBEDDINGS, READOUT, Batch.of([text], head), UNROLL) for text in texts]
    longest = max(len(text.tokens) for text in texts)
    for step in range(UNROLL):
        rows = [one[step].logits for one, text in zip(alone, texts, strict=True) if len(text.tokens) == longest]
        assert rows
        marks = together[step].alive
        ends = marks.sum(1).cumsum(0).tolist()
        parts = [together[step].logits[a:b] for a, b in itertools.pairwise([0, *ends])]
        same = [part for part, text in zip(parts, texts, strict=True) if len(text.tokens) == longest]
        for one, other in zip(rows, same, strict=True):
            assert torch.allclose(one, other, atol=1e-5)


def test_the_closed_form_is_the_best_linear_map() -> None:
    texts = thoughts("llama")
    head = EagleHead(EagleShape.of(TARGET))
    fit_linear(head, EMBEDDINGS, texts, ridge=1e-7)
    rows, wanted = [], []
    for text in texts:
        first = max(1, text.begin - 1)
        rows.append(torch.cat((EMBEDDINGS(text.tokens)[first + 1 :], text.features[first:-1]), -1))
        wanted.append(text.features[first + 1 :])
    inputs = torch.cat((torch.cat(rows), torch.ones(sum(map(len, rows)), 1)), -1).double()
    table, behind = inputs.detach().numpy(), torch.cat(wanted).double().numpy()
    best = np.linalg.lstsq(table, behind, rcond=None)[0]  # few tokens: embeddings do not span their width
    found = torch.cat((head.fc.weight.T, head.fc.bias[None])).detach().double().numpy()
    error, least = (np.square(table @ weights - behind).mean() for weights in (found, best))
    assert least * 0.999 < error < least * 1.01


def test_an_untrained_head_is_its_linear_map() -> None:
    head = EagleHead(EagleShape.of(TARGET))
    states, embedded = torch.randn(1, 5, 32), torch.randn(1, 5, 32)
    assert torch.allclose(head(embedded, states), head.fc(torch.cat((embedded, states), -1)))


def test_untrained_medusa_heads_say_what_the_target_does() -> None:
    heads = MedusaHeads(MedusaShape(32, 2, ("model",)))
    states = torch.randn(3, 32)
    assert torch.equal(heads(states), states[:, None].expand(3, 2, 32))


def test_learning_makes_drafts_right_more_often() -> None:
    texts = thoughts("llama")
    fresh = EagleHead(EagleShape.of(TARGET))
    batch = Batch.of(texts, fresh)
    with torch.no_grad():
        before, after = (foretell(head, EMBEDDINGS, READOUT, batch, UNROLL) for head in (fresh, eagle_head("llama")))
    assert loss_of(after) < loss_of(before)
    assert sum(right for _, right in agreements(after, None)) > sum(right for _, right in agreements(before, None))


def test_a_draft_counts_as_long_as_it_was_right_so_far() -> None:
    texts, head = thoughts("llama")[:5], eagle_head("llama")
    with torch.no_grad():
        found = foretell(head, EMBEDDINGS, READOUT, Batch.of(texts, head), UNROLL)
    counts = agreements(found, None)
    assert counts[0][0] == int(found[0].alive.sum())
    reached = torch.ones_like(found[0].alive)
    for (tried, right), one in zip(counts, found, strict=True):
        table = torch.zeros_like(one.alive)
        table[one.alive] = one.logits.argmax(-1) == one.own
        assert tried == int((one.alive & reached).sum())
        reached = reached & one.alive & table
        assert right == int(reached.sum())
