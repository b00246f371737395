"""What do drafts and their verification cost here? Measured once for a study or a benchmark, and told to its cascades."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna

from layerskip import Sampling, SpeculativeConfig, Target
from layerskip.costs.cost_model import in_steps
from layerskip.costs.draft_timing import draft_costs
from layerskip.costs.verify_timing import time_verification
from layerskip.device.memory import out_of_memory, release
from searches.space.choices import DraftCost

_VERIFY_COST = "verify_cost"
_DRAFT_COST = "draft_cost"

Configs = Sequence[SpeculativeConfig]


@dataclass(frozen=True)
class Timer:
    """Measures costs, in steps of plain decoding.

    Args:
        target: the model.
        sampling: how tokens are chosen.
        context: tokens before those that are drafted.
        seed: of orders and draws.
    """

    target: Target
    sampling: Sampling
    context: int
    seed: int

    def verifying(self) -> tuple[float, ...]:
        """What verifying 1, 2, ... drafted tokens takes."""
        return in_steps(time_verification(self.target, self.context, sampling=self.sampling, seed=self.seed))

    def drafting(self, members: Configs, known: dict[str, float]) -> tuple[float, ...]:
        """What each member of a cascade takes for a drafted token; what is measured is added to ``known``."""
        return draft_costs(self.target, members, self.context, self.sampling, self.seed, known)


def verify_cost(study: optuna.Study, measure: Callable[[], Sequence[float]]) -> tuple[float, ...]:
    """What the study's cascades know of the cost of verification: what was measured first, as other numbers would make other
    configurations. Those of a version of this program that told them nothing go on knowing nothing."""
    if _VERIFY_COST not in study.user_attrs:
        study.set_user_attr(_VERIFY_COST, [] if _has_cascades(study) else list(measure()))
    return tuple(study.user_attrs[_VERIFY_COST])


def draft_cost(study: optuna.Study, measure: Callable[[Configs, dict[str, float]], tuple[float, ...]]) -> DraftCost:
    """The same of what their members take to draft, measured as one is first asked for."""
    if _DRAFT_COST not in study.user_attrs:
        study.set_user_attr(_DRAFT_COST, None if _has_cascades(study) else {})

    def told(members: Configs) -> tuple[float, ...]:
        known = study.user_attrs[_DRAFT_COST]
        if known is None:
            return ()
        before = len(known)
        try:
            found = measure(members, known)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            release()
            return ()  # whoever decodes so will find out
        if len(known) > before:
            study.set_user_attr(_DRAFT_COST, known)
        return found

    return told


def _has_cascades(study: optuna.Study) -> bool:
    known = (trial.user_attrs.get("config", {}) for trial in study.get_trials(deepcopy=False))
    return any(config.get("kind") == "cascade" for config in known)
