"""Times of verifying and of drafting, in steps of plain decoding.

Verification runs the passes of decoding. Drafts are requested as in decoding, timed and discarded.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from layerskip.config import SpeculativeConfig
from layerskip.decoding.decode import Stops, decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter
from layerskip.decoding.sampling import Chooser, Sampling
from layerskip.decoding.verify import verify
from layerskip.device.transfer import copy_to_device, now
from layerskip.drafters.registry import build_drafter
from layerskip.measure.measure import TimedDrafter
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.forward import forward
from layerskip.models.prefill import run_prefill
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target

_WARMUP, _TIMED = 2, 12  # rounds of a timed drafter
_ROOM = 32  # tokens
_SHORT = 64  # tokens of a prompt so short that every drafter can draft after it
MIN_REPEATS = 3
"""Fewest runs of every job, of which a median is the middle one."""

Job = TypeVar("Job", bound=Hashable)


class VerifyPass:
    """Verification of drafts after a prompt, with the results discarded. Prompt and drafts are meaningless tokens."""

    def __init__(self, target: Target, context: int, longest: int, sampling: Sampling = Sampling(), seed: int = 0) -> None:
        self.context = max(context, longest)  # positions in the cache between passes; drafts repeat so many
        self.cache = acquire_cache(target.model, target.layers, self.context + longest + 1, target.device, holder=self)
        self.tokens = copy_to_device([token % target.vocabulary for token in range(self.context)], target.device)
        self.chooser = Chooser(sampling, target.vocabulary, target.device, seed)
        self._plain = decoding_view(target.model)
        self.logits = run_prefill(self._plain, self.tokens, self.cache)  # ``[1, V]``
        # Like the drafts of sampled decoding, these carry the distribution that they were drawn from.
        self._uniform: Tensor | None = None
        if not sampling.greedy:
            self._uniform = torch.full((1, target.vocabulary), 1 / target.vocabulary, device=target.device)

    def check(self, draft: Draft) -> None:
        """Verify a chain."""
        block = torch.cat((self.tokens[-1:], draft.tokens))
        only_largest = self.chooser.sampling.needs_largest_only
        logits = forward(self._plain, block, self.cache, last=block.shape[0], only_largest=only_largest)
        verify(draft, self.chooser.distribution(logits, block), self.chooser.generator)

    def chain(self, count: int) -> None:
        """Verify a chain of ``count`` tokens; 0 is a step of plain decoding."""
        probs = None if self._uniform is None else self._uniform.expand(count, -1)
        self.check(Draft(self.tokens[:count], probs=probs))


def seconds_of(device: torch.device, job: Callable[[], object]) -> float:
    """Return the seconds that a job takes on a device."""
    start = now(device)
    job()
    return now(device) - start


def median_seconds(
    device: torch.device,
    jobs: Sequence[tuple[Job, Callable[[], object]]],
    repeats: int,
    seed: int = 0,
    on_repeat: Callable[[], object] = lambda: None,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[Job, float]:
    """Return the median seconds of named jobs; one that is in the list twice runs twice as often.

    All run repeatedly in random order, once more than ``repeats`` for a warm-up. Once time ``is_over``, none is timed more
    than ``MIN_REPEATS`` times. ``on_repeat`` is called after each repeat.
    """
    times: dict[Job, list[float]] = {name: [] for name, _ in jobs}
    order = random.Random(seed)
    for repeat in range(repeats + 1):
        if repeat > MIN_REPEATS and is_over():
            break
        for name, job in order.sample(jobs, len(jobs)):
            seconds = seconds_of(device, job)
            if repeat:  # the first one warms up
                times[name].append(seconds)
        on_repeat()
    return {name: statistics.median(seconds) for name, seconds in times.items()}


@torch.inference_mode()
def time_verification(
    target: Target, context: int, longest: int = 16, sampling: Sampling = Sampling(), repeats: int = 12, seed: int = 0
) -> tuple[float, ...]:
    """Return the median seconds of verifying chains of 0 to ``longest`` tokens; the first is a step of plain decoding."""
    passes = VerifyPass(target, context, longest, sampling, seed)
    jobs = [(count, partial(passes.chain, count)) for count in range(longest + 1)]
    return tuple(median_seconds(target.device, jobs, repeats, seed).values())


def time_drafting(
    target: Target, config: SpeculativeConfig, context: int, sampling: Sampling = Sampling(), seed: int = 0
) -> float:
    """Decode plainly after a meaningless prompt of ``context`` tokens, request a draft in every round, and take medians.

    A drafter that drafts nothing after so long a prompt, for example because its positions are exhausted, is timed after
    shorter ones.

    Returns:
        The cost of one token of a chain or one level of a tree, of all levels if they are drafted at once, in steps of plain
        decoding with two decimals.
    """
    drafter = build_drafter(config, target)
    timed = _time_drafts(target, drafter, context, sampling, seed)
    while not timed.drafts and context > _SHORT:
        context //= 2
        timed = _time_drafts(target, drafter, context, sampling, seed)
    step = statistics.median(timed.between[_WARMUP:])
    return round(statistics.median(timed.drafts[_WARMUP:] or timed.empty_drafts) / step, 2)


def _time_drafts(target: Target, drafter: Drafter, context: int, sampling: Sampling, seed: int) -> _DiscardedDrafts:
    timed = _DiscardedDrafts(drafter, target.device)
    prompt = [token % target.vocabulary for token in range(max(1, context))]
    end = len(prompt) + 1 + _WARMUP + _TIMED  # leaves room for the drafts of the last rounds
    stops = Stops(frozenset(), lambda tokens: len(tokens) >= end)
    decode(target, timed, prompt, sampling, end - len(prompt) + _ROOM, stops=stops, seed=seed)
    return timed


class _DiscardedDrafts(TimedDrafter):
    """A drafter whose drafts are timed and discarded."""

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        super().__init__(drafter, device)
        self.never_drafts = False  # each round requests a draft, if only to time it
        self._ended = 0.0
        self.drafts: list[float] = []  # seconds of each draft, divided by its steps
        self.empty_drafts: list[float] = []  # seconds of each request without a draft
        self.between: list[float] = []  # seconds between drafts

    def draft(self, context: Context, limit: int) -> Draft:
        """Request a draft and return an empty one."""
        begun = now(self.device)
        if self._ended:
            self.between.append(begun - self._ended)
        draft = self.drafter.draft(context, limit)
        self._ended = now(self.device)
        seconds = (self._ended - begun) / self.drafter.steps(draft)
        (self.drafts if draft.tokens.shape[0] else self.empty_drafts).append(seconds)
        return Draft.empty(context.last.device)
