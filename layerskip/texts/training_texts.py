"""What would a target be asked, and what does it answer? Prompts and answers that it writes itself, many at once.

Whoever wants to foretell a model needs much of what that model says. A chat model is let to write the user's turn first, as
in Magpie (arXiv 2406.08464), section 2; any other begins with nothing. What it asks by itself is not what it is asked, so
every other text begins as one of some prompts does, where there are such, and goes on from there.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerskip.config import ConfigError
from layerskip.decoding.sampling import Sampling
from layerskip.models.target import Target

_MARK = "\u2063user\u2063"  # stands for what a user says
_ASKED_TOKENS = 64  # of a prompt
_ASKING = Sampling(1.0, min_p=0.05)  # of prompts: top_p would sort the vocabulary, which took as long again as the model
_PATIENCE = 8  # batches without a prompt
_BEGUN = (0.1, 1.0)  # of a given prompt's words; how it goes on varies
_BEGUN_TOKENS = 256  # of it, at most
_PADDED = 2  # times a prompt's own length, at most


@dataclass(frozen=True)
class TrainingText:
    """A text of a target's own.

    Args:
        tokens: prompt and answer.
        begin: where the answer begins.
    """

    tokens: tuple[int, ...]
    begin: int


def write_texts(
    target: Target, sampling: Sampling, max_new_tokens: int, batch: int, seed: int, prompts: Sequence[str] = ()
) -> Iterator[TrainingText]:
    """Let the target write texts, for as long as it is asked to; the same seed gives the same ones.

    Args:
        target: the model; on a CPU, texts of a batch share what reading its weights takes.
        sampling: how answers are chosen; prompts are drawn.
        max_new_tokens: of an answer.
        batch: so many at once.
        seed: of all draws.
        prompts: what every other text begins like; none, or no tokenizer, and all are the target's own.
    """
    opening, silent = _opening(target), 0
    prompts = [] if target.tokenizer is None else prompts
    for number in itertools.count():
        if silent == _PATIENCE:
            raise ConfigError(f"target: {target.name} writes no texts of its own")
        torch.manual_seed(seed + number)
        draws = random.Random(seed + number)
        begun = [
            _begun(target, draws.choice(prompts), draws) if prompts and (number * batch + place) % 2 else []
            for place in range(batch)
        ]
        said = _generate(target, [opening + begin for begin in begun], _ASKING, _ASKED_TOKENS)
        asked = [_prompt(target, opening, begin, tokens) for begin, tokens in zip(begun, said, strict=True)]
        asked = [prompt for prompt in asked if prompt]
        silent = silent + 1 if not asked else 0
        for prompt, tokens in zip(asked, _generate(target, asked, sampling, max_new_tokens), strict=True):
            if tokens:
                yield TrainingText((*prompt, *tokens), len(prompt))


def _opening(target: Target) -> list[int]:
    """What comes before a user's first words."""
    tokenizer = target.tokenizer
    if tokenizer is not None and tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": _MARK}]
        before, mark, _ = str(tokenizer.apply_chat_template(messages, tokenize=False)).partition(_MARK)
        if not mark:
            raise ConfigError("target: its chat template does not say where a user's words begin")
        return list(tokenizer(before, add_special_tokens=False)["input_ids"])
    first = None if tokenizer is None else tokenizer.bos_token_id
    return [first if isinstance(first, int) else min(target.eos_ids, default=0)]


def _begun(target: Target, prompt: str, draws: random.Random) -> list[int]:
    """The first words of a prompt."""
    words = re.findall(r"\s*\S+", prompt)
    kept = words[: math.ceil(draws.uniform(*_BEGUN) * len(words))]
    assert target.tokenizer is not None
    tokens = target.tokenizer("".join(kept), add_special_tokens=False)["input_ids"]
    return [token for token in tokens if token not in target.eos_ids][:_BEGUN_TOKENS]


def _prompt(target: Target, opening: list[int], begin: list[int], tokens: list[int]) -> list[int]:
    """The prompt that an opening becomes by what was said behind its beginning; empty where there is none."""
    said = [token for token in tokens if token not in target.eos_ids]
    if target.tokenizer is None or target.tokenizer.chat_template is None:
        return opening + begin + said[: _ASKED_TOKENS // 4] if said else []
    text = target.decode(begin + said).strip()
    return target.encode(text) if text else []


@torch.inference_mode()
def _generate(target: Target, prompts: list[list[int]], sampling: Sampling, max_new_tokens: int) -> list[list[int]]:
    """New tokens of each prompt, its end of sequence included, those of about the same length at once."""
    said: list[list[int]] = [[] for _ in prompts]
    for places in _alike(prompts):
        found = _generate_batch(target, [prompts[place] for place in places], sampling, max_new_tokens)
        for place, tokens in zip(places, found, strict=True):
            said[place] = tokens
    return said


def _alike(prompts: list[list[int]]) -> list[list[int]]:
    """Places of the prompts by length, in batches: who is more than twice as long as another would have it padded."""
    batches: list[list[int]] = []
    for place in sorted(range(len(prompts)), key=lambda place: len(prompts[place])):
        if batches and len(prompts[place]) <= _PADDED * len(prompts[batches[-1][0]]):
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def _generate_batch(target: Target, prompts: list[list[int]], sampling: Sampling, max_new_tokens: int) -> list[list[int]]:
    """The same by one call of transformers' own ``generate``."""
    longest = max(map(len, prompts))
    rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=target.device)
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=target.device)
    ends = sorted(target.eos_ids)
    options: dict[str, Any] = {"do_sample": not sampling.greedy, "repetition_penalty": sampling.repetition_penalty}
    # A cache that grows is copied whole with every token, which takes as long as the model. ALiBi and models that say they
    # cannot be compiled count the keys that they are given, and would count those that are not written yet.
    if target.model._can_compile_fullgraph and not getattr(target.model.config, "alibi", False):
        options |= {"cache_implementation": "static", "disable_compile": True}
    if not sampling.greedy:
        options |= {"temperature": sampling.temperature, "top_k": int(sampling.top_k), "top_p": sampling.top_p}
        options["min_p"] = sampling.min_p
    made: Tensor = target.model.generate(  # type: ignore[operator]
        rows,
        attention_mask=seen,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **options,
    )
    return [_until(row, target.eos_ids) for row in made[:, longest:].tolist()]


def _until(tokens: list[int], ends: frozenset[int]) -> list[int]:
    place = next((i for i, token in enumerate(tokens) if token in ends), None)
    return tokens if place is None else tokens[: place + 1]
