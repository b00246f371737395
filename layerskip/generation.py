"""The library's main entry point: :func:`generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerskip.config import SpeculativeConfig
from layerskip.decoding.checkpoint_settings import default_sampling
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stats import DecodeStats
from layerskip.drafters.registry import build_drafter
from layerskip.models.target import Prompt, Target


@dataclass(frozen=True)
class Generation:
    """The result of :func:`generate`.

    Args:
        tokens: the new token ids.
        text: their text without special tokens; empty if the target has no tokenizer.
        stats: the rounds of decoding.
        finish: why generation ended: ``eos``, ``stop`` or ``length``.
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
    """Continue a prompt. The output is the target's own for every configuration with exact acceptance.

    Args:
        target: from :func:`layerskip.load_target`.
        prompt: a text, a list of messages, or token ids; see :meth:`Target.encode`.
        config: how to decode; None for plain decoding.
        sampling: how tokens are chosen; None for greedy, with the repetition penalty that the checkpoint asks for.
        max_new_tokens: at least 1.
        stop_strings: the output ends with the token that completes one of them, as in transformers.
        callback: called with the tokens of every round as they are committed.
        seed: makes sampling reproducible; None uses torch's own random state.
        drafter: from :func:`layerskip.build_drafter` with the same configuration. Reuse it for consecutive requests to keep
            loaded models and what an adaptive drafter has learned. None builds a new one.

    Raises:
        ConfigError: the configuration does not fit the target.
        UnsupportedModel: the target or the draft model cannot be decoded in this way.
        TargetError: the prompt is empty or needs a tokenizer, the draft model cannot be loaded, or the checkpoint asks for
            what decoding does not do.
        NotFinite: the target's logits are NaN or infinite.
    """
    drafter = drafter or build_drafter(config or SpeculativeConfig(), target)
    tokens = target.encode(prompt)
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    stops = StopStrings(target, strings) if strings else None
    continuation = decode(
        target,
        drafter,
        tokens,
        sampling or default_sampling(target),
        max_new_tokens,
        stops=stops,
        callback=callback,
        seed=seed,
        accept=(config or SpeculativeConfig()).accept,
    )
    return Generation(continuation.tokens, target.decode(continuation.tokens), continuation.stats, continuation.finish)


class StopStrings:
    """Stopping criterion: whether the last token of a sequence completes a stop string.

    Args:
        target: must have a tokenizer.
        strings: one or more non-empty strings.
    """

    def __init__(self, target: Target, strings: Sequence[str]) -> None:
        if target.tokenizer is None:
            raise ValueError("stop_strings: this target has no tokenizer")
        for string in strings:
            if not isinstance(string, str) or not string:
                raise ValueError(f"stop_strings: {string!r} is not a non-empty text")
        self._tokenizer = target.tokenizer
        self._strings = strings
        # Every token has at least one byte, so a stop string spans no more tokens than this.
        self._window = max(len(string.encode()) for string in strings) + 1

    def __call__(self, tokens: list[int]) -> bool:
        window = tokens[-self._window :]
        # An incomplete multi-token character decodes to a replacement character.
        text, before = self._decode(window), self._decode(window[:-1]).rstrip("\ufffd")
        return any(text.find(string, max(0, len(before) - len(string) + 1)) >= 0 for string in self._strings)

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
