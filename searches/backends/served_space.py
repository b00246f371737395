"""The search space of a server that runs already: plain decoding, and the one configuration that it drafts with."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import optuna

from layerskip import SpeculativeConfig
from searches.space.choices import Params
from searches.space.search_space import SearchSpace


@dataclass(frozen=True)
class ServedSpace(SearchSpace):
    """A space of one configuration beside plain decoding.

    Args:
        served: the configuration.
    """

    served: SpeculativeConfig = field(default=SpeculativeConfig(), metadata={"runtime": True})

    @classmethod
    def of(cls, space: SearchSpace, served: SpeculativeConfig) -> ServedSpace:
        """Return the space with nothing but a configuration, if it has its kind."""
        return cls(**{each.name: getattr(space, each.name) for each in fields(SearchSpace)}, served=served)

    def suggest(self, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
        """Return the configuration that a trial proposes."""
        kind = trial.suggest_categorical("kind", self.available_kinds)
        return self.served if kind == self.served.kind else SpeculativeConfig()

    def params(self, config: SpeculativeConfig) -> Params:
        """Return the choices that lead to a configuration of this kind."""
        return {"kind": config.kind}

    def lookups(self) -> list[SpeculativeConfig]:
        """Return the configuration if it is a prompt lookup; an empty list otherwise."""
        return [self.served] if self.served.kind == "prompt_lookup" else []
