"""The library's main entry point: :func:`generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import StopStringCriteria

from layerskip.config import SpeculativeConfig
from layerskip.decoding.checkpoint_settings import default_sampling
from layerskip.decoding.decode import Stops, decode
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stats import DecodeStats
from layerskip.drafters.registry import build_drafter
from layerskip.models.target import Prompt, Target


@dataclass(frozen=True)
class Generation:
    """The new token ids, their text, the rounds, and why generation ended."""

    tokens: list[int]
    text: str  # without special tokens; empty if the target has no tokenizer
    stats: DecodeStats
    finish: str  # ``eos``, ``stop`` or ``length``


def generate(
    target: Target,
    prompt: Prompt,
    config: SpeculativeConfig | Drafter | None = None,
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = 64,
    stop_strings: str | Sequence[str] = (),
    callback: Callable[[list[int]], None] | None = None,
    seed: int | None = None,
) -> Generation:
    """Continue a prompt. The output is the target's own for every configuration.

    Args:
        prompt: a text, a list of messages, or token ids; see :meth:`Target.encode`.
        config: how to decode; None for plain decoding. Or a drafter from :func:`layerskip.build_drafter`, which keeps loaded
            models and what it has learned from request to request.
        sampling: how tokens are chosen; None for greedy, with the repetition penalty that the checkpoint asks for.
        max_new_tokens: at least 1.
        stop_strings: the output ends with the token that completes one of them, as in transformers.
        callback: called with the tokens of every round as they are committed.
        seed: makes sampling reproducible; None uses torch's own random state.

    Raises:
        ConfigError, UnsupportedModel: the target or the draft model cannot be decoded in this way.
        TargetError: the prompt is empty or needs a tokenizer, the draft model cannot be loaded, or the checkpoint asks for
            what decoding does not do.
        NotFinite: the target's logits are NaN or infinite.
    """
    drafter = config if isinstance(config, Drafter) else build_drafter(config or SpeculativeConfig(), target)
    tokens = target.encode(prompt)
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    result = decode(
        target,
        drafter,
        tokens,
        sampling or default_sampling(target),
        max_new_tokens,
        stops=Stops(criterion=_stop_criterion(target, strings) if strings else None),
        callback=callback,
        seed=seed,
    )
    return Generation(result.tokens, target.decode(result.tokens), result.stats, result.finish)


def _stop_criterion(target: Target, strings: Sequence[str]) -> Callable[[list[int]], bool]:
    """Return whether the last token of a sequence completes one of some strings, as a function of the sequence."""
    if target.tokenizer is None:
        raise ValueError("stop_strings: this target has no tokenizer")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop_strings: {string!r} is not a non-empty text")
    criterion = StopStringCriteria(target.tokenizer, list(strings))
    # Every token has at least one byte, so a stop string spans no more tokens than this.
    window = max(len(string.encode()) for string in strings) + 1
    return lambda tokens: bool(criterion(torch.tensor([tokens[-window:]]), None))
