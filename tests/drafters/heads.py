"""Heads that are trained a little on a tiny target, for tests that need drafts which are sometimes right."""

from __future__ import annotations

import functools
import itertools

import torch

from layerskip.decoding.sampling import Sampling
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.feature_store import TextFeatures, read_features
from layerskip.heads.induction import add_induction_heads
from layerskip.heads.medusa import MedusaHeads, MedusaShape
from layerskip.heads.readout import Readout
from layerskip.heads.training import Batch, head_loss, predict_tokens
from layerskip.models.target import Target
from layerskip.texts.training_texts import write_texts
from tests.accelerator import DEVICE
from tests.drafters.contract import target_of, toy_target

UNROLL = 3


@functools.cache
def feature_texts(family: str) -> list[TextFeatures]:
    """Returns texts of a tiny target with its hidden states."""
    target = tiny(family)
    texts = itertools.islice(write_texts(target, Sampling(1.0), 24, 16, 0), 32)
    return [TextFeatures(torch.tensor(t.tokens), read_features(target, t.tokens), t.begin) for t in texts]


def tiny(family: str) -> Target:
    """Returns a tiny target; ``toy`` is that of the exact law."""
    return toy_target() if family == "toy" else target_of(family)


def family_of(target: Target) -> str:
    """Returns the name under which :func:`tiny` has a target; end tokens do not matter to a head."""
    return "toy" if target is toy_target() else str(target.model.config.model_type)


@functools.cache
def eagle_head(family: str, vocabulary: int | None = None, lookback: int = 0) -> EagleHead:
    """Returns a trained EAGLE head."""
    tokens = None if vocabulary is None else torch.arange(tiny(family).vocabulary - vocabulary, tiny(family).vocabulary)
    torch.manual_seed(0)
    head = EagleHead(EagleShape.of(tiny(family), vocabulary, lookback), tokens).to(DEVICE)
    readout = Readout(tiny(family), head.tokens)
    tokens_seen = torch.cat([text.tokens for text in feature_texts(family)])
    add_induction_heads(head, tiny(family).model.get_input_embeddings(), readout, tokens_seen)
    return _trained(family, head)


@functools.cache
def medusa_heads(family: str) -> MedusaHeads:
    """Returns trained Medusa heads."""
    target = tiny(family)
    return _trained(family, MedusaHeads(MedusaShape(target.hidden, UNROLL)).to(DEVICE))


def _trained(family: str, head: EagleHead | MedusaHeads):  # type: ignore[no-untyped-def]
    target, texts = tiny(family), feature_texts(family)
    embeddings, readout = target.model.get_input_embeddings(), Readout(target, head.tokens)
    optimiser = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for step in range(30):
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(step)).tolist()
        batch = Batch.of([texts[place] for place in order[:12]], DEVICE)
        loss = head_loss(predict_tokens(head, embeddings, batch, UNROLL), readout)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return head.eval()
