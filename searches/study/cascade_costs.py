"""Costs of verification and drafting for the choices of cascades, measured once for a study or a benchmark."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna

from layerskip import Sampling, SpeculativeConfig, Target
from layerskip.config import Costs, as_lists, as_tuples
from layerskip.costs.cost_model import in_steps
from layerskip.costs.timing import time_drafting, time_verification
from layerskip.device.memory import within_memory
from searches.space.search_space import DraftCost

_VERIFY_COST = "verify_cost"
_DRAFT_COST = "draft_cost"
_REPEATS = 5
_STEP = 64  # timed contexts are rounded to multiples of it
_SHORT = 1024  # up to it, attention is a small part of all costs
_FAR_APART = 2  # the factor between contexts that are timed apart

Configs = Sequence[SpeculativeConfig]


def spread_contexts(contexts: Sequence[float]) -> list[int]:
    """Return the contexts at which costs are timed, rising: the mean of short or similar ones.

    Others are timed at the longest, the median and the shortest context, as far as these are far apart. Three contexts also
    follow sliding windows, whose cost stops growing.
    """
    shortest, median, longest = min(contexts), statistics.median(contexts), max(contexts)
    chosen = [statistics.fmean(contexts)]
    if longest > max(_SHORT, _FAR_APART * shortest):
        middle = [median] if longest > _FAR_APART * median and median > _FAR_APART * shortest else []
        chosen = [shortest, *middle, longest]
    return [_STEP * max(1, round(context / _STEP)) for context in chosen]


@dataclass(frozen=True)
class CostTimer:
    """Measurement of costs in steps of plain decoding, after rising numbers of tokens (``contexts``)."""

    target: Target
    sampling: Sampling
    contexts: Sequence[int]
    seed: int

    def verify_costs(self) -> Costs:
        """Return the costs of verifying 1, 2, ... drafted tokens, of each context if there are several."""
        costs = [
            in_steps(time_verification(self.target, context, sampling=self.sampling, repeats=_REPEATS, seed=self.seed))
            for context in self.contexts
        ]
        return costs[0] if len(costs) == 1 else tuple(zip(self.contexts, costs, strict=True))

    def draft_costs(self, members: Configs, known: dict[str, float]) -> Costs:
        """Return the cost of one drafted token for each member of a cascade, of each context if there are several.

        Lookups cost 0.0; the result is empty if all members are lookups. New measurements are added to ``known``.
        """
        if all(member.lookup for member in members):
            return ()
        costs = [tuple(self._draft_cost(member, context, known) for member in members) for context in self.contexts]
        return costs[0] if len(costs) == 1 else tuple(zip(self.contexts, costs, strict=True))

    def _draft_cost(self, member: SpeculativeConfig, context: int, known: dict[str, float]) -> float:
        if member.lookup:
            return 0.0
        fields = member.to_dict() | {"stop": member.stop.method}
        if not member.head:  # the cost of a chain depends neither on its length nor on a threshold
            fields.pop("num_speculative_tokens", None)
        key = " ".join(f"{name}={value}" for name, value in fields.items() if value)
        key += f" context={context}" if len(self.contexts) > 1 else ""
        if key not in known:
            known[key] = time_drafting(self.target, member, context, self.sampling, seed=self.seed)
        return known[key]


def verify_cost(study: optuna.Study, measure: Callable[[], Costs]) -> Costs:
    """Return the verification costs that a study's cascades use.

    They are measured once and stored with the study, since other numbers would make other configurations.
    """
    if _VERIFY_COST not in study.user_attrs:
        study.set_user_attr(_VERIFY_COST, as_lists(measure()))
    costs: Costs = as_tuples(study.user_attrs[_VERIFY_COST])
    return costs


def draft_cost(
    study: optuna.Study,
    measure: Callable[[Configs, dict[str, float]], Costs],
    claim: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> DraftCost:
    """Return a function from a cascade's members to their drafting costs, which are measured on first use and stored.

    ``claim`` lets one worker at a time measure and store.
    """
    if _DRAFT_COST not in study.user_attrs:
        study.set_user_attr(_DRAFT_COST, {})

    def costs_of(members: Configs) -> Costs:
        with claim():
            known = study.user_attrs[_DRAFT_COST]
            before = len(known)
            costs = within_memory(lambda: measure(members, known))
            if costs is None:
                return ()  # the trial that decodes this cascade will report it
            if len(known) > before:
                study.set_user_attr(_DRAFT_COST, known)
            return costs

    return costs_of
