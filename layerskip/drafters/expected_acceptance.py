"""How many tokens of a draft will be accepted? As many as of drafts like it, lately.

A match of two tokens says less about what follows than one of four, and how much less depends on the texts at work; so it is
with what a drafter thinks of its tokens' chances. A draft that is certain is scored by the text as it goes on, whether or
not it was taken, so that what it is worth is known of drafts that were passed over, too, and of tokens that were left out.
All that is known is of rounds before; nothing depends on the tokens being drafted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

from layerskip.decoding.draft import Draft

LONG = 8  # tokens of a match, of which more say no more
_LATELY = 128  # drafts, or tokens of one kind; older ones fade
_GOES_ON = 0.9  # the chance of a token where the one before it was accepted, before any is known
_SLIGHT = 1e-6  # chance; less is as little


class Expectation:
    """Running means of accepted tokens, by what the drafts were like.

    Args:
        by_token: whether it is scored how often each token of a draft was said with all before it, for drafts of which not
            every token is verified; else how many tokens of a draft were.
    """

    def __init__(self, by_token: bool = False) -> None:
        self._by_token = by_token
        self.forget()

    def forget(self) -> None:
        """Know nothing."""
        self._means: dict[Hashable, tuple[int, float]] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a new text; what is known stays."""
        self._open: list[tuple[Hashable, Draft, int]] = []

    def expect(self, like: Hashable, hope: float = 0.0) -> float:
        """Accepted tokens of what is like this: the mean of those seen, and of one more that had as many as is hoped for."""
        seen, mean = self._means.get(like, (0, 0.0))
        return (seen * mean + hope) / (seen + 1)

    def expect_each(self, like: Hashable, draft: Draft) -> Iterator[float]:
        """Accepted tokens, were a draft its first token alone, its first two, and so on; where tokens are scored."""
        total = 0.0
        for grade, hope in _grades(draft):
            total += self.expect((like, grade), hope)
            yield total

    def add(self, like: Hashable, accepted: int) -> None:
        """Of a draft, or of one of its tokens, so many were accepted."""
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
            path, whole = _agreement(draft, text[begin:])
            if not whole and begin + len(path) >= len(text):
                left.append((like, draft, begin))
            elif self._by_token:
                for node, (grade, _) in enumerate(_grades(draft)):
                    self.add((like, grade), node in path)
            else:
                self.add(like, len(path))
        self._open = left


def _grades(draft: Draft) -> Iterator[tuple[Hashable, float]]:
    """Of each token what it has in common with others that are as likely, and how likely that seems before any is known."""
    depths: list[int] = []
    for node, parent in enumerate(_parents(draft)):
        depth = 1 if parent < 0 else depths[parent] + 1
        depths.append(depth)
        chance = draft.chances[node] if draft.chances else _GOES_ON**depth
        yield (depth, round(-2 * math.log2(max(chance, _SLIGHT)))), chance


def _agreement(draft: Draft, text: Sequence[int]) -> tuple[list[int], bool]:
    """Which tokens of a draft lie on the branch that a text takes, and whether the branch ends there."""
    children: dict[int, dict[int, int]] = {}
    for node, (token, parent) in enumerate(zip(draft.found, _parents(draft), strict=True)):
        children.setdefault(parent, {}).setdefault(token, node)
    node, path = -1, list[int]()
    for token in text:
        if token not in children.get(node, {}):
            break
        node = children[node][token]
        path.append(node)
    return path, node not in children


def _parents(draft: Draft) -> Sequence[int]:
    return range(-1, len(draft.found) - 1) if draft.parents is None else draft.parents
