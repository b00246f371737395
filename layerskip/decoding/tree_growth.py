"""Growth of a draft tree from the likeliest branches.

EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (arXiv 2406.16858), section 4.1: the value of a node is
the product of the probabilities on its branch. A draft is therefore small if little is known.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from layerskip.decoding.draft import DeviceTree, Draft
from layerskip.device.transfer import read_to_host

Node = TypeVar("Node")


def grow_tree(
    root: Node,
    successors: Callable[[Node], Iterable[tuple[int, float, Node]]],
    depth: int,
    size: int,
    min_token_prob: float,
) -> tuple[list[int], list[int], list[float]]:
    """Grow a tree, the likeliest node first.

    Args:
        root: where to begin; it is no token of the tree.
        successors: returns a node's possible next tokens, each with its probability given the node and the node that it
            leads to. Of equally likely nodes the one offered first is taken first.
        depth, size: the most tokens of a branch, and of the tree.
        min_token_prob: a branch ends where the product of its probabilities falls below this value.

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
            if path_prob * probability >= min_token_prob:
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


class LevelwiseTree:
    """The same growth level by level on a device, where tokens and probabilities are not read while the tree grows.

    Every level has as many nodes as it could have. Those below the least probability stay, with a path probability of minus
    infinity, and so do nodes after them. Where reading costs nothing, they are left out at once.

    Args:
        root: ``[1]`` int64: the token before the tree.
        width: the most nodes of a level that get children.
        min_token_prob: a branch ends where the product of its probabilities falls below this value.
        reads: whether to leave them out: on a CPU, unless the target's cache has the shapes of a GPU.
    """

    def __init__(self, root: Tensor, width: int, min_token_prob: float, reads: bool) -> None:
        self._root, self._width, self._min_token_prob, self._reads = root, width, min_token_prob, reads
        # Of the nodes that get children next: path probability and number.
        self._front = torch.ones(1, dtype=torch.float64, device=root.device)
        self._numbers = torch.full_like(root, -1)
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []  # path probabilities, tokens and parents of all nodes
        self._count = 0

    def add_level(self, probs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Add children to the front, at first the root; the likeliest children are the next front.

        Args:
            probs: ``[f, k]``, the probabilities of the children of each of the f nodes, or ``[1, k]`` if all have the same.
            tokens: int64 of the same shape.

        Returns:
            Of each node of the next front, ``[g]`` int64: the place of its parent in the front, and its token.
        """
        joint = self._front[:, None] * probs.double()
        path_probs = torch.where(joint >= self._min_token_prob, joint, -math.inf).flatten()
        tokens = tokens.expand_as(joint).flatten()
        self._levels.append((path_probs, tokens, self._numbers[:, None].expand_as(joint).flatten()))
        best = path_probs.sort(descending=True, stable=True)
        front, places = best.values[: self._width], best.indices[: self._width]
        if self._reads:
            (count,) = read_to_host((front > -math.inf).sum())
            front, places = front[:count], places[:count]
        self._front, self._numbers = front, places + self._count
        self._count += path_probs.shape[0]
        return places // probs.shape[1], tokens.index_select(0, places)

    def draft(self, size: int) -> Draft:
        """Return the likeliest nodes, at most ``size``."""
        path_probs, tokens, parents = (torch.cat(parts) for parts in zip(*self._levels, strict=True))
        # A parent comes first: it is at least as likely as its children, and was added before them.
        kept = path_probs.sort(descending=True, stable=True).indices[:size]
        counts = path_probs.index_select(0, kept) > -math.inf
        places = torch.full((self._count + 1,), -1, device=kept.device)
        places[kept] = torch.arange(kept.shape[0], device=kept.device)
        above = places[parents.index_select(0, kept)]  # the root, -1, is the last entry
        shape = DeviceTree(torch.where(counts, above, -1), counts.sum()[None], len(self._levels))
        draft = Draft(torch.where(counts, tokens.index_select(0, kept), self._root), shape)
        return draft.read_shape() if self._reads else draft
