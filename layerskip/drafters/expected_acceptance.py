"""Estimates of how many tokens of a draft will be accepted: the recent mean of drafts of the same group.

How much more a match of four tokens says about what follows than one of two depends on the text. So does the calibration of
a drafter's own probabilities. A deterministic draft is scored by the text as it goes on, whether it was taken
or not, so estimates also exist for declined drafts and for tokens that were cut off. All evidence is from earlier rounds;
nothing depends on the tokens being drafted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

from layerskip.decoding.draft import DeviceTree, Draft

MAX_MATCH = 8  # tokens of a match; longer matches say no more
_WINDOW = 128  # drafts, or tokens of one grade; older ones fade
_CONTINUES = 0.9  # prior probability of a token whose predecessor was accepted
_MIN_PROB = 1e-6  # smaller probabilities count as this one


class AcceptanceEstimates:
    """Running means of accepted tokens, by group of drafts.

    Args:
        by_token: whether each token of a draft is scored by how often the target says it and all tokens before it on its
            branch, for drafts that are verified in part; else the number of accepted tokens of each draft is.
    """

    def __init__(self, by_token: bool = False) -> None:
        self._by_token = by_token
        self.reset()

    def reset(self) -> None:
        """Drop all evidence."""
        self._means: dict[Hashable, tuple[int, float]] = {}
        self.start_text()

    def start_text(self) -> None:
        """Begin a new text; the means stay, unscored drafts are dropped."""
        self._open: list[tuple[Hashable, Draft, int]] = []

    def mean(self, group: Hashable, prior: float = 0.0) -> float:
        """Return the mean accepted tokens of a group, with one further observation of value ``prior``."""
        count, mean = self._means.get(group, (0, 0.0))
        return (count * mean + prior) / (count + 1)

    def prefix_means(self, group: Hashable, draft: Draft) -> Iterator[float]:
        """Yield the estimated accepted tokens of the draft's first token alone, its first two, and so on.

        For estimates ``by_token``.
        """
        total = 0.0
        for grade, prior in _grades(draft):
            total += self.mean((group, grade), prior)
            yield total

    def add(self, group: Hashable, accepted: int) -> None:
        """Add the number of accepted tokens of one draft, or of one token of it."""
        count, mean = self._means.get(group, (0, 0.0))
        count = min(count + 1, _WINDOW)
        self._means[group] = count, mean + (accepted - mean) / count

    def track(self, group: Hashable, draft: Draft, start: int) -> None:
        """Score a draft once the text has gone on, as if it had been verified.

        Args:
            group: of the draft.
            draft: a lookup draft; a drawn token may be rejected and said nonetheless, so the text could not score it.
            start: the length of the text that the draft continues.
        """
        self._open.append((group, draft, start))

    def update(self, text: Sequence[int]) -> None:
        """Score the tracked drafts that the text has decided; ``text`` continues that of the last call."""
        undecided = []
        for group, draft, start in self._open:
            path, complete = _match_text(draft, text[start:])
            if not complete and start + len(path) >= len(text):
                undecided.append((group, draft, start))
            elif self._by_token:
                for node, (grade, _) in enumerate(_grades(draft)):
                    self.add((group, grade), node in path)
            else:
                self.add(group, len(path))
        self._open = undecided


def _grades(draft: Draft) -> Iterator[tuple[Hashable, float]]:
    """Yield, per token, the grade that it shares with tokens of similar probability, and its prior probability."""
    depths: list[int] = []
    for node, parent in enumerate(_parents(draft)):
        depth = 1 if parent < 0 else depths[parent] + 1
        depths.append(depth)
        prob = draft.path_probs[node] if draft.path_probs else _CONTINUES**depth
        yield (depth, round(-2 * math.log2(max(prob, _MIN_PROB)))), prob


def _match_text(draft: Draft, text: Sequence[int]) -> tuple[list[int], bool]:
    """Return the nodes of a draft on the branch that a text takes, and whether that branch ends there."""
    children: dict[int, dict[int, int]] = {}
    for node, (token, parent) in enumerate(zip(draft.lookup_tokens, _parents(draft), strict=True)):
        children.setdefault(parent, {}).setdefault(token, node)
    node, path = -1, list[int]()
    for token in text:
        if token not in children.get(node, {}):
            break
        node = children[node][token]
        path.append(node)
    return path, node not in children


def _parents(draft: Draft) -> Sequence[int]:
    assert not isinstance(draft.parents, DeviceTree), "a lookup runs on the host"
    return range(-1, len(draft.lookup_tokens) - 1) if draft.parents is None else draft.parents
