"""How many tokens of a draft will be accepted? As many as of drafts like it, lately.

A match of two tokens says less about what follows than one of four, and how much less depends on the texts at work. A draft
that is certain is scored by the text as it goes on, whether or not it was taken, so that what it is worth is known of drafts
that were passed over, too. All that is known is of rounds before; nothing depends on the tokens being drafted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ..draft import Draft

_LATELY = 128  # drafts; older ones fade


class Expectation:
    """Running means of accepted tokens, by what the drafts were like."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing."""
        self._means: dict[Hashable, tuple[int, float]] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a new text; what is known stays."""
        self._open: list[tuple[Hashable, Draft, int]] = []

    def expect(self, like: Hashable, hope: float = 0.0) -> float:
        """Accepted tokens of a draft: the mean of those seen, and of one more that had as many as is hoped for."""
        seen, mean = self._means.get(like, (0, 0.0))
        return (seen * mean + hope) / (seen + 1)

    def add(self, like: Hashable, accepted: int) -> None:
        """A draft had so many tokens accepted."""
        seen, mean = self._means.get(like, (0, 0.0))
        seen = min(seen + 1, _LATELY)
        self._means[like] = seen, mean + (accepted - mean) / seen

    def watch(self, like: Hashable, draft: Draft, begin: int) -> None:
        """Add, once the text tells, what a draft has accepted, or would have had.

        Args:
            like: what the draft is like.
            draft: one that was found, as what is drawn may be rejected and said all the same.
            begin: how long the text is that it continues.
        """
        self._open.append((like, draft, begin))

    def follow(self, text: Sequence[int]) -> None:
        """Score the drafts that the text has got as far as; it goes on where it stood at the last call."""
        left = []
        for like, draft, begin in self._open:
            accepted, whole = _agreement(draft, text[begin:])
            if whole or begin + accepted < len(text):
                self.add(like, accepted)
            else:
                left.append((like, draft, begin))
        self._open = left


def _agreement(draft: Draft, text: Sequence[int]) -> tuple[int, bool]:
    """How many tokens of a text lie on a branch of a draft, and whether the branch ends there."""
    parents = range(-1, len(draft.found) - 1) if draft.parents is None else draft.parents
    children: dict[int, dict[int, int]] = {}
    for node, (token, parent) in enumerate(zip(draft.found, parents, strict=True)):
        children.setdefault(parent, {}).setdefault(token, node)
    node, count = -1, 0
    for token in text:
        if token not in children.get(node, {}):
            break
        node, count = children[node][token], count + 1
    return count, node not in children
