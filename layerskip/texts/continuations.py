"""What does the target say by itself? Its own continuations of prompts, made once and kept.

A scan replays decoding along them. They are decoded plainly, so they are what any lossless decoding would give, and stored
under a digest of everything that they depend on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.files import digest, write_json
from layerskip.models.environment import machine
from layerskip.models.target import Target
from layerskip.prompts import PromptItem, PromptSet

OnUse = Callable[[str, float, float], None]
"""Hears of what is kept for others, too, whenever it is used: its name, the seconds that it took whoever made it, and how
many of them were spent just now."""


@dataclass(frozen=True)
class Continuation:
    """A prompt and the target's own continuation of it.

    Args:
        prompt_id: the prompt; the turns of a conversation share it.
        category: its kind of work.
        prompt: token ids.
        tokens: the continuation; shorter than ``max_new_tokens`` where the sequence ended.
        max_new_tokens: how many were asked for.
    """

    prompt_id: str
    category: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    max_new_tokens: int

    @property
    def starts(self) -> int:
        """From how many positions a round of decoding can start: every token but the last one."""
        return len(self.tokens) - 1

    def limit(self, start: int) -> int:
        """The most tokens that a round may draft whose last committed token is ``tokens[start]``."""
        return self.max_new_tokens - start - 2


def digest_of(continuations: Iterable[Continuation]) -> str:
    """What tells some continuations from others: their tokens."""
    return digest([[list(continuation.prompt), list(continuation.tokens)] for continuation in continuations])


def continue_prompts(
    target: Target,
    prompts: PromptSet,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int = 0,
    folder: Path | None = None,
    on_prompt: Callable[[], None] = lambda: None,
    on_use: OnUse = lambda *_: None,
) -> tuple[Continuation, ...]:
    """The target's continuations of prompts, a conversation turn by turn.

    Args:
        target: the model.
        prompts: what to continue.
        sampling: how tokens are chosen.
        max_new_tokens: per prompt and turn.
        seed: of the draws, where tokens are sampled.
        folder: where every prompt's continuations are kept, one file each, and looked for before decoding.
        on_prompt: called after every prompt.
        on_use: hears of every prompt's continuations.
    """
    continuations: list[Continuation] = []
    for index, item in enumerate(prompts):
        asked = _asked(target, item, sampling, max_new_tokens, seed + index)
        file = None if folder is None else folder / f"{digest(asked)[:32]}.json"
        start, found = time.monotonic(), _read(file)
        if found is None:
            made = _decode(target, item, sampling, max_new_tokens, seed + index)
            found = made, time.monotonic() - start
            _write(file, asked, *found)
            here = found[1]
        else:
            here = 0.0
        continuations += found[0]
        on_use(f"continuation {digest(asked)[:16]}", found[1], here)
        on_prompt()
    return tuple(continuations)


def _asked(target: Target, item: PromptItem, sampling: Sampling, max_new_tokens: int, seed: int) -> dict[str, Any]:
    return {
        "target": target.digest,
        "prompt": [item.id, item.category, item.content(), target.encode(item.messages())],
        "sampling": sampling.to_dict(),
        "max_new_tokens": max_new_tokens,
        "seed": None if sampling.greedy else seed,
        "machine": machine(target),  # another one may round near-ties otherwise
    }


def _decode(target: Target, item: PromptItem, sampling: Sampling, max_new_tokens: int, seed: int) -> list[Continuation]:
    messages = item.messages()
    found = []
    for followup in (*item.followups, None):
        prompt = target.encode(messages)
        tokens = decode(target, NoDraft(), prompt, sampling, max_new_tokens, seed=seed).tokens
        found.append(Continuation(item.id, item.category, tuple(prompt), tuple(tokens), max_new_tokens))
        if followup is not None:
            messages.append({"role": "assistant", "content": target.decode(tokens)})
            messages.append({"role": "user", "content": followup})
    return found


def _read(file: Path | None) -> tuple[list[Continuation], float] | None:
    """What is kept in a file, and the seconds that it took; None where there is none, or half of one."""
    if file is None or not file.exists():
        return None
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        rows, seconds = kept["continuations"], float(kept["seconds"])
    except (ValueError, KeyError):
        return None
    return [Continuation(**row | {"prompt": tuple(row["prompt"]), "tokens": tuple(row["tokens"])}) for row in rows], seconds


def _write(file: Path | None, asked: dict[str, Any], continuations: list[Continuation], seconds: float) -> None:
    if file is not None:
        write_json(
            file,
            {"asked": asked, "continuations": [asdict(continuation) for continuation in continuations], "seconds": seconds},
        )
