"""The target: a Hugging Face decoder-only model with its tokenizer and its identity."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import operator
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from layerskip import files
from layerskip.models.compiled_layers import COMPILE_MODES, set_compiling
from layerskip.models.packing import has_blocks, offers_blocks, set_packing
from layerskip.models.weights import input_device, stored_weights

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]

_SAMPLED_VALUES = 256
_STORED = {"mixed": "bfloat16", "native": "blocks"}  # weights of float32 arithmetic, by the value of target.dtype
_NOT_IDENTITY = ("_name_or_path", "transformers_version")  # fields of a configuration that do not change the model


class TargetError(ValueError):
    """A target that cannot be loaded or used as requested. The message begins with the field."""


class NotFinite(TargetError):
    """Logits without a finite maximum, NaN or infinite: no token is the most likely one, and no distribution exists.

    ``position`` is that of the last token before them in prompt and output together, from 0. Prompt and ``contender``, a
    configuration's name in a comparison, are empty if unknown.
    """

    def __init__(self, model: str, position: int, value: float, prompt_id: str = "", contender: str = "") -> None:
        self.fields = model, position, value
        self.contender = contender
        place = f"position {position}" + (f" of prompt {prompt_id}" if prompt_id else "")
        reason = f"the largest logit of {model} is {value} after {place}"
        super().__init__(f"target: {reason}; check its weights, or try another target.dtype")

    @classmethod
    @contextlib.contextmanager
    def naming(cls, prompt_id: str, contender: str = "") -> Iterator[None]:
        """Add the prompt and the contender to such an error within the ``with`` block."""
        try:
            yield
        except cls as error:
            raise cls(*error.fields, prompt_id, contender) from None


def described_precision(description: Mapping[str, Any]) -> str:
    """Return the value of ``target.dtype`` that loads a target again, from its description by :meth:`Target.describe`."""
    stored = description.get("weights")
    return next((precision for precision, name in _STORED.items() if name == stored), str(description["dtype"]))


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded model and its identity.

    Args:
        model: in evaluation mode.
        tokenizer: None for a target that reads and writes token ids only.
        name, revision: those that it was loaded by; the revision of a source other than the hub is None.
        pack_weights: whether to pack the weights for a CPU (:mod:`layerskip.models.packing`); None: if the packed copy takes
            at most a quarter of the memory. A setting that the model already has is kept with None.
        quantization: how its weights were quantised by :func:`~layerskip.models.loading.load_target`; None if they were not.
        drafts: draft models that were loaded for it, by name.
        compile: whether the layers of captured passes are compiled (:mod:`layerskip.models.compiled_layers`): ``auto``, on
            CUDA, or ``off``. With None, the model's setting is kept, by default ``auto``.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    name: str = "model"
    revision: str | None = None
    pack_weights: bool | None = None
    quantization: str | Mapping[str, Any] | None = None
    drafts: dict[str, Target] = field(default_factory=dict, repr=False)
    compile: str | None = None

    def __post_init__(self) -> None:
        set_packing(self.model, self.pack_weights)
        if self.compile is not None and self.compile not in COMPILE_MODES:
            raise TargetError(f"target.compile: {self.compile!r} is not {', '.join(COMPILE_MODES)}")
        set_compiling(self.model, self.compile)

    @property
    def architecture(self) -> str:
        """The model's class, as in the ``architectures`` of its configuration."""
        return type(self.model).__name__

    @property
    def layers(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)

    @property
    def vocabulary(self) -> int:
        """V, the width of its logits."""
        head: Any = self.model.get_output_embeddings()
        width = getattr(head, "out_features", None)  # a quantised weight may have another shape
        return int(head.weight.shape[0] if width is None else width)

    @property
    def hidden(self) -> int:
        """H, the width of its hidden states."""
        return int(self.model.config.get_text_config(decoder=True).hidden_size)

    @property
    def dtype(self) -> str:
        """``float32``, ``bfloat16`` or ``float16``."""
        return str(self.model.dtype).removeprefix("torch.")

    @functools.cached_property
    def precision(self) -> str:
        """The value of ``target.dtype`` that it can be loaded with: its dtype, ``mixed`` or ``native``."""
        if has_blocks(self.model):
            return "native"
        samples = (_sample(weight) for _, weight in stored_weights(self.model) if weight.ndim > 1)
        plain = self.dtype == "float32" and self.device.type == "cpu" and not getattr(self.model, "is_quantized", False)
        return "mixed" if plain and all(bool((part == part.bfloat16()).all()) for part in samples) else self.dtype

    @property
    def device(self) -> torch.device:
        """The device on which tokens enter and logits come out."""
        return input_device(self.model)

    def describe(self) -> dict[str, Any]:
        """Return name, revision, architecture, layers, dtype and any quantisation on loading, as stored in exports.

        ``weights`` is ``bfloat16`` or ``blocks`` in addition where these are in float32 arithmetic, on a CPU.
        """
        described = {name: getattr(self, name) for name in ("name", "revision", "architecture", "layers", "dtype")}
        described |= {"weights": _STORED[self.precision]} if self.precision in _STORED else {}
        return described if self.quantization is None else described | {"quantization": self.quantization}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the dtype, the configuration, and the name, shape and some values of every weight."""
        config = {k: v for k, v in self.model.config.to_dict().items() if k not in _NOT_IDENTITY}
        stored = "native" if self.precision == "native" else self.dtype  # the same values, with other costs
        stored += " with blocks for drafts" if offers_blocks(self.model) else ""
        identity = [self.architecture, stored, sorted(self.eos_ids), config]
        hashed = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode())
        for name, weight in stored_weights(self.model):
            sample = _sample(weight).float().cpu().numpy()
            hashed.update(f"{name} {tuple(weight.shape)}".encode() + sample.tobytes())
        return hashed.hexdigest()

    @functools.cached_property
    def weights_sample(self) -> tuple[float, ...]:
        """Two values of every floating-point tensor, in the same places for any dtype; of a quantised one, of its scales."""
        flat = (weight.detach().flatten() for _, weight in stored_weights(self.model) if weight.is_floating_point())
        return tuple(float(weight[place]) for weight in flat for place in (0, weight.numel() // 2))

    @functools.cached_property
    def tokenizer_digest(self) -> str | None:
        """SHA-256 of the tokenizer's tokens and their ids; None without a tokenizer."""
        return None if self.tokenizer is None else files.digest(sorted(self.tokenizer.get_vocab().items()))

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end-of-sequence tokens; some models have several. A :class:`TargetError` if one is no token id."""
        generation, config = self.model.generation_config, self.model.config
        for name, source in {"generation_config": generation, "config": config, "tokenizer": self.tokenizer}.items():
            if (found := getattr(source, "eos_token_id", None)) is not None:
                return self.check_ends(found, f"{name}.eos_token_id")
        return frozenset()

    def check_ends(self, found: Any, field: str) -> frozenset[int]:
        """Return end-of-sequence tokens, one or a list; :class:`TargetError` if one is no token id."""
        ids = found if isinstance(found, (list, tuple)) else [found]
        for token in ids:
            if type(token) is not int or not 0 <= token < self.vocabulary:
                expected = f"a whole number from 0 to {self.vocabulary - 1}; correct it in the checkpoint"
                raise TargetError(f"target: {field}={found!r}: {token!r} is not {expected}")
        return frozenset(ids)

    def encode(self, prompt: Prompt, field: str = "prompt") -> list[int]:
        """Convert a prompt to token ids; a :class:`TargetError` that begins with ``field`` if that is impossible.

        It is a text (one user message, where the tokenizer has a chat template), a list of messages with ``role`` and
        ``content``, or token ids, which are returned as they are; a tensor of one dimension is a list of ids.
        """
        given: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if isinstance(given, Sequence) and not given:
            raise TargetError(f"{field}: is empty")
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        if isinstance(given, Sequence) and all(isinstance(part, Mapping) for part in given):
            ids = self._tokenize(given, field)
        else:
            try:
                ids = [operator.index(token) for token in given]
                is_of_ids = not isinstance(given, bytes) and not any(isinstance(token, bool) for token in given)
            except TypeError:
                is_of_ids = False
            if not is_of_ids:
                expected = "a text, nor a list of messages, nor a list of token ids"
                raise TargetError(f"{field}: {reprlib.repr(given)} is neither {expected}")
        if not ids:
            raise TargetError(f"{field}: has no tokens")
        words: Any = self.model.get_input_embeddings()
        last = words.weight.shape[0] - 1
        if beyond := [token for token in ids if not 0 <= token <= last]:
            raise TargetError(f"{field}: the token {beyond[0]} is beyond the vocabulary of {self.name}, 0 to {last}")
        return ids

    def _tokenize(self, messages: Sequence[Mapping[str, str]], field: str) -> list[int]:
        for message in messages:
            for part in ("role", "content"):
                if not isinstance(message.get(part), str):
                    raise TargetError(f"{field}: {part} {reprlib.repr(message.get(part))} of a message is not a text")
                if any("\ud800" <= letter <= "\udfff" for letter in message[part]):  # as in truncated files
                    raise TargetError(f"{field}: {part} of a message has a lone surrogate, which is no Unicode text")
        if self.tokenizer is None:
            raise TargetError(f"{field}: this target has no tokenizer; give token ids")
        given: list[Any] = list(messages)
        part = "tokenizer" if self.tokenizer.chat_template is None else "chat template"
        try:
            if part == "tokenizer":
                return list(self.tokenizer("\n\n".join(message["content"] for message in given))["input_ids"])
            text = self.tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # a template is code of the model's author, which may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise TargetError(f"{field}: refused by the {part} of {self.name}; change one of them: {reason}") from error

    def save(self, folder: str | Path) -> None:
        """Write weights, configuration and tokenizer as a folder in the layout of Hugging Face.

        Version 4 of transformers, by which OpenVINO's converter reads folders, reads it, too.
        """
        self.model.save_pretrained(folder)
        file = Path(folder, "config.json")
        fields = files.read_json(file) or {}
        files.write_json(file, fields | _earlier_rotations(fields.get("rope_parameters") or {}))
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
            file = Path(folder, "tokenizer_config.json")
            # Version 4 of transformers knows the class by its earlier name.
            if (fields := files.read_json(file) or {}).get("tokenizer_class") == "TokenizersBackend":
                files.write_json(file, fields | {"tokenizer_class": "PreTrainedTokenizerFast"})

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert token ids to text without special tokens; empty if the target has no tokenizer."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def _earlier_rotations(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary position embeddings in the fields of transformers 4, which takes defaults for what is missing."""
    every = rope.get("full_attention", rope)  # models with two kinds of layers have parameters for each
    found = {"rope_theta": every["rope_theta"]} if "rope_theta" in every else {}
    if "partial_rotary_factor" in every:  # GPT-NeoX has another name for it
        found |= dict.fromkeys(("partial_rotary_factor", "rotary_pct"), every["partial_rotary_factor"])
    if every.get("rope_type", "default") != "default":
        found["rope_scaling"] = {name: value for name, value in every.items() if name not in found}
    local = rope.get("sliding_attention", {})
    return found | ({"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {})


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLED_VALUES)]
