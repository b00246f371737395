"""What does drafting take beside a step of plain decoding? Drafts as decoding asks for them, each timed and thrown away."""

from __future__ import annotations

import statistics
from collections.abc import MutableMapping, Sequence

import torch

from .clock import Clocked, now
from .config import SpeculativeConfig
from .decode import decode
from .draft import Draft
from .drafters.base import Context, Drafter
from .drafters.build import build_drafter
from .sampling import Sampling
from .target import Target
from .tree import levels

_WARM_UP = 2  # rounds
_ROOM = 32  # tokens


def time_drafting(
    target: Target,
    config: SpeculativeConfig,
    context: int,
    sampling: Sampling | None = None,
    rounds: int = 12,
    seed: int = 0,
) -> float:
    """Decode plainly behind a prompt that says nothing, ask a drafter in every round, and take medians.

    Args:
        target: the model.
        config: how to draft.
        context: tokens of the prompt.
        sampling: greedy where None.
        rounds: how many are timed.
        seed: of draws.

    Returns:
        What one token of a chain takes, or one level of a tree, in steps of plain decoding, to two decimals.
    """
    drafter = _Discarded(build_drafter(config, target), target.device)
    prompt = [token % target.vocabulary for token in range(max(1, context))]
    end = len(prompt) + 1 + _WARM_UP + rounds  # room is left for drafts of the last rounds
    stops, none = (lambda tokens: len(tokens) >= end), frozenset[int]()
    room = end - len(prompt) + _ROOM
    decode(target, drafter, prompt, sampling or Sampling(), room, stops=stops, seed=seed, eos_ids=none)
    step = statistics.median(drafter.steps[_WARM_UP:])
    return round(statistics.median(drafter.levels[_WARM_UP:] or drafter.vain) / step, 2)


def draft_costs(
    target: Target,
    members: Sequence[SpeculativeConfig],
    context: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    known: MutableMapping[str, float] | None = None,
) -> tuple[float, ...]:
    """What each member of a cascade takes to draft, as :func:`time_drafting` measures.

    0.0 is for who runs no model; where nobody does, nothing is told.

    Args:
        target: the model.
        members: configurations.
        context: tokens of a prompt.
        sampling: greedy where None.
        seed: of draws.
        known: what was measured before, to which is added what is measured now.
    """
    if not any(member.runs_model for member in members):
        return ()
    known = {} if known is None else known
    found = [0.0] * len(members)
    for place, member in enumerate(members):
        if member.runs_model:
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
        levels: seconds of each draft, over the tokens that it has in a row.
        vain: seconds of asking for a draft, where there was none.
        steps: seconds between drafts.
    """

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        super().__init__(drafter, device)
        self._ended = 0.0
        self.levels: list[float] = []
        self.vain: list[float] = []
        self.steps: list[float] = []

    def draft(self, context: Context, limit: int) -> Draft:
        """None, whatever the drafter says."""
        begun = now(self.device)
        if self._ended:
            self.steps.append(begun - self._ended)
        draft = self.drafter.draft(context, limit)
        self._ended = now(self.device)
        if count := levels(draft):
            self.levels.append((self._ended - begun) / count)
        else:
            self.vain.append(self._ended - begun)
        return Draft.empty(context.last.device)
