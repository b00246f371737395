"""Drafters of every method, heads that are trained a little on a tiny target, and a drafter that counts its calls."""

from __future__ import annotations

import functools
import itertools
import string

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cross_tokenizer import CrossTokenizer, Translation
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle import Eagle
from layerskip.drafters.registry import build_drafter
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.feature_store import TextFeatures, read_features
from layerskip.heads.induction import add_induction_heads
from layerskip.heads.readout import Readout
from layerskip.heads.training import Batch, head_loss, predict_tokens
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target
from layerskip.texts.training_texts import write_texts
from tests.accelerator import DEVICE
from tests.drafters.contract import target_of, toy_target

LETTERS = string.ascii_lowercase
LOOKUP = {"method": "prompt_lookup", "prompt_lookup_min": 2, "prompt_lookup_max": 3, "num_speculative_tokens": 4}
SKIP: dict[str, object] = {"method": "layer_skip", "mask": "attention:0;mlp:1", "num_speculative_tokens": 3}

SECONDS = ("prompt_lookup", "retrieval", "token_recycling", "lookahead", "layer_skip")
"""Methods without trained parts or other models, which :func:`member_of` makes for every target."""


def spelling(pieces: str, pairs: tuple[str, ...] = (), end: str | None = None) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of single letters, and of some pairs of them."""
    words = {piece: number for number, piece in enumerate([*pieces, *pairs])}
    model = Tokenizer(models.BPE(words, [(pair[0], pair[1]) for pair in pairs]))
    model.decoder = decoders.Fuse()
    if end is not None:
        model.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token=end)


def skip_of(target: Target) -> dict[str, object]:
    """Returns the fields of a self-draft of a target of one layer or several."""
    return SKIP | {"mask": "attention:0" if target.layers == 1 else SKIP["mask"]}


def member_of(method: str, target: Target) -> Drafter:
    """Returns a drafter of a method."""
    tree = {"min_token_prob": 0.0}
    fields: dict[str, dict[str, object]] = {
        "none": {},
        "prompt_lookup": LOOKUP,
        "retrieval": {"prompt_lookup_min": 2, "prompt_lookup_max": 3, "num_speculative_tokens": 4} | tree,
        "token_recycling": {"num_speculative_tokens": 3} | tree,
        "lookahead": {"num_speculative_tokens": 2, "window": 3, "guess_set_size": 2},
        "layer_skip": skip_of(target),
        "cascade": {"members": [LOOKUP, SKIP]},
    }
    if method in fields:
        return build_drafter(SpeculativeConfig.from_dict({"method": method} | fields[method]), target)
    if method == "eagle":
        return Eagle(eagle_head("llama"), target, 3, StopRule())
    if method == "draft_model":
        return DraftModel(decoding_view(target.model), target.layers, 3, StopRule())
    letters = spelling(LETTERS[: target.vocabulary])
    return CrossTokenizer(
        decoding_view(target.model), target.layers, target.vocabulary, Translation(letters, letters), 3, StopRule()
    )


class Member(Drafter):
    """Drafts a token while ``proposes`` is True, and counts its verdicts."""

    def __init__(self, proposes: bool = True) -> None:
        self.proposes, self.verdicts = proposes, 0

    def draft(self, context: Context, limit: int) -> Draft:
        return Draft(torch.tensor([1] if self.proposes else [], dtype=torch.int64, device=context.last.device))

    def observe(self, verdict: Verdict) -> None:
        self.verdicts += 1


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
    target, texts = tiny(family), feature_texts(family)
    embeddings, readout = target.model.get_input_embeddings(), Readout(target, head.tokens)
    add_induction_heads(head, embeddings, readout, torch.cat([text.tokens for text in texts]))
    optimiser = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for step in range(30):
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(step)).tolist()
        batch = Batch.of([texts[place] for place in order[:12]], DEVICE)
        loss = head_loss(predict_tokens(head, embeddings, batch, UNROLL), readout)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return head.eval()
