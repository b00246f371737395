"""The figures of a comparison beside its samples: start-up seconds, throughput and latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from searches.backends.backend import BASELINE, CANDIDATE
from searches.backends.client import Completion
from searches.tracking.names import STARTUP_SECONDS


@dataclass
class Figures:
    """Everything that a comparison decoded, by name and by the number of requests in flight.

    Args:
        startup_seconds: of each name's engine.
        completions: the answers of each name and number.
        seconds: in which these requests were served.
    """

    startup_seconds: dict[str, float] = field(default_factory=dict)
    completions: dict[tuple[str, int], list[Completion]] = field(default_factory=dict)
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)

    def add(self, name: str, concurrency: int, completions: Sequence[Completion], seconds: float) -> None:
        """Add answers that were given in so many seconds of real time, with so many requests in flight."""
        key = name, concurrency
        self.completions.setdefault(key, []).extend(completions)
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds

    def to_dict(self) -> dict[str, float]:
        """Return the figures with flat names.

        ``throughput`` is in tokens per second over all requests, ``ttft`` the seconds to the first token, ``tpot`` the
        seconds per token after it. The names of a single configuration have no prefix. Under several numbers of requests in
        flight, names end with the number, such as ``throughput_at_8``.
        """
        others = [name for name in self.startup_seconds if name != BASELINE]
        prefixes = {name: "" if name == CANDIDATE or others == [name] else f"{name}_" for name in self.startup_seconds}
        found = {f"{prefixes[name]}{STARTUP_SECONDS}": seconds for name, seconds in self.startup_seconds.items()}
        several = len({concurrency for _, concurrency in self.completions}) > 1
        for (name, concurrency), answers in self.completions.items():
            suffix = f"_at_{concurrency}" if several else ""
            rate = sum(answer.count for answer in answers) / self.seconds[name, concurrency]
            found[f"{prefixes[name]}throughput{suffix}"] = rate
            latencies = {
                "ttft": [answer.first_seconds for answer in answers],
                "tpot": [answer.seconds_per_token for answer in answers if answer.seconds_per_token is not None],
            }
            for latency, values in latencies.items():
                for percent in (50, 95) if values else ():
                    found[f"{prefixes[name]}{latency}_p{percent}{suffix}"] = float(np.percentile(values, percent))
        return found
