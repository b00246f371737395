"""Growth of a draft tree from the likeliest branches.

EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (arXiv 2406.16858), section 4.1: the value of a node is
the product of the probabilities on its branch. A draft is therefore small if little is known.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import TypeVar

Node = TypeVar("Node")


def grow_tree(
    root: Node,
    successors: Callable[[Node], Iterable[tuple[int, float, Node]]],
    depth: int,
    size: int,
    least_probability: float,
) -> tuple[list[int], list[int], list[float]]:
    """Grow a tree, the likeliest node first.

    Args:
        root: where to begin; it is no token of the tree.
        successors: returns a node's possible next tokens, each with its probability given the node and the node that it
            leads to. Of equally likely nodes the one offered first is taken first.
        depth: the most tokens of a branch.
        size: the most tokens of the tree.
        least_probability: a branch ends where the product of its probabilities falls below this value.

    Returns:
        The tokens, in falling order of probability; the parent of each: an earlier token, or -1 for the root; and the
        product of the probabilities on the branch of each.
    """
    tokens: list[int] = []
    parents: list[int] = []
    path_probs: list[float] = []
    # Entries: minus the path probability, a serial number that breaks ties, level, parent, token and node.
    heap: list[tuple[float, int, int, int, int, Node]] = []
    serial = 0

    def offer(node: Node, number: int, path_prob: float, level: int) -> None:
        nonlocal serial
        for token, probability, child in successors(node) if level < depth else ():
            if path_prob * probability >= least_probability:
                heapq.heappush(heap, (-path_prob * probability, serial, level + 1, number, token, child))
                serial += 1

    offer(root, -1, 1.0, 0)
    while heap and len(tokens) < size:
        minus_prob, _, level, parent, token, child = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        path_probs.append(-minus_prob)
        offer(child, len(tokens) - 1, -minus_prob, level)
    return tokens, parents, path_probs
