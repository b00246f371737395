"""How many tokens of a draft will be accepted? As many as of drafts like it, lately.

A match of two tokens says less about what follows than one of four, and how much less depends on the texts at work; so it is
with what a drafter thinks of its tokens' chances. A draft that is certain is scored by the text as it goes on, whether or
not it was taken, so that what it is worth is known of drafts that were passed over, too, and of tokens that were left out.
All that is known is of rounds before; nothing depends on the tokens being drafted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

from ..draft import Draft

_LATELY = 128  # drafts; older ones fade
_LEAST = 1e-6  # chance; less is as little
_HOPE = 0.9  # that a token is accepted where the one before it was, before any is known


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
        self._open: list[tuple[Hashable, Draft, int, int]] = []

    def expect(self, like: Hashable, hope: float = 0.0) -> float:
        """Accepted tokens of a draft: the mean of those seen, and of one more that had as many as is hoped for."""
        seen, mean = self._means.get(like, (0, 0.0))
        return (seen * mean + hope) / (seen + 1)

    def expect_each(self, like: Hashable, draft: Draft) -> Iterator[float]:
        """Accepted tokens, were a draft its first token alone, its first two, and so on."""
        total = 0.0
        for grade, hope in _grades(draft):
            total += self.expect((like, "token", grade), hope)
            yield total

    def add(self, like: Hashable, accepted: int) -> None:
        """A draft had so many tokens accepted."""
        seen, mean = self._means.get(like, (0, 0.0))
        seen = min(seen + 1, _LATELY)
        self._means[like] = seen, mean + (accepted - mean) / seen

    def watch(self, like: Hashable, draft: Draft, size: int, begin: int) -> None:
        """Add, once the text tells, what a draft has accepted, or would have had.

        Args:
            like: what the draft is like.
            draft: one that was found, as what is drawn may be rejected and said all the same.
            size: so many of its first tokens are what is drafted; 0 where that is none of them.
            begin: how long the text is that it continues.
        """
        self._open.append((like, draft, size, begin))

    def follow(self, text: Sequence[int]) -> None:
        """Score the drafts that the text has got as far as; it goes on where it stood at the last call."""
        left = []
        for like, draft, size, begin in self._open:
            path, whole = _agreement(draft, text[begin:])
            if not whole and begin + len(path) >= len(text):
                left.append((like, draft, size, begin))
                continue
            if size:
                self.add(like, sum(node < size for node in path))
            for node, (grade, _) in enumerate(_grades(draft)):
                self.add((like, "token", grade), node in path)
        self._open = left


def _grades(draft: Draft) -> Iterator[tuple[int, float]]:
    """Of each token: what it has in common with others that are as likely, and how likely that is thought to be.

    Where nobody knows, that is where it stands in its chain.
    """
    if draft.chances:
        return ((round(-4 * math.log2(max(chance, _LEAST))), chance) for chance in draft.chances)
    return ((place, _HOPE**place) for place in range(1, len(draft.found) + 1))


def _agreement(draft: Draft, text: Sequence[int]) -> tuple[list[int], bool]:
    """Which tokens of a draft lie on the branch that a text takes, and whether the branch ends there."""
    parents = range(-1, len(draft.found) - 1) if draft.parents is None else draft.parents
    children: dict[int, dict[int, int]] = {}
    for node, (token, parent) in enumerate(zip(draft.found, parents, strict=True)):
        children.setdefault(parent, {}).setdefault(token, node)
    node, path = -1, list[int]()
    for token in text:
        if token not in children.get(node, {}):
            break
        node = children[node][token]
        path.append(node)
    return path, node not in children
