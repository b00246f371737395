"""The base class of drafters, which is what the decoding loop knows of them, and the drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from layerskip.config import PLAIN, Method, SpeculativeConfig, declare
from layerskip.decoding.draft import Draft
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.tree import draft_depth
from layerskip.decoding.verify import Verdict
from layerskip.models.cache import KVCache
from layerskip.models.target import Target


@dataclass
class Context:
    """The sequence so far: prompt and committed tokens."""

    tokens: list[int]
    last: Tensor  # ``[1]`` int64 on the device: the last token, which is in no cache yet


@dataclass(frozen=True)
class VerifyOutput:
    """The target's output in one verification pass."""

    block: Tensor  # ``[n]`` int64: the last token of the sequence, then the drafted tokens
    logits: Tensor  # ``[n, V]`` after each of them, before any warping


@dataclass(frozen=True)
class LateRead:
    """Values on the device that the loop reads together with the verdict, because every further read would wait again.

    ``receive`` is called after ``observe`` with the verdict and the values as nested lists, but not in the round that ends
    the sequence.
    """

    values: Tensor  # int64, or of a floating dtype
    receive: Callable[[Verdict, list[Any]], None]


class Drafter:
    """The proposer of tokens for the target to verify. A drafter serves any number of prompts, one at a time.

    The loop calls ``start`` once per prompt after the target's prefill, and then ``draft``, ``observe_logits`` and
    ``observe`` in every round. The output is the target's own whatever a drafter proposes, under one condition: if
    tokens are drawn, ``Draft.probs`` must be the exact distributions that they were drawn from, and whether a token is
    proposed must depend on the tokens before it only, not on its own value.

    A subclass defines ``draft``; all other methods do nothing here. A subclass that declares a ``method`` becomes available
    to configurations, programs and documentation by being imported.

    """

    method: ClassVar[Method]

    tree_tokens: int = 0  # the most tokens of its trees; 0 if it drafts chains
    reads_features: bool = False  # whether it reads the hidden states that the target's output layer reads
    reads_logits: bool = False  # whether it defines ``observe_logits``, or wraps a drafter that does
    lookup: bool = False  # whether it runs no model, so that a draft costs next to nothing; as the method declares
    single_pass: bool = False  # whether it drafts all levels of a tree in one pass, so that depth does not add to its cost
    never_drafts: bool = False  # whether it proposes nothing, so that the next pass of the target needs nothing from it

    @property
    def keeps_state(self) -> bool:
        """Whether it keeps something from one prompt to the next, until it is reset."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.reads_logits = cls.observe_logits is not Drafter.observe_logits
        if "method" in cls.__dict__:
            before = _CLASSES.get(cls.method.name)
            again = before is not None and (before.__module__, before.__qualname__) == (cls.__module__, cls.__qualname__)
            declare(cls.method, again)
            _CLASSES[cls.method.name] = cls
            cls.lookup = cls.method.lookup

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> Drafter:  # noqa: ARG003
        """Return the drafter of a configuration: by default, the class called with the values of the method's fields.

        Raises:
            ConfigError: the configuration does not fit the target.
        """
        return cls(**config.values)

    @classmethod
    def unsupported(cls, target: Target) -> str:  # noqa: ARG003
        """Return why the method cannot draft for a target, whatever its configuration; empty if it can."""
        return ""

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Begin a prompt. A drafter that runs on the target's ``cache``, which holds the prompt, must restore its length."""

    def draft(self, context: Context, limit: int) -> Draft:
        """Propose a chain of at most ``limit`` tokens, at least 1, or a tree of at most that depth; it may be empty."""
        raise NotImplementedError

    def observe_logits(self, output: VerifyOutput) -> Sequence[LateRead]:
        """Return what to read of the target's logits of the round, also if another drafter drafted; computed on the device.

        Not called for the prefill.
        """
        return ()

    def observe_features(self, features: Tensor) -> None:
        """Receive the hidden states ``[n, H]`` of committed tokens, if the drafter ``reads_features``.

        Right after ``start``, they are those of the prompt; then, before every ``observe``, those of the last token of the
        sequence and of the accepted tokens.
        """

    def observe(self, verdict: Verdict) -> None:
        """Learn from the verdict on the last draft. Not called in the round that ends the sequence."""

    def reset_state(self) -> None:
        """Drop everything kept from earlier prompts."""

    def steps(self, draft: Draft) -> int:
        """Return the number of steps in which a draft was made; 1 for an empty draft."""
        return 1 if self.single_pass else max(1, draft_depth(draft))


_CLASSES: dict[str, type[Drafter]] = {}


def drafter_classes() -> dict[str, type[Drafter]]:
    """Return the classes of all methods that have a drafter, by method."""
    return dict(_CLASSES)


class NoDraft(Drafter):
    """A drafter that proposes nothing, which makes the loop plain decoding, the baseline of every comparison."""

    method = PLAIN
    never_drafts = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.never_drafts = cls.draft is NoDraft.draft

    def draft(self, context: Context, limit: int) -> Draft:
        return Draft.empty(context.last.device)
