"""Comparison of the time of verifying a tree with that of a chain of as many tokens."""

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
    """Times of verifying a chain and a tree.

    Args:
        tokens: drafted tokens of each.
        context: positions in the cache before them.
        chain_seconds: median time of the chain.
        tree_seconds: median time of the tree, with moving the accepted branch into place in the cache.
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
        """Return the times as a dictionary that JSON can hold."""
        return asdict(self)


@torch.inference_mode()
def time_tree(
    target: Target, context: int, tokens: int = 16, sampling: Sampling | None = None, repeats: int = 20, seed: int = 0
) -> TreeTiming:
    """Verify a chain and a binary tree of ``tokens`` each in alternating order and take the medians.

    Args:
        target: the model to time.
        context: positions in the cache.
        tokens: drafted tokens of the chain and of the tree.
        sampling: how tokens are chosen; None for greedy.
        repeats: runs of each, after a warm-up.
        seed: seed of sampling.
    """
    passes = VerifyPass(target, context, tokens, sampling, seed)
    parents = tuple(node // 2 - 1 for node in range(tokens))
    kept = [0, *(node + 1 for node in path_to(tokens - 1, parents))]  # as if the target agreed with the last leaf
    variants = {"chain": partial(passes.chain, tokens), "tree": partial(passes.tree, parents, kept)}
    times: dict[str, list[float]] = {"chain": [], "tree": []}
    for repeat in range(repeats + 1):
        for name in ("chain", "tree") if repeat % 2 else ("tree", "chain"):
            start = now(target.device)
            variants[name]()
            if repeat:
                times[name].append(now(target.device) - start)
    return TreeTiming(tokens, passes.context, *(statistics.median(times[name]) for name in ("chain", "tree")))
