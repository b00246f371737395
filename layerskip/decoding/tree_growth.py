"""How does a tree of candidates grow? The likeliest branch next, as long as there is room and it is likely enough.

EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (arXiv 2406.16858), section 4.1: a node is worth the
product of the probabilities on its branch, so that a draft is small where little is known.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import TypeVar

Node = TypeVar("Node")


def grow(
    root: Node,
    successors: Callable[[Node], Iterable[tuple[int, float, Node]]],
    depth: int,
    size: int,
    least_probability: float,
) -> tuple[list[int], list[int], list[float]]:
    """Grow a tree, node by node.

    Args:
        root: where it begins; no token of the tree.
        successors: of a node: tokens, the probability of each behind the node, and the nodes they lead to. Of equal
            branches the one that was offered first goes first.
        depth: the most tokens of a branch.
        size: the most tokens of the tree.
        least_probability: a branch ends where the probabilities on it multiply to less.

    Returns:
        The tokens, the likeliest branch first; of each the one that it follows: an earlier one, or -1 for the root; and what
        the probabilities on its branch multiply to.
    """
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    # Least first: minus a branch's probability, then its age, which settles ties.
    waiting: list[tuple[float, int, int, int, int, Node]] = []
    born = 0

    def offer(node: Node, number: int, chance: float, level: int) -> None:
        nonlocal born
        for token, probability, child in successors(node) if level < depth else ():
            if chance * probability >= least_probability:
                heapq.heappush(waiting, (-chance * probability, born, level + 1, number, token, child))
                born += 1

    offer(root, -1, 1.0, 0)
    while waiting and len(tokens) < size:
        minus_chance, _, level, parent, token, child = heapq.heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        chances.append(-minus_chance)
        offer(child, len(tokens) - 1, -minus_chance, level)
    return tokens, parents, chances
