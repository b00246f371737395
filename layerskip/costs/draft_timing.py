"""Measurement of the cost of drafting in steps of plain decoding.

Drafts are requested as in decoding, timed and discarded.
"""

from __future__ import annotations

import statistics
from collections.abc import MutableMapping, Sequence

import torch

from layerskip.config import SpeculativeConfig
from layerskip.decoding.decode import decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, draft_steps
from layerskip.decoding.sampling import Sampling
from layerskip.device.clock import now
from layerskip.drafters.registry import build_drafter
from layerskip.measure.timed_drafter import TimedDrafter
from layerskip.models.target import Target
from layerskip.rules import Costs

_WARM_UP, _TIMED = 2, 12  # rounds
_ROOM = 32  # tokens
_SHORT = 64  # tokens of a prompt so short that every drafter can draft after it


def time_drafting(
    target: Target, config: SpeculativeConfig, context: int, sampling: Sampling | None = None, seed: int = 0
) -> float:
    """Decode plainly after a meaningless prompt of ``context`` tokens, request a draft in every round, and take medians.

    A drafter that drafts nothing after so long a prompt, for example because its positions are exhausted, is timed after
    shorter ones.

    Args:
        target: the model that verifies.
        config: the configuration of the drafter.
        context: tokens of the prompt.
        sampling: how tokens are chosen; None for greedy.
        seed: seed of sampling.

    Returns:
        The cost of one token of a chain or one level of a tree, of all levels if they are drafted at once. The unit is a
        step of plain decoding; rounded to two decimals.
    """
    drafter = build_drafter(config, target)
    timed = _time_drafts(target, drafter, context, sampling or Sampling(), seed)
    while not timed.drafts and context > _SHORT:
        context //= 2
        timed = _time_drafts(target, drafter, context, sampling or Sampling(), seed)
    step = statistics.median(timed.steps[_WARM_UP:])
    return round(statistics.median(timed.drafts[_WARM_UP:] or timed.empty_drafts) / step, 2)


def _time_drafts(target: Target, drafter: Drafter, context: int, sampling: Sampling, seed: int) -> _DiscardedDrafts:
    """Time a drafter after a prompt of ``context`` tokens."""
    timed = _DiscardedDrafts(drafter, target.device)
    prompt = [token % target.vocabulary for token in range(max(1, context))]
    end = len(prompt) + 1 + _WARM_UP + _TIMED  # leaves room for the drafts of the last rounds
    stops, none = (lambda tokens: len(tokens) >= end), frozenset[int]()
    decode(target, timed, prompt, sampling, end - len(prompt) + _ROOM, stops=stops, seed=seed, eos_ids=none)
    return timed


def draft_costs(
    target: Target,
    members: Sequence[SpeculativeConfig],
    contexts: Sequence[int],
    sampling: Sampling | None = None,
    seed: int = 0,
    known: MutableMapping[str, float] | None = None,
) -> Costs:
    """Measure the drafting cost of every member of a cascade with :func:`time_drafting`.

    Args:
        target: the model that verifies.
        members: the configurations of the members.
        contexts: tokens of the prompt, rising; at least one number.
        sampling: how tokens are chosen; None for greedy.
        seed: seed of sampling.
        known: earlier measurements; new ones are added.

    Returns:
        A cost per member, 0.0 for lookups; at each context if there are several. Empty if all members are lookups.
    """
    if all(member.lookup for member in members):
        return ()
    known = {} if known is None else known
    tables = []
    for context in contexts:
        costs = [0.0] * len(members)
        for place, member in enumerate(members):
            if not member.lookup:
                key = _cost_key(member) + (f" context={context}" if len(contexts) > 1 else "")
                if key not in known:
                    known[key] = time_drafting(target, member, context, sampling, seed=seed)
                costs[place] = known[key]
        tables.append((context, tuple(costs)))
    return tuple(tables) if len(tables) > 1 else tables[0][1]


def _cost_key(member: SpeculativeConfig) -> str:
    """Return the fields that a draft level's cost depends on; a chain's depends on neither draft length nor threshold."""
    fields = member.to_dict()
    if not member.head:
        fields.pop("draft_length", None)
    return " ".join(f"{name}={value}" for name, value in (fields | {"stop": member.stop.kind}).items() if value)


class _DiscardedDrafts(TimedDrafter):
    """A drafter whose drafts are timed and discarded.

    Attributes:
        drafts: seconds of each draft, divided by its steps.
        empty_drafts: seconds of each request without a draft.
        steps: seconds between drafts.
    """

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        super().__init__(drafter, device)
        self.never_drafts = False  # each round requests a draft, if only to time it
        self._ended = 0.0
        self.drafts: list[float] = []
        self.empty_drafts: list[float] = []
        self.steps: list[float] = []

    def draft(self, context: Context, limit: int) -> Draft:
        """Request a draft and return an empty one."""
        begun = now(self.device)
        if self._ended:
            self.steps.append(begun - self._ended)
        draft = self.drafter.draft(context, limit)
        self._ended = now(self.device)
        seconds = (self._ended - begun) / draft_steps(self.drafter, draft)
        (self.drafts if draft.tokens.shape[0] else self.empty_drafts).append(seconds)
        return Draft.empty(context.last.device)
