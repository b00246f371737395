"""The search space of a study: from a trial's choices to a configuration, and back.

The space is conditional: a trial chooses a kind of drafter first, then the parameters of that kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import optuna

from layerskip import AcceptRule, SpeculativeConfig
from searches.app.checks import InputError, check_list
from searches.space import registry
from searches.space.choices import Choices, Params
from searches.space.prompt_lookup import every_lookup


@dataclass(frozen=True)
class SearchSpace(Choices):
    """The configurations that a study may propose; its arguments are those of :class:`~searches.space.choices.Choices`."""

    def __post_init__(self) -> None:
        known = registry.all_kinds()
        if self.kinds is None:
            object.__setattr__(self, "kinds", known)
        super().__post_init__()
        check_list("space.kinds", self.kinds, known)
        kinds = set(self.kinds or ())
        if kinds <= {"none", "cascade"} and "cascade" in kinds:
            raise InputError("space.kinds: a cascade is prompt_lookup and another kind, and those are missing")
        registry.available_kinds(self)  # refuses kinds that cannot be searched with these choices

    @property
    def available_kinds(self) -> tuple[str, ...]:
        """The kinds that a trial chooses from: those of ``kinds``, without those that lack a head, a model or trees."""
        return registry.available_kinds(self)

    @property
    def second_kinds(self) -> tuple[str, ...]:
        """The kinds that may follow the lookup of a cascade."""
        return registry.second_kinds(self)

    @property
    def bridged(self) -> bool:
        """True if drafts may have bridges or a reduced vocabulary."""
        reduced = any(self.draft_heads) and not {"layer_skip", *self.models}.isdisjoint(self.available_kinds)
        return reduced or ("layer_skip" in self.available_kinds and set(self.bridges) != {"none"})

    def suggest(self, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
        """Return the configuration that a trial proposes."""
        config = registry.searched(str(trial.suggest_categorical("kind", self.available_kinds))).suggest(self, trial)
        if not self.allow_lossy or config.kind == "none":
            return config
        rule = str(trial.suggest_categorical("accept", ("exact", "threshold", "typical")))
        if rule == "threshold":
            return replace(config, accept=AcceptRule(rule, trial.suggest_float("accept_threshold", 0.05, 0.95, step=0.05)))
        return replace(config, accept=AcceptRule(rule))

    def params(self, config: SpeculativeConfig) -> Params:
        """Return the choices that lead to a configuration; the reverse of :meth:`suggest`."""
        found = dict(registry.searched(config.kind).params(self, config))
        if self.allow_lossy and config.kind != "none":
            found["accept"] = config.accept.kind
            if config.accept.kind == "threshold":
                found["accept_threshold"] = config.accept.threshold
        return found | {"kind": config.kind}

    def lookups(self) -> list[SpeculativeConfig]:
        """Return every prompt lookup of the space; an empty list if it has none."""
        return every_lookup(self) if "prompt_lookup" in self.available_kinds else []


registry.load_kinds()
