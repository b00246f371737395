"""What does the decoding loop ask of a drafter? The contract, and the drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from layerskip.decoding.draft import Draft
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.tree import levels
from layerskip.decoding.verify import Verdict
from layerskip.models.cache import KVCache


@dataclass
class Context:
    """The sequence so far.

    Args:
        tokens: prompt and committed tokens, on the host.
        last: ``[1]`` int64 on the device: the last of them, which no cache holds yet.
    """

    tokens: list[int]
    last: Tensor


@dataclass(frozen=True)
class Said:
    """What the target says in one pass of verification.

    Args:
        block: ``[n]`` int64: the last token of the sequence, then the drafted ones.
        logits: ``[n, V]`` behind each of them, before any warping.
    """

    block: Tensor
    logits: Tensor


class Drafter(Protocol):
    """Proposes tokens for the target to verify. One drafter serves one prompt after the other, one at a time.

    Attributes:
        tree_tokens: the most tokens of the trees that it drafts; 0 where it drafts chains.

    Life: ``start`` once per prompt, after the target's prefill; then in turns ``draft``, ``observe`` and ``hear``. Whatever
    it proposes, the output is the target's; a drafter can only be slow. With one exception it must keep: where tokens are
    drawn, ``Draft.probs`` must be the very distributions they were drawn from, and whether a token is proposed must
    not depend on its own value, only on those before it.
    """

    tree_tokens: int

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Begin a prompt.

        Args:
            prompt: its tokens.
            cache: the target's, filled with the prompt. A drafter that runs on it must leave ``length`` as it was.
            chooser: how tokens are chosen.
        """

    def draft(self, context: Context, limit: int) -> Draft:
        """Propose a chain of at most ``limit`` tokens behind the context (``limit`` >= 1), or a tree no deeper than that.

        An empty draft is a good answer.
        """
        ...

    def observe(self, verdict: Verdict) -> None:
        """Hear what came of the last draft, unless the sequence ended with it."""

    def hear(self, said: Said) -> None:
        """Hear what the target said in the same pass, whoever drafted for it; gone with the next pass.

        Nobody hears the prefill, nor the pass that a sequence ends with.
        """


@runtime_checkable
class Learner(Protocol):
    """What may keep something from one prompt for the next, and can be made to forget it."""

    @property
    def learns(self) -> bool:
        """Whether it does keep something, as it is set up."""
        ...

    def forget(self) -> None:
        """Be as if there had been no prompt before."""


@runtime_checkable
class Follower(Protocol):
    """What learns from the text itself, also where it is not asked for a draft."""

    def follow(self, context: Context) -> None:
        """Hear the context of a round, whoever drafts in it; its tokens go on growing until the next prompt begins."""


@runtime_checkable
class Finder(Protocol):
    """What finds its drafts, so that no model runs for them: asking takes next to no time, and nothing is lost with a draft.

    Attributes:
        finds: whether it does.
    """

    finds: bool


@runtime_checkable
class AtOnce(Protocol):
    """What drafts all levels of a tree at once, so that a deep one takes no longer than a shallow one.

    Attributes:
        at_once: whether it does.
    """

    at_once: bool


def drafts_at_once(drafter: Drafter) -> bool:
    """Whether a drafter drafts all levels at once."""
    return isinstance(drafter, AtOnce) and drafter.at_once


def steps_of(drafter: Drafter, draft: Draft) -> int:
    """In how many steps of its own a drafter made a draft; one where it looked in vain."""
    return 1 if drafts_at_once(drafter) else max(1, levels(draft))


@runtime_checkable
class Reader(Protocol):
    """What drafts from the target's hidden states.

    Attributes:
        modules: names of the target's sub-modules whose outputs it reads; none where it reads nothing after all.
    """

    modules: tuple[str, ...]

    def read(self, features: Tensor) -> None:
        """Hear the hidden states behind tokens that were committed.

        Args:
            features: ``[n, F]``, module beside module: of the prompt right after ``start``; then, before every ``observe``,
                of the sequence's last token and the accepted ones, which the next context continues.
        """


class NoDraft:
    """Proposes nothing: the loop is then plain decoding, the baseline of every comparison."""

    tree_tokens = 0

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Nothing to prepare."""

    def draft(self, context: Context, limit: int) -> Draft:
        """The empty draft."""
        return Draft.empty(context.last.device)

    def observe(self, verdict: Verdict) -> None:
        """Nothing to learn."""

    def hear(self, said: Said) -> None:
        """Nothing to learn."""
