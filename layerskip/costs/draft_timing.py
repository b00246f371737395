"""What does drafting take beside a step of plain decoding? Drafts as decoding asks for them, each timed and thrown away."""

from __future__ import annotations

import statistics
from collections.abc import MutableMapping, Sequence

import torch

from layerskip.config import SpeculativeConfig
from layerskip.decoding.decode import decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, steps_of
from layerskip.decoding.sampling import Sampling
from layerskip.device.clock import now
from layerskip.drafters.registry import build_drafter
from layerskip.measure.timed_drafter import Clocked
from layerskip.models.target import Target

_WARM_UP = 2  # rounds
_ROOM = 32  # tokens
_SHORT = 64  # tokens of a prompt behind which everybody drafts who ever does


def time_drafting(
    target: Target,
    config: SpeculativeConfig,
    context: int,
    sampling: Sampling | None = None,
    rounds: int = 12,
    seed: int = 0,
) -> float:
    """Decode plainly behind a prompt that says nothing, ask a drafter in every round, and take medians.

    Who drafts nothing behind so long a prompt, as for want of positions, is timed behind shorter ones.

    Args:
        target: the model.
        config: how to draft.
        context: tokens of the prompt.
        sampling: greedy where None.
        rounds: how many are timed.
        seed: of draws.

    Returns:
        What one token of a chain takes, one level of a tree, or all levels where they are drafted at once, in steps of plain
        decoding, to two decimals.
    """
    made = build_drafter(config, target)
    asked = _ask(target, made, context, sampling or Sampling(), rounds, seed)
    while not asked.drafting and context > _SHORT:
        context //= 2
        asked = _ask(target, made, context, sampling or Sampling(), rounds, seed)
    step = statistics.median(asked.steps[_WARM_UP:])
    return round(statistics.median(asked.drafting[_WARM_UP:] or asked.vain) / step, 2)


def _ask(target: Target, drafter: Drafter, context: int, sampling: Sampling, rounds: int, seed: int) -> _Discarded:
    """A drafter that was asked behind a prompt of so many tokens."""
    asked = _Discarded(drafter, target.device)
    prompt = [token % target.vocabulary for token in range(max(1, context))]
    end = len(prompt) + 1 + _WARM_UP + rounds  # room is left for drafts of the last rounds
    stops, none = (lambda tokens: len(tokens) >= end), frozenset[int]()
    decode(target, asked, prompt, sampling, end - len(prompt) + _ROOM, stops=stops, seed=seed, eos_ids=none)
    return asked


def draft_costs(
    target: Target,
    members: Sequence[SpeculativeConfig],
    context: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    known: MutableMapping[str, float] | None = None,
) -> tuple[float, ...]:
    """What each member of a cascade takes to draft, as :func:`time_drafting` measures.

    0.0 is for who finds drafts; where everybody does, nothing is told.

    Args:
        target: the model.
        members: configurations.
        context: tokens of a prompt.
        sampling: greedy where None.
        seed: of draws.
        known: what was measured before, to which is added what is measured now.
    """
    if all(member.lookup for member in members):
        return ()
    known = {} if known is None else known
    found = [0.0] * len(members)
    for place, member in enumerate(members):
        if not member.lookup:
            make = _make(member)
            if make not in known:
                known[make] = time_drafting(target, member, context, sampling, seed=seed)
            found[place] = known[make]
    return tuple(found)


def _make(member: SpeculativeConfig) -> str:
    """What a level of drafts takes depends on: of chains, not on how long they may be, nor how sure a draft has to be."""
    fields = member.to_dict()
    if not member.head:
        del fields["draft_length"]
    return " ".join(f"{name}={value}" for name, value in (fields | {"stop": member.stop.kind}).items() if value)


class _Discarded(Clocked):
    """A drafter of whose drafts nothing is verified.

    Attributes:
        drafting: seconds of each draft, over the steps that it was made in.
        vain: seconds of asking for a draft, where there was none.
        steps: seconds between drafts.
    """

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        super().__init__(drafter, device)
        self._ended = 0.0
        self.drafting: list[float] = []
        self.vain: list[float] = []
        self.steps: list[float] = []

    def draft(self, context: Context, limit: int) -> Draft:
        """None, whatever the drafter says."""
        begun = now(self.device)
        if self._ended:
            self.steps.append(begun - self._ended)
        draft = self.drafter.draft(context, limit)
        self._ended = now(self.device)
        seconds = (self._ended - begun) / steps_of(self.drafter, draft)
        (self.drafting if draft.tokens.shape[0] else self.vain).append(seconds)
        return Draft.empty(context.last.device)
