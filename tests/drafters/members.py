"""Drafters of every method, and one that counts its calls."""

from __future__ import annotations

import string

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cross_tokenizer import CrossTokenizer, Translation
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle import Eagle
from layerskip.drafters.registry import build_drafter
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target
from tests.drafters.heads import eagle_head

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
