"""What does verifying a tree take beside a chain of as many tokens?"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from layerskip.costs.verify_timing import VerifyPass
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.tree import path_to
from layerskip.device.clock import now
from layerskip.models.target import Target


@dataclass(frozen=True)
class TreeTiming:
    """Verifying some drafted tokens, as a chain and as a tree.

    Args:
        tokens: how many.
        context: positions in the cache before them.
        chain_seconds: median.
        tree_seconds: median, putting what is kept into its place included.
    """

    tokens: int
    context: int
    chain_seconds: float
    tree_seconds: float

    @property
    def ratio(self) -> float:
        """The tree's time as a multiple of the chain's."""
        return self.tree_seconds / self.chain_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@torch.inference_mode()
def time_tree(
    target: Target, context: int, tokens: int = 16, sampling: Sampling | None = None, repeats: int = 20, seed: int = 0
) -> TreeTiming:
    """Verify a chain and a binary tree in turn, there and back, and take the medians.

    Args:
        target: the model.
        context: positions in the cache.
        tokens: of the chain, and nodes of the tree.
        sampling: greedy where None.
        repeats: how often, behind one that warms up.
        seed: of draws.

    Raises:
        UnsupportedModel: the target cannot verify trees.
    """
    passes = VerifyPass(target, context, tokens, sampling, seed)
    parents = tuple(node // 2 - 1 for node in range(tokens))
    kept = [0, *(node + 1 for node in path_to(tokens - 1, parents))]  # as if the last leaf were what the target says
    ways = {"chain": partial(passes.chain, tokens), "tree": partial(passes.tree, parents, kept)}
    times: dict[str, list[float]] = {"chain": [], "tree": []}
    for repeat in range(repeats + 1):
        for name in ("chain", "tree") if repeat % 2 else ("tree", "chain"):
            start = now(target.device)
            ways[name]()
            if repeat:
                times[name].append(now(target.device) - start)
    return TreeTiming(tokens, passes.context, *(statistics.median(times[name]) for name in ("chain", "tree")))
