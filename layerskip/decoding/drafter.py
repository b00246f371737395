"""The interface between the decoding loop and drafters, and the drafter that proposes nothing.

:class:`Drafter` is required. The other protocols are optional abilities, which callers find with ``isinstance``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from layerskip.decoding.draft import Draft
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.tree import draft_depth
from layerskip.decoding.verify import Verdict
from layerskip.models.cache import KVCache


@dataclass
class Context:
    """The sequence so far.

    Args:
        tokens: prompt and committed tokens, on the host.
        last: ``[1]`` int64 on the device: the last token, which is in no cache yet.
    """

    tokens: list[int]
    last: Tensor


@dataclass(frozen=True)
class VerifyOutput:
    """The target's output in one verification pass.

    Args:
        block: ``[n]`` int64: the last token of the sequence, then the drafted tokens.
        logits: ``[n, V]``: the target's logits after each of them, before any warping.
    """

    block: Tensor
    logits: Tensor


@dataclass(frozen=True)
class LateRead:
    """Values on the device that the loop reads together with the verdict, because every further read would wait again.

    Args:
        values: int64, or of a floating dtype.
        receive: called after ``observe`` with the verdict and the values as nested lists. Not called in the round that ends
            the sequence.
    """

    values: Tensor
    receive: Callable[[Verdict, list[Any]], None]


class Drafter(Protocol):
    """The proposer of tokens for the target to verify. A drafter serves any number of prompts, one at a time.

    The loop calls ``start`` once per prompt after the target's prefill, and then ``draft``, ``observe_logits`` and
    ``observe`` in every round. The output is the target's own whatever a drafter proposes, under one condition: if
    tokens are drawn, ``Draft.probs`` must be the exact distributions that they were drawn from, and whether a token is
    proposed must depend on the tokens before it only, not on its own value.

    Attributes:
        tree_tokens: the most tokens of its trees; 0 if it drafts chains.
    """

    tree_tokens: int

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Begin a prompt.

        Args:
            prompt: its tokens.
            cache: the target's cache, filled with the prompt. A drafter that runs on it must restore ``length``.
            chooser: how tokens are chosen.
        """

    def draft(self, context: Context, limit: int) -> Draft:
        """Propose a chain of at most ``limit`` tokens, or a tree of at most that depth; the draft may be empty.

        Args:
            context: the sequence to continue.
            limit: at least 1.
        """
        ...

    def observe(self, verdict: Verdict) -> None:
        """Learn from the verdict on the last draft. Not called in the round that ends the sequence."""

    def observe_logits(self, output: VerifyOutput) -> Sequence[LateRead]:
        """Return what to read of the target's logits of the round, also if another drafter drafted; computed on the device.

        Not called for the prefill.
        """
        ...


@runtime_checkable
class CrossPromptState(Protocol):
    """A drafter that may keep state from one prompt to the next, and can be reset."""

    @property
    def keeps_state(self) -> bool:
        """True if it keeps state as configured."""
        ...

    def reset_state(self) -> None:
        """Drop everything kept from earlier prompts."""


@runtime_checkable
class ContextFollower(Protocol):
    """A drafter that learns from the text itself, also in rounds in which it does not draft."""

    def follow(self, context: Context) -> None:
        """Observe the context of a round. Its list of tokens keeps growing until the next prompt begins."""


@runtime_checkable
class PlainDecoding(Protocol):
    """A drafter that may never propose anything, so that the next pass needs nothing from it."""

    @property
    def never_drafts(self) -> bool:
        """True if it proposes nothing."""
        ...


@runtime_checkable
class Lookup(Protocol):
    """A drafter that may find its drafts without running a model, so that requesting one costs next to nothing.

    Attributes:
        lookup: whether it does.
    """

    lookup: bool


@runtime_checkable
class SinglePass(Protocol):
    """A drafter that may draft all levels of a tree in one pass, so that depth does not add to its cost.

    Attributes:
        single_pass: whether it does.
    """

    single_pass: bool


def is_single_pass(drafter: Drafter) -> bool:
    """Return whether a drafter drafts all levels in one pass."""
    return isinstance(drafter, SinglePass) and drafter.single_pass


def draft_steps(drafter: Drafter, draft: Draft) -> int:
    """Return the number of steps in which a drafter made a draft; 1 for an empty draft."""
    return 1 if is_single_pass(drafter) else max(1, draft_depth(draft))


@runtime_checkable
class FeatureReader(Protocol):
    """A drafter that drafts from the target's hidden states.

    Attributes:
        modules: names of the target's sub-modules whose outputs it reads; empty if it reads none.
    """

    modules: tuple[str, ...]

    def observe_features(self, features: Tensor) -> None:
        """Receive the hidden states of committed tokens.

        Args:
            features: ``[n, F]``, the outputs of all ``modules`` concatenated. Right after ``start``, those of the prompt;
                then, before every ``observe``, those of the last token of the sequence and of the accepted tokens.
        """


class BaseDrafter:
    """Base class of drafters: drafts chains, needs no preparation and learns nothing. Subclasses define ``draft``."""

    tree_tokens = 0

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Begin a prompt; see :class:`Drafter`."""

    def observe(self, verdict: Verdict) -> None:
        """Learn from the verdict on the last draft; see :class:`Drafter`."""

    def observe_logits(self, output: VerifyOutput) -> Sequence[LateRead]:
        """Return what to read of the target's logits of the round, here nothing; see :class:`Drafter`."""
        return ()


class NoDraft(BaseDrafter):
    """A drafter that proposes nothing, which makes the loop plain decoding, the baseline of every comparison."""

    @property
    def never_drafts(self) -> bool:
        """True unless a subclass drafts."""
        return type(self).draft is NoDraft.draft

    def draft(self, context: Context, limit: int) -> Draft:
        """Return the empty draft."""
        return Draft.empty(context.last.device)
