"""Training texts that a target writes itself: prompts and answers, in batches.

A draft that predicts a model is trained on texts of that model. A chat model first writes the user's turn, as in Magpie
(arXiv 2406.08464), section 2; any other model starts from nothing. Such prompts differ from those of users, so if prompts
are given, every other text begins with the first words of one of them and goes on from there.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from layerskip.config import ConfigError
from layerskip.decoding.sampling import Sampling
from layerskip.models.target import NotFinite, Target

_MARK = "\u2063user\u2063"  # stands for a user's words
_PROMPT_TOKENS = 64  # that the target writes for a prompt
_PROMPT_SAMPLING = Sampling(1.0, min_p=0.05)  # top_p would sort the vocabulary, which takes as long as the model
_PATIENCE = 8  # batches without a prompt
_FIRST_SHARE = (0.1, 1.0)  # of the words of a given prompt, from and to
_FIRST_TOKENS = 256  # of the first words, at most


@dataclass(frozen=True)
class TrainingText:
    """A text that a target wrote: prompt and answer, whose first token is at index ``begin``."""

    tokens: tuple[int, ...]
    begin: int


def write_texts(
    target: Target, sampling: Sampling, max_new_tokens: int, batch: int, seed: int, prompts: Sequence[str] = ()
) -> Iterator[TrainingText]:
    """Let the target write texts, without end; the same seed gives the same texts.

    Args:
        sampling: how answers are chosen; prompts are always drawn.
        prompts: prompts that every other text begins like; ignored without a tokenizer.

    Raises:
        ConfigError: the target writes no texts, or its chat template hides where a user's words begin.
    """
    opening, silent = _opening(target), 0
    prompts = [] if target.tokenizer is None else prompts
    for number in itertools.count():
        if silent == _PATIENCE:
            raise ConfigError(f"target: {target.name} writes no texts")
        torch.manual_seed(seed + number)
        draws = random.Random(seed + number)
        starts = [
            _first_words(target, draws.choice(prompts), draws) if prompts and (number * batch + place) % 2 else []
            for place in range(batch)
        ]
        written = _generate(target, [opening + start for start in starts], _PROMPT_SAMPLING, _PROMPT_TOKENS)
        pairs = zip(starts, written, strict=True)
        whole = [prompt for start, tokens in pairs if (prompt := _prompt(target, opening, start, tokens))]
        silent = silent + 1 if not whole else 0
        for prompt, tokens in zip(whole, _generate(target, whole, sampling, max_new_tokens), strict=True):
            if tokens:
                yield TrainingText((*prompt, *tokens), len(prompt))


def _opening(target: Target) -> list[int]:
    """Return the tokens before a user's first words."""
    tokenizer = target.tokenizer
    if tokenizer is not None and tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": _MARK}]
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # a template is code of the model's author, which may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"target: its chat template refuses a user's message: {reason}") from error
        before, mark, _ = text.partition(_MARK)
        if not mark:
            raise ConfigError("target: its chat template does not show where a user's words begin")
        return list(tokenizer(before, add_special_tokens=False)["input_ids"])
    first = None if tokenizer is None else tokenizer.bos_token_id
    return [first if isinstance(first, int) else min(target.eos_ids, default=0)]


def _first_words(target: Target, prompt: str, draws: random.Random) -> list[int]:
    words = re.findall(r"\s*\S+", prompt)
    kept = words[: math.ceil(draws.uniform(*_FIRST_SHARE) * len(words))]
    assert target.tokenizer is not None
    tokens = target.tokenizer("".join(kept), add_special_tokens=False)["input_ids"]
    return [token for token in tokens if token not in target.eos_ids][:_FIRST_TOKENS]


def _prompt(target: Target, opening: list[int], start: list[int], tokens: list[int]) -> list[int]:
    """Return the prompt of an opening, its first words and what the target wrote after them; empty if it wrote nothing."""
    written = [token for token in tokens if token not in target.eos_ids]
    if target.tokenizer is None or target.tokenizer.chat_template is None:
        return opening + start + written[: _PROMPT_TOKENS // 4] if written else []
    text = target.decode(start + written).strip()
    return target.encode(text) if text else []


@torch.inference_mode()
def _generate(target: Target, prompts: list[list[int]], sampling: Sampling, max_new_tokens: int) -> list[list[int]]:
    """Return the new tokens of each prompt, including the end of sequence, by one call of transformers' ``generate``."""
    if not prompts:
        return []
    longest, ends = max(map(len, prompts)), sorted(target.eos_ids)
    rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=target.device)
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=target.device)
    options: dict[str, Any] = {"do_sample": not sampling.greedy, "repetition_penalty": sampling.repetition_penalty}
    # A growing cache is copied with every token, which takes as long as the model. ALiBi, and models that cannot be
    # compiled, count the keys that they get, and would also count the unwritten ones of a static cache.
    if target.model._can_compile_fullgraph and not getattr(target.model.config, "alibi", False):
        options |= {"cache_implementation": "static", "disable_compile": True}
    if not sampling.greedy:
        options |= {"temperature": sampling.temperature, "top_k": int(sampling.top_k)}
        options |= {"top_p": sampling.top_p, "min_p": sampling.min_p}
    output: Tensor = target.model.generate(  # type: ignore[operator]
        rows,
        attention_mask=seen,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        logits_processor=LogitsProcessorList([functools.partial(_check_finite, target.name)]),
        **options,
    )
    written: list[list[int]] = output[:, longest:].tolist()
    lengths = [next((i for i, token in enumerate(row, 1) if token in ends), len(row)) for row in written]
    return [row[:length] for row, length in zip(written, lengths, strict=True)]


def _check_finite(model: str, text: Tensor, scores: Tensor) -> Tensor:
    """Return the scores ``[B, V]`` of the tokens after ``text``; :class:`NotFinite` if a row has no largest one."""
    largest = scores.amax(-1)
    for value in largest[~largest.isfinite()].tolist():
        raise NotFinite(model, text.shape[1] - 1, value)
    return scores
