"""What a checkpoint asks of transformers' ``generate`` in its ``generation_config``: applied, or refused by name.

Only fields that cannot change greedy tokens are listed here. Every other field that the installed transformers know is
refused unless it is off, so a field of a later version is never ignored unnoticed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

from transformers import GenerationConfig

from layerskip.decoding.sampling import Sampling
from layerskip.models.target import Target, TargetError

_HARMLESS = {
    # The caller chooses how tokens are drawn, and how many.
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("max_length", "max_new_tokens"),
    *("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "low_memory"),  # of several beams alone
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "continuous_batching_config"),
    *("compile_config", "disable_compile"),
    # Drafts of transformers, which its own verification checks.
    *("use_mtp", "speculation_type", "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind"),
    *("_from_model_config", "transformers_version"),
}
_OFF: dict[str, Any] = {
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("num_beams", "num_return_sequences", "guidance_scale", "encoder_repetition_penalty"), 1),
    "penalty_alpha": 0,
    "repetition_penalty": 1,
}
"""Values, beside null, false and an empty list, that are off."""


def default_sampling(target: Target) -> Sampling:
    """Return greedy decoding as transformers' ``generate`` does it, with the checkpoint's repetition penalty."""
    return Sampling(repetition_penalty=dict(_active(target)).get("repetition_penalty", 1.0))


def check_settings(target: Target, sampling: Sampling) -> None:
    """Check that decoding does everything that the checkpoint asks of ``generate``.

    Raises:
        TargetError: the checkpoint asks for more, or its end-of-sequence tokens are no token ids.
    """
    _ = target.eos_ids
    for name, value in _active(target):
        asked = f"target: generation_config.{name}={reprlib.repr(value)}"
        if name != "repetition_penalty":
            raise TargetError(f"{asked} is not supported; set it to null in the checkpoint's generation_config.json")
        if value != sampling.repetition_penalty:
            found = f"sampling.repetition_penalty={sampling.repetition_penalty}"
            raise TargetError(f"{asked} differs from {found}; set one of them to the other, or the former to null")


def _active(target: Target) -> Iterator[tuple[str, Any]]:
    """Yield the fields that can change greedy tokens, with their values."""
    known = vars(GenerationConfig())  # generate ignores all other fields of a file
    for name, value in vars(target.model.generation_config or GenerationConfig()).items():
        if name == "cache_implementation":
            active = value == "quantized"
        else:
            off = value is None or value is False or value == [] or value == _OFF.get(name)
            active = name in known and name not in _HARMLESS and not off
        if active:
            yield name, value
