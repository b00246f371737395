"""The target's own continuations of prompts, made once and stored.

A scan replays decoding along them. They are decoded plainly, so any lossless decoding gives the same tokens, and stored
under a digest of everything that they depend on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.files import digest, read_json, write_json
from layerskip.models.environment import machine
from layerskip.models.target import NotFinite, Target
from layerskip.prompts import PromptItem, PromptSet

ReportCost = Callable[[str, float, float], None]
"""Takes the name of a stored result that is used, the seconds of making it, and how many of them were spent just now."""


@dataclass(frozen=True)
class Continuation:
    """A prompt and the target's own continuation of it, shorter than ``max_new_tokens`` if the sequence ended."""

    prompt_id: str
    category: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    max_new_tokens: int

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Continuation:
        return cls(**row | {"prompt": tuple(row["prompt"]), "tokens": tuple(row["tokens"])})

    @property
    def starts(self) -> int:
        """The number of positions at which a round can start: every token but the last one."""
        return len(self.tokens) - 1

    def limit(self, start: int) -> int:
        """Return the most tokens that a round may draft if its last committed token is ``tokens[start]``."""
        return self.max_new_tokens - start - 2


def continue_prompts(
    target: Target,
    prompts: PromptSet,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int = 0,
    folder: Path | None = None,
    on_prompt: Callable[[], object] = lambda: None,
    report_cost: ReportCost = lambda *_: None,
) -> tuple[Continuation, ...]:
    """Decode the target's continuations of prompts, a conversation turn by turn.

    Args:
        max_new_tokens: per prompt and turn.
        seed: of the draws, if tokens are sampled.
        folder: where the continuations of every prompt are stored, one file each, and looked for before decoding.
        on_prompt: called after every prompt.
        report_cost: called once per prompt.
    """
    continuations: list[Continuation] = []
    for index, item in enumerate(prompts):
        request = {
            "target": target.digest,
            "prompt": [item.id, item.category, item.content(), target.encode(item.messages(), item.field)],
            "sampling": sampling.to_dict(),
            "max_new_tokens": max_new_tokens,
            "seed": None if sampling.greedy else seed + index,
            "machine": machine(target),  # another machine may round near-ties differently
        }
        file = None if folder is None else folder / f"{digest(request)[:32]}.json"
        stored, spent = None if file is None else read_json(file), 0.0
        if not isinstance(stored, dict) or not {"continuations", "seconds"} <= stored.keys():
            start = time.monotonic()
            decoded = _decode(target, item, sampling, max_new_tokens, seed + index)
            spent = time.monotonic() - start
            stored = {"asked": request, "continuations": list(map(asdict, decoded)), "seconds": spent}
            if file is not None:
                write_json(file, stored)
        continuations += map(Continuation.from_dict, stored["continuations"])
        report_cost(f"continuation {digest(request)[:16]}", stored["seconds"], spent)
        on_prompt()
    return tuple(continuations)


def _decode(target: Target, item: PromptItem, sampling: Sampling, max_new_tokens: int, seed: int) -> list[Continuation]:
    messages = item.messages()
    continuations = []
    for followup in (*item.followups, None):
        prompt = target.encode(messages, item.field)
        with NotFinite.naming(item.id):
            tokens = decode(target, NoDraft(), prompt, sampling, max_new_tokens, seed=seed).tokens
        continuations.append(Continuation(item.id, item.category, tuple(prompt), tuple(tokens), max_new_tokens))
        if followup is not None:
            messages += [{"role": "assistant", "content": target.decode(tokens)}, {"role": "user", "content": followup}]
    return continuations
