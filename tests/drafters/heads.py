"""Heads that are trained a little on a tiny target, for tests that need drafts which are sometimes right."""

from __future__ import annotations

import functools
import itertools

import torch

from layerskip.decoding.sampling import Sampling
from layerskip.heads.eagle import EagleHead, EagleShape, read_modules
from layerskip.heads.feature_store import TextFeatures, read_features
from layerskip.heads.induction import add_induction_heads
from layerskip.heads.medusa import MedusaHeads, MedusaShape
from layerskip.heads.readout import Readout
from layerskip.heads.training import Batch, head_loss, predict_tokens, stored_modules
from layerskip.models.target import Target
from layerskip.texts.training_texts import write_texts
from tests.accelerator import DEVICE
from tests.drafters.contract import deep_toy, target_of, toy_target

UNROLL = 3
_TOYS = {"toy": toy_target, "deep": deep_toy}


@functools.cache
def feature_texts(family: str, three_layers: bool = False) -> list[TextFeatures]:
    """Returns texts of a tiny target with its hidden states."""
    target = tiny(family)
    modules = stored_modules(read_modules(target, three_layers), target.model.base_model_prefix)
    texts = itertools.islice(write_texts(target, Sampling(1.0), 24, 16, 0), 32)
    return [TextFeatures(torch.tensor(t.tokens), read_features(target, t.tokens, modules), t.begin) for t in texts]


def tiny(family: str) -> Target:
    """Returns a tiny target; ``toy`` and ``deep`` are those of the exact laws."""
    return _TOYS[family]() if family in _TOYS else target_of(family)


def family_of(target: Target) -> str:
    """Returns the name under which :func:`tiny` has a target; end tokens do not matter to a head."""
    return next((name for name, toy in _TOYS.items() if toy() is target), str(target.model.config.model_type))


@functools.cache
def eagle_head(family: str, three_layers: bool = False, vocabulary: int | None = None, lookback: int = 0) -> EagleHead:
    """Returns a trained EAGLE head."""
    tokens = None if vocabulary is None else torch.arange(tiny(family).vocabulary - vocabulary, tiny(family).vocabulary)
    torch.manual_seed(0)
    head = EagleHead(EagleShape.of(tiny(family), three_layers, vocabulary, lookback), tokens).to(DEVICE)
    readout = Readout(tiny(family), head.tokens)
    tokens_seen = torch.cat([text.tokens for text in feature_texts(family, three_layers)])
    add_induction_heads(head, tiny(family).model.get_input_embeddings(), readout, tokens_seen)
    return _trained(family, head, three_layers)


@functools.cache
def medusa_heads(family: str) -> MedusaHeads:
    """Returns trained Medusa heads."""
    target = tiny(family)
    width = int(target.model.config.get_text_config(decoder=True).hidden_size)
    return _trained(family, MedusaHeads(MedusaShape(width, UNROLL, read_modules(target))).to(DEVICE))


def _trained(family: str, head: EagleHead | MedusaHeads, three_layers: bool = False):  # type: ignore[no-untyped-def]
    target, texts = tiny(family), feature_texts(family, three_layers)
    embeddings, readout = target.model.get_input_embeddings(), Readout(target, head.tokens)
    optimiser = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for step in range(40):
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(step)).tolist()
        batch = Batch.of([texts[place] for place in order[:16]], head)
        loss = head_loss(predict_tokens(head, embeddings, batch, UNROLL), readout)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return head.eval()
