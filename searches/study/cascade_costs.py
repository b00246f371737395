"""Costs of verification and drafting for the choices of cascades, measured once for a study or a benchmark."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna

from layerskip import Sampling, SpeculativeConfig, Target
from layerskip.costs.cost_model import in_steps
from layerskip.costs.draft_timing import draft_costs
from layerskip.costs.verify_timing import time_verification
from searches.app.memory import within_memory
from searches.space.choices import DraftCost

_VERIFY_COST = "verify_cost"
_DRAFT_COST = "draft_cost"

Configs = Sequence[SpeculativeConfig]


@dataclass(frozen=True)
class CostTimer:
    """Measurement of costs in steps of plain decoding.

    Args:
        target: the target.
        sampling: of the target's tokens.
        context: number of tokens before the timed ones.
        seed: of the random tokens.
    """

    target: Target
    sampling: Sampling
    context: int
    seed: int

    def verify_costs(self) -> tuple[float, ...]:
        """Return the costs of verifying 1, 2, ... drafted tokens."""
        return in_steps(time_verification(self.target, self.context, sampling=self.sampling, seed=self.seed))

    def draft_costs(self, members: Configs, known: dict[str, float]) -> tuple[float, ...]:
        """Return the cost of one drafted token for each member of a cascade; new measurements are added to ``known``."""
        return draft_costs(self.target, members, self.context, self.sampling, self.seed, known)


def verify_cost(study: optuna.Study, measure: Callable[[], Sequence[float]]) -> tuple[float, ...]:
    """Return the verification costs that a study's cascades use.

    They are measured once and stored with the study, since other numbers would make other configurations. A study of an
    earlier version with cascades without costs continues without them.
    """
    if _VERIFY_COST not in study.user_attrs:
        study.set_user_attr(_VERIFY_COST, [] if _has_cascades(study) else list(measure()))
    return tuple(study.user_attrs[_VERIFY_COST])


def draft_cost(
    study: optuna.Study,
    measure: Callable[[Configs, dict[str, float]], tuple[float, ...]],
    claim: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> DraftCost:
    """Return a function from a cascade's members to their drafting costs, which are measured on first use and stored.

    Args:
        study: keeps them.
        measure: measures them.
        claim: lets one worker at a time measure and store.
    """
    if _DRAFT_COST not in study.user_attrs:
        study.set_user_attr(_DRAFT_COST, None if _has_cascades(study) else {})

    def costs_of(members: Configs) -> tuple[float, ...]:
        with claim():
            known = study.user_attrs[_DRAFT_COST]
            if known is None:
                return ()
            before = len(known)
            costs = within_memory(lambda: measure(members, known))
            if costs is None:
                return ()  # the trial that decodes this cascade will report it
            if len(known) > before:
                study.set_user_attr(_DRAFT_COST, known)
            return costs

    return costs_of


def _has_cascades(study: optuna.Study) -> bool:
    configs = (trial.user_attrs.get("config", {}) for trial in study.get_trials(deepcopy=False))
    return any(config.get("kind") == "cascade" for config in configs)
