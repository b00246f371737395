"""The front door: continue a prompt on a target as a configuration says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerskip.config import SpeculativeConfig
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stats import DecodeStats
from layerskip.drafters.registry import build_drafter
from layerskip.models.target import Prompt, Target


@dataclass(frozen=True)
class Generation:
    """What was generated.

    Args:
        tokens: the new token ids.
        text: their text without special tokens; empty where the target has no tokenizer.
        stats: what the drafter did.
        finish: why it ended: ``eos``, ``stop`` or ``length``.
    """

    tokens: list[int]
    text: str
    stats: DecodeStats
    finish: str


def generate(
    target: Target,
    prompt: Prompt,
    config: SpeculativeConfig | None = None,
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = 64,
    stop_strings: str | Sequence[str] = (),
    callback: Callable[[list[int]], None] | None = None,
    seed: int | None = None,
    drafter: Drafter | None = None,
) -> Generation:
    """Continue a prompt; the output is the target's own, whatever drafts it, unless the configuration says it is lossy.

    Args:
        target: as :func:`layerskip.load_target` gives it.
        prompt: a text, a list of messages, or token ids; see :meth:`Target.encode`.
        config: how to decode; plain where None.
        sampling: how tokens are chosen; greedy where None.
        max_new_tokens: at least 1.
        stop_strings: the output ends with the token that completes one of them, as in transformers.
        callback: gets the tokens of every round as they are committed.
        seed: makes sampling repeatable.
        drafter: what :func:`layerskip.build_drafter` made of the same configuration, for one request after the other: what
            learns from them goes on learning, and what was loaded stays; None makes one anew.

    Raises:
        ConfigError, UnsupportedModel, TargetError: the configuration or the prompt does not fit the target.
    """
    drafter = drafter or build_drafter(config or SpeculativeConfig(), target)
    tokens = target.encode(prompt)
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    stops = StopStrings(target, strings) if strings else None
    continuation = decode(
        target,
        drafter,
        tokens,
        sampling or Sampling(),
        max_new_tokens,
        stops=stops,
        callback=callback,
        seed=seed,
        accept=(config or SpeculativeConfig()).accept,
    )
    return Generation(continuation.tokens, target.decode(continuation.tokens), continuation.stats, continuation.finish)


class StopStrings:
    """Says whether the last token of a sequence completes one of some strings.

    Args:
        target: its tokenizer spells the tokens.
        strings: not empty, each with at least one character.
    """

    def __init__(self, target: Target, strings: Sequence[str]) -> None:
        if target.tokenizer is None:
            raise ValueError("stop_strings: this target has no tokenizer")
        if not all(strings):
            raise ValueError("stop_strings: the empty string would stop everything")
        self._tokenizer = target.tokenizer
        self._strings = strings
        # Every token spells at least one byte, so no more tokens than this can be part of a stop string.
        self._window = max(len(string.encode()) for string in strings) + 1

    def __call__(self, tokens: list[int]) -> bool:
        window = tokens[-self._window :]
        # A character of several tokens ends in a replacement mark until its last token is there.
        text, before = self._spell(window), self._spell(window[:-1]).rstrip("\ufffd")
        return any(text.find(string, max(0, len(before) - len(string) + 1)) >= 0 for string in self._strings)

    def _spell(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
