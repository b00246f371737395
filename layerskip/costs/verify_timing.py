"""Measurement of the time of verifying drafted tokens, with the verification passes of decoding."""

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
from layerskip.device.transfer import copy_to_device
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.forward import forward
from layerskip.models.prefill import run_prefill
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target


class VerifyPass:
    """Verification of drafts after a prompt, with the results discarded. Prompt and drafts are meaningless tokens.

    Args:
        target: the model that verifies.
        context: positions in the cache, raised to ``longest`` because drafts repeat tokens of the prompt.
        longest: the most drafted tokens; not checked.
        sampling: how tokens are chosen; None for greedy.
        seed: seed of sampling.

    Attributes:
        context: positions in the cache.
        cache: the target's cache; its ``length`` is ``context`` between passes.
        tokens: ``[context]`` int64 on the device.
        logits: ``[1, V]`` after them.
        chooser: chooses tokens.
    """

    def __init__(self, target: Target, context: int, longest: int, sampling: Sampling | None = None, seed: int = 0) -> None:
        sampling = sampling or Sampling()
        self.context = max(context, longest)
        self.cache = acquire_cache(target.model, target.layers, self.context + longest + 1, target.device, holder=self)
        self.tokens = copy_to_device([token % target.vocabulary for token in range(self.context)], target.device)
        self.chooser = Chooser(sampling, target.vocabulary, target.device, seed)
        self._model, self._plain = target.model, decoding_view(target.model)
        self.logits = run_prefill(self._plain, self.tokens, self.cache)
        # Like the drafts of sampled decoding, these carry the distribution that they were drawn from.
        self._uniform: Tensor | None = None
        if not sampling.greedy:
            self._uniform = torch.full((1, target.vocabulary), 1 / target.vocabulary, device=target.device)

    def check(self, draft: Draft) -> None:
        """Verify a chain."""
        block = torch.cat((self.tokens[-1:], draft.tokens))
        logits = forward(self._plain, block, self.cache, last=block.shape[0])
        verify(draft, self.chooser.distribution(logits, block), self.chooser.generator)

    def chain(self, count: int) -> None:
        """Verify a chain of ``count`` tokens; 0 is a step of plain decoding."""
        self.check(self._draft(count))

    def tree(self, parents: Sequence[int], kept: Sequence[int]) -> None:
        """Verify a tree.

        Args:
            parents: the parent of each node, as in a draft.
            kept: positions in the block, first the last token's, that are moved to where a chain would have them.

        Raises:
            UnsupportedModel: the target cannot verify trees.
        """
        draft = self._draft(len(parents), tuple(parents))
        block = torch.cat((self.tokens[-1:], draft.tokens))
        logits = tree_model(self._model).run(block, parents, self.cache)
        verify(draft, self.chooser.distribution(logits, block, parents), self.chooser.generator)
        self.cache.gather(kept)

    def _draft(self, count: int, parents: tuple[int, ...] | None = None) -> Draft:
        return Draft(self.tokens[:count], parents, None if self._uniform is None else self._uniform.expand(count, -1))


@torch.inference_mode()
def time_verification(
    target: Target, context: int, longest: int = 16, sampling: Sampling | None = None, repeats: int = 12, seed: int = 0
) -> tuple[float, ...]:
    """Verify chains of 0 to ``longest`` tokens repeatedly, in random order, and return the medians.

    The first, for no drafted token, is a step of plain decoding.

    Args:
        target: the model to time.
        context: positions in the cache.
        longest: the most drafted tokens.
        sampling: how tokens are chosen; None for greedy.
        repeats: runs of each length, after a warm-up.
        seed: seed of sampling.
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
