"""Tiny random models on disk with a real tokenizer, for tests in which a pretrained model is too slow."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.families import build

SPECIAL = ("<pad>", "<eos>", "<bos>", "<|system|>", "<|user|>", "<|assistant|>")
_MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r"), ("Ġ", "a"), ("o", "n"), ("!", "!"))
VOCABULARY = len(SPECIAL) + 256 + len(_MERGES)
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer for any text; tokens 0, 1 and 2 are padding, end and start."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)]
    spelling = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(_MERGES)))
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = decoders.ByteLevel()
    spelling.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=spelling, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")
    if chat:
        wrapped.chat_template = _TEMPLATE
    return wrapped


def save_tiny(
    folder: Path,
    family: str = "llama",
    chat: bool = True,
    seed: int = 0,
    idle: Collection[int] = (),
    **changes: Any,
) -> Path:
    """Save a tiny random model and its tokenizer.

    Args:
        folder: created.
        family: a family of ``tests.families``.
        chat: whether the tokenizer has a chat template.
        seed: the seed of the weights.
        idle: layers with little effect, so that drafts without them are mostly accepted.
        changes: changes to the tiny configuration of the family.

    Returns:
        The folder, for ``layerskip.load_target``.
    """
    fields = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "num_hidden_layers": 3} | changes
    model = build(family, seed, **fields)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    words = tokenizer(chat)
    texts = [words.decode([token]) for token in range(VOCABULARY)]
    # Only printable tokens and no end: full-length outputs survive decoding and encoding.
    silent = [i for i, text in enumerate(texts) if i < len(SPECIAL) or not (text.isascii() and text.isprintable())]
    with torch.no_grad():
        model.get_output_embeddings().weight[silent] = 0.0
        for parameter in (p for layer in idle for p in layers[layer].parameters() if p.dim() >= 2):
            parameter.mul_(0.1)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def without_tokenizer(folder: Path) -> Path:
    """Delete the tokenizer of a saved model."""
    for file in folder.glob("*token*"):
        file.unlink()
    return folder


_BLOCK_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def save_gguf(folder: Path, file: Path, kind: str | Mapping[str, str] | None = None) -> Path:
    """Convert the Llama in ``folder``, from ``save_tiny``, to a GGUF file with the layout of llama.cpp.

    With a ``kind`` such as ``Q4_0``, matrices are stored in blocks of that type; it may be given by the last part of a
    module's name, with ``""`` for all others. Blocks that ``gguf`` only reads, such as those of ``Q4_K``, are random ones.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, words = model.config, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(words["vocab"], key=words["vocab"].get))
    methods = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (VOCABULARY - len(SPECIAL))
    writer.add_token_types(methods)
    writer.add_token_merges([" ".join(pair) for pair in words["merges"]])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_chat_template(_TEMPLATE)
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates adjacent pairs, transformers the two halves of a head.
            halves = weight.reshape(-1, 2, config.head_dim // 2, config.hidden_size)
            weight = halves.transpose(1, 2).reshape(weight.shape)
        values, own = weight.contiguous().numpy(), None
        if kind is not None and weight.ndim == 2:
            module = name.removesuffix(".weight").rpartition(".")[2]
            own = gguf.GGMLQuantizationType[kind if isinstance(kind, str) else kind.get(module, kind[""])]
            try:
                values = gguf.quants.quantize(values, own)
            except NotImplementedError:
                values = _random_blocks(values, own)
        writer.add_tensor(_gguf_name(name), values, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


_NUMBERS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where blocks have their numbers of float16: a scale, and one of what is subtracted."""


def _random_blocks(values: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """Return random blocks for a matrix, as bytes, of values that are about as large."""
    source = numpy.random.default_rng([zlib.crc32(kind.name.encode()), *values.shape])
    size, width = gguf.GGML_QUANT_SIZES[kind]
    data = source.integers(0, 256, (len(values), values.shape[1] // size, width), dtype=numpy.uint8)

    def write(*numbers: float) -> Any:
        for place, number in zip(_NUMBERS[kind.name], numbers, strict=False):
            data[..., place : place + 2] = numpy.array([number], numpy.float16).view(numpy.uint8)
        return data.reshape(len(data), -1)

    # What is subtracted has the mean of the rest, and both the size of the values.
    means = [float(gguf.quants.dequantize(write(*numbers), kind).mean()) for numbers in ((1, 0), (0, 1))]
    subtracted = -means[0] / means[1] if len(_NUMBERS[kind.name]) > 1 else 0
    scale = float(values.std() / gguf.quants.dequantize(write(1, subtracted), kind).std())
    return write(scale, subtracted * scale)


def _gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in _OTHER_NAMES:
        return f"{_OTHER_NAMES[module]}.weight"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{_BLOCK_NAMES[rest]}.weight"


def reading_once(patch: pytest.MonkeyPatch) -> None:
    """Keep what was parsed of a GGUF file, which saves two thirds of the time of loading a model from it.

    Transformers parses the file three times and builds the table of names once per tensor; here each is made once.
    """
    for name in ("GGUFReader", "get_tensor_name_map"):
        patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
