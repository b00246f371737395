"""Tiny random models on disk with a real tokenizer: what programs load in tests where a pretrained model is too slow."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from tests.families import build

SPECIAL = ("<pad>", "<eos>", "<bos>", "<|system|>", "<|user|>", "<|assistant|>")
_MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r"), ("Ġ", "a"), ("o", "n"), ("!", "!"))
VOCABULARY = len(SPECIAL) + 256 + len(_MERGES)
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that spells every text; tokens 0, 1 and 2 are padding, end and start."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)]
    spelling = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(_MERGES)))
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = decoders.ByteLevel()
    spelling.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=spelling, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    if chat:
        wrapped.chat_template = _TEMPLATE
    return wrapped


def save_tiny(
    folder: Path, family: str = "llama", chat: bool = True, seed: int = 0, idle: Collection[int] = (), **changes: Any
) -> Path:
    """Save a tiny random model and its tokenizer.

    Args:
        folder: is made.
        family: one of tests.families.
        chat: whether the tokenizer has a chat template.
        seed: of the weights.
        idle: layers that hardly change anything, so that drafts without them are mostly accepted.
        changes: to the family's tiny configuration.

    Returns:
        The folder, which ``layerskip.load_target`` reads.
    """
    fields = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "num_hidden_layers": 3} | changes
    model = build(family, seed, **fields)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    words = tokenizer(chat)
    texts = [words.decode([token]) for token in range(VOCABULARY)]
    # What it says is printable and never ends by itself: full-length outputs that survive decoding and encoding.
    silent = [i for i, text in enumerate(texts) if i < len(SPECIAL) or not (text.isascii() and text.isprintable())]
    with torch.no_grad():
        model.get_output_embeddings().weight[silent] = 0.0
        for parameter in (p for layer in idle for p in layers[layer].parameters() if p.dim() >= 2):
            parameter.mul_(0.1)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
