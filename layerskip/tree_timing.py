"""What does verifying a tree take beside a chain of as many tokens?"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .cache import KVCache
from .clock import now
from .draft import Draft
from .forward import forward
from .sampling import Chooser, Sampling, upload
from .target import Target
from .tree import path_to, tree_model
from .verify import verify
from .view import decoding_view


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
    sampling, device = sampling or Sampling(), target.device
    cache = KVCache(target.layers, context + tokens + 1, device=device)
    ids = upload([(1 + number) % target.vocabulary for number in range(context + tokens)], device)
    chooser = Chooser(sampling, target.vocabulary, device, seed)
    plain, trees = decoding_view(target.model), tree_model(target.model)
    forward(plain, ids[:context], cache, last=1)
    cache.length = context
    block, drafted = ids[context - 1 :], ids[context:]
    parents = tuple(node // 2 - 1 for node in range(tokens))
    kept = [0, *(node + 1 for node in path_to(tokens - 1, parents))]  # as if the last leaf were what the target says
    # As drafters do: where tokens are drawn, they say from what.
    even = None if sampling.greedy else torch.full((tokens, target.vocabulary), 1 / target.vocabulary, device=device)

    def chain() -> None:
        logits = forward(plain, block, cache, last=block.shape[0])
        verify(Draft(drafted, probs=even), chooser.distribution(logits, block), chooser.generator)

    def tree() -> None:
        logits = trees.run(block, parents, cache)
        verify(Draft(drafted, parents, even), chooser.distribution(logits, block, parents), chooser.generator)
        cache.gather(kept)

    times: dict[str, list[float]] = {"chain": [], "tree": []}
    ways = {"chain": chain, "tree": tree}
    for repeat in range(repeats + 1):
        for name in ("chain", "tree") if repeat % 2 else ("tree", "chain"):
            start = now(device)
            ways[name]()
            if repeat:
                times[name].append(now(device) - start)
    return TreeTiming(tokens, context, *(statistics.median(times[name]) for name in ("chain", "tree")))
