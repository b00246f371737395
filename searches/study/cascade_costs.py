"""Costs of verification and drafting for the choices of cascades, measured once for a study or a benchmark."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna

from layerskip import Sampling, SpeculativeConfig, Target
from layerskip.config import Costs, methods
from layerskip.costs.cost_model import in_steps
from layerskip.costs.timing import time_drafting, time_verification
from layerskip.device.memory import within_memory
from searches.space.search_space import DraftCost

_VERIFY_COST = "verify_cost"
_DRAFT_COST = "draft_cost"
_REPEATS = 5

Configs = Sequence[SpeculativeConfig]


@dataclass(frozen=True)
class CostTimer:
    """Measurement of costs in steps of plain decoding, after a number of tokens (``context``)."""

    target: Target
    sampling: Sampling
    context: int
    seed: int

    def verify_costs(self) -> Costs:
        seconds = time_verification(self.target, self.context, sampling=self.sampling, repeats=_REPEATS, seed=self.seed)
        return in_steps(seconds)

    def draft_costs(self, members: Configs, known: dict[str, float]) -> Costs:
        """Return the cost of one drafted token for each member of a cascade: 0.0 for lookups; empty if all are lookups.

        New measurements are added to ``known``.
        """
        if all(methods()[member.method].lookup for member in members):
            return ()
        return tuple(0.0 if methods()[member.method].lookup else self._draft_cost(member, known) for member in members)

    def _draft_cost(self, member: SpeculativeConfig, known: dict[str, float]) -> float:
        fields = member.to_dict() | {"stop": member.stop.method}
        if not member.head:  # the cost of a chain depends neither on its length nor on a threshold
            fields.pop("num_speculative_tokens", None)
        key = " ".join(f"{name}={value}" for name, value in fields.items() if value)
        if key not in known:
            known[key] = time_drafting(self.target, member, self.context, self.sampling, seed=self.seed)
        return known[key]


def verify_cost(study: optuna.Study, measure: Callable[[], Costs]) -> Costs:
    """Return the verification costs of a study's cascades, stored, since other numbers would make other configurations."""
    if _VERIFY_COST not in study.user_attrs:
        study.set_user_attr(_VERIFY_COST, list(measure()))
    return tuple(study.user_attrs[_VERIFY_COST])


def draft_cost(
    study: optuna.Study,
    measure: Callable[[Configs, dict[str, float]], Costs],
    claim: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> DraftCost:
    """Return a function from a cascade's members to their drafting costs, measured on first use, and stored."""

    def costs_of(members: Configs) -> Costs:
        with claim():
            known = study.user_attrs.get(_DRAFT_COST, {})
            before = len(known)
            costs = within_memory(lambda: measure(members, known))
            if len(known) > before:
                study.set_user_attr(_DRAFT_COST, known)
            return costs or ()  # the trial that decodes a cascade reports that memory does not suffice

    return costs_of
