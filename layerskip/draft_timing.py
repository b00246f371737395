"""What does drafting take beside a step of plain decoding? Drafts as decoding asks for them, each timed and thrown away."""

from __future__ import annotations

import statistics
from collections.abc import MutableMapping, Sequence

from torch import Tensor

from .cache import KVCache
from .clock import now
from .config import SpeculativeConfig
from .decode import decode
from .draft import Draft
from .drafters.base import Context, Drafter, Reader, Said
from .drafters.build import build_drafter
from .sampling import Chooser, Sampling
from .target import Target
from .tree import levels
from .verify import Verdict

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
    drafter = _Discarded(build_drafter(config, target), target)
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
    known = {} if known is None else known
    found = []
    for member in members:
        make = _make(member)
        if member.runs_model and make not in known:
            known[make] = time_drafting(target, member, context, sampling, seed=seed)
        found.append(known[make] if member.runs_model else 0.0)
    return tuple(found) if any(member.runs_model for member in members) else ()


def _make(member: SpeculativeConfig) -> str:
    """What a level of drafts takes depends on: of chains, not on how long they may be, nor how sure a draft has to be."""
    fields = member.to_dict()
    if not member.head:
        del fields["draft_length"]
    return " ".join(f"{name}={value}" for name, value in (fields | {"stop": member.stop.kind}).items() if value)


class _Discarded:
    """A drafter of whose drafts nothing is verified.

    Attributes:
        levels: seconds of each draft, over the tokens that it has in a row.
        vain: seconds of asking for a draft, where there was none.
        steps: seconds between drafts.
    """

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self._drafter, self._device, self._ended = drafter, target.device, 0.0
        self.tree_tokens = drafter.tree_tokens
        self.modules = drafter.modules if isinstance(drafter, Reader) else ()
        self.levels: list[float] = []
        self.vain: list[float] = []
        self.steps: list[float] = []

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self._drafter.start(prompt, cache, chooser)

    def read(self, features: Tensor) -> None:
        assert isinstance(self._drafter, Reader)
        self._drafter.read(features)

    def draft(self, context: Context, limit: int) -> Draft:
        begun = now(self._device)
        if self._ended:
            self.steps.append(begun - self._ended)
        draft = self._drafter.draft(context, limit)
        self._ended = now(self._device)
        if count := levels(draft):
            self.levels.append((self._ended - begun) / count)
        else:
            self.vain.append(self._ended - begun)
        return Draft.empty(context.last.device)

    def observe(self, verdict: Verdict) -> None:
        self._drafter.observe(verdict)

    def hear(self, said: Said) -> None:
        self._drafter.hear(said)
