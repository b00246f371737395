"""The figures of a comparison beside its samples: start-up seconds, throughput and latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from searches.backends.backend import BASELINE, CANDIDATE
from searches.backends.client import Completion


@dataclass
class Figures:
    """Everything that a comparison decoded, by name.

    Args:
        startup_seconds: of each name's engine.
        completions: the answers of each name.
        seconds: in which the requests of each name were served.
    """

    startup_seconds: dict[str, float] = field(default_factory=dict)
    completions: dict[str, list[Completion]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, completions: Sequence[Completion], seconds: float) -> None:
        """Add answers that were given in so many seconds of real time."""
        self.completions.setdefault(name, []).extend(completions)
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def to_dict(self) -> dict[str, float]:
        """Return the figures with flat names.

        ``throughput`` is in tokens per second over all requests, ``ttft`` the seconds to the first token, ``tpot`` the
        seconds per token after it. The names of a single configuration have no prefix.
        """
        found: dict[str, float] = {}
        others = [name for name in self.startup_seconds if name != BASELINE]
        for name in self.startup_seconds:
            prefix = "" if name == CANDIDATE or others == [name] else f"{name}_"
            found[f"{prefix}startup_seconds"] = self.startup_seconds[name]
            answers = self.completions.get(name, [])
            if not answers:
                continue
            found[f"{prefix}throughput"] = sum(answer.count for answer in answers) / self.seconds[name]
            latencies = {
                "ttft": [answer.first_seconds for answer in answers],
                "tpot": [answer.seconds_per_token for answer in answers if answer.seconds_per_token is not None],
            }
            for latency, values in latencies.items():
                for percent in (50, 95) if values else ():
                    found[f"{prefix}{latency}_p{percent}"] = float(np.percentile(values, percent))
        return found
