"""What does verifying drafted tokens take beside a step of plain decoding? Passes as decoding has them, to be timed."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip.decoding.draft import Draft
from layerskip.decoding.sampling import Chooser, Sampling
from layerskip.decoding.tree import tree_model
from layerskip.decoding.verify import verify
from layerskip.device.clock import now
from layerskip.device.upload import upload
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target


class VerifyPass:
    """Verifies drafts behind a prompt, of which nothing is kept; its tokens, and the drafted ones, say nothing.

    Args:
        target: the model.
        context: positions in the cache; as many as drafted tokens at least, as these are taken from them.
        longest: the most drafted tokens, which nobody checks.
        sampling: greedy where None.
        seed: of draws.

    Attributes:
        context: positions in the cache, in fact.
        cache: the target's; its ``length`` is ``context`` between passes.
        tokens: ``[context]`` int64 on the device.
        logits: ``[1, V]`` behind them.
        chooser: how tokens are chosen.
    """

    def __init__(self, target: Target, context: int, longest: int, sampling: Sampling | None = None, seed: int = 0) -> None:
        sampling = sampling or Sampling()
        self.context = max(context, longest)
        self.cache = acquire_cache(target.model, target.layers, self.context + longest + 1, target.device, holder=self)
        self.tokens = upload([token % target.vocabulary for token in range(self.context)], target.device)
        self.chooser = Chooser(sampling, target.vocabulary, target.device, seed)
        self._model, self._plain = target.model, decoding_view(target.model)
        self.logits = forward(self._plain, self.tokens, self.cache, last=1)
        self.cache.length = self.context
        # As drafters do: where tokens are drawn, they say from what.
        self._even: Tensor | None = None
        if not sampling.greedy:
            self._even = torch.full((1, target.vocabulary), 1 / target.vocabulary, device=target.device)

    def check(self, draft: Draft) -> None:
        """Verify a chain."""
        block = torch.cat((self.tokens[-1:], draft.tokens))
        found = forward(self._plain, block, self.cache, last=block.shape[0])
        verify(draft, self.chooser.distribution(found, block), self.chooser.generator)

    def chain(self, count: int) -> None:
        """Verify a chain of so many tokens; of none, this is a step of plain decoding."""
        self.check(self._draft(count))

    def tree(self, parents: Sequence[int], kept: Sequence[int]) -> None:
        """Verify a tree.

        Args:
            parents: of its nodes, as a draft's.
            kept: places in the block, the last token's first, that are put where a chain would have them.

        Raises:
            UnsupportedModel: the target cannot verify trees.
        """
        draft = self._draft(len(parents), tuple(parents))
        block = torch.cat((self.tokens[-1:], draft.tokens))
        found = tree_model(self._model).run(block, parents, self.cache)
        verify(draft, self.chooser.distribution(found, block, parents), self.chooser.generator)
        self.cache.gather(kept)

    def _draft(self, count: int, parents: tuple[int, ...] | None = None) -> Draft:
        return Draft(self.tokens[:count], parents, None if self._even is None else self._even.expand(count, -1))


@torch.inference_mode()
def time_verification(
    target: Target, context: int, longest: int = 16, sampling: Sampling | None = None, repeats: int = 12, seed: int = 0
) -> tuple[float, ...]:
    """Verify chains of every length in a random order, again and again, and take the medians.

    Args:
        target: the model.
        context: positions in the cache.
        longest: the most drafted tokens.
        sampling: greedy where None.
        repeats: how often, behind one that warms up.
        seed: of the order and of draws.

    Returns:
        Seconds that 0 to ``longest`` drafted tokens take; none are a step of plain decoding.
    """
    passes, order = VerifyPass(target, context, longest, sampling, seed), random.Random(seed)
    times: list[list[float]] = [[] for _ in range(longest + 1)]
    for repeat in range(repeats + 1):
        for count in order.sample(range(longest + 1), longest + 1):
            start = now(target.device)
            passes.chain(count)
            if repeat:
                times[count].append(now(target.device) - start)
    return tuple(map(statistics.median, times))
