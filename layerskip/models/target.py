"""Which model is decoded? A Hugging Face decoder-only model with its tokenizer, and what tells it from others."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from layerskip.models.packing import decide

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


class TargetError(ValueError):
    """A target that cannot be loaded or is not the one that was asked for; the message names the field."""


_SAMPLED_VALUES = 256
_SAMPLED_WEIGHTS = 64
_NOT_IDENTITY = ("_name_or_path", "transformers_version")
"""Where a model lies and who wrote it down changes nothing about it."""


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded model and its identity.

    Args:
        model: in evaluation mode, on one device.
        tokenizer: None where only token ids are decoded.
        name: what it was loaded by.
        revision: the hub's, else None.
        pack_weights: whether products on a CPU are by a second copy of the weights, which is laid out for them once, not
            in every call; None: where that copy takes at most a quarter of memory, or as was said of the model before.
        drafts: models that were loaded to draft for it, by name.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    name: str = "model"
    revision: str | None = None
    pack_weights: bool | None = None
    drafts: dict[str, Target] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        decide(self.model, self.pack_weights)

    @property
    def architecture(self) -> str:
        """The model's class, as in the ``architectures`` of its configuration."""
        return type(self.model).__name__

    @property
    def layers(self) -> int:
        """How many decoder layers it has."""
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)

    @property
    def vocabulary(self) -> int:
        """V, the width of its logits."""
        head = self.model.get_output_embeddings()
        return int(head.weight.shape[0])

    @property
    def hidden(self) -> int:
        """H, the width of its hidden states."""
        return int(self.model.config.get_text_config(decoder=True).hidden_size)

    @property
    def dtype(self) -> str:
        """``float32``, ``bfloat16`` or ``float16``."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.model.device

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over the dtype, the configuration and every weight's name, shape and some of its values.

        What was found out about a model holds for this one, whatever lies under its name tomorrow.
        """
        config = {k: v for k, v in self.model.config.to_dict().items() if k not in _NOT_IDENTITY}
        said = [self.architecture, self.dtype, sorted(self.eos_ids), config]
        found = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode())
        for name, weight in self.model.state_dict().items():
            flat = weight.detach().flatten()
            sample = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)].float().cpu().numpy()
            found.update(f"{name} {tuple(weight.shape)}".encode() + sample.tobytes())
        return found.hexdigest()

    @functools.cached_property
    def weights_sample(self) -> tuple[float, ...]:
        """Two of every tensor's, the same ones in any dtype: what a model is told by wherever it was rounded."""
        return _two_of_each(self._weights())

    @functools.cached_property
    def earlier_weights_sample(self) -> tuple[float, ...]:
        """What earlier versions took: two of every so manieth tensor's, which may be the same one of every layer."""
        weights = self._weights()
        return _two_of_each(weights[:: max(1, len(weights) // _SAMPLED_WEIGHTS)])

    def _weights(self) -> list[Tensor]:
        return [weight.detach().flatten() for weight in self.model.state_dict().values() if weight.is_floating_point()]

    @functools.cached_property
    def tokenizer_digest(self) -> str | None:
        """SHA-256 over the tokenizer's words and their ids; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return hashlib.sha256(json.dumps(sorted(self.tokenizer.get_vocab().items())).encode()).hexdigest()

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a sequence; some models have several."""
        for source in (self.model.generation_config, self.model.config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: a text (one user message, where the tokenizer has a chat template), a list of messages with ``role``
                and ``content``, or token ids, which pass through.

        Raises:
            TargetError: the prompt is empty, or a text meets a target without tokenizer.
        """
        if not prompt:
            raise TargetError("prompt: is empty")
        if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise TargetError("prompt: this target has no tokenizer; give token ids")
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.tokenizer.chat_template is None:
            ids = self.tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
        else:
            try:
                text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except jinja2.TemplateError as error:
                raise TargetError(f"prompt: the chat template of {self.name} refuses it: {error}") from error
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise TargetError("prompt: has no tokens")
        return list(ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids without special tokens; empty where the target has no tokenizer."""
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def _two_of_each(weights: Sequence[Tensor]) -> tuple[float, ...]:
    return tuple(float(weight[place]) for weight in weights for place in (0, weight.numel() // 2))
