"""The metrics of requests to an engine: start-up seconds, throughput and latencies.

``throughput`` is in tokens per second over all requests, ``ttft`` the seconds to the first token, ``tpot`` the seconds per
token after it, at the median and the 95th percentile. Under several numbers of requests in flight, names end with the
number, such as ``throughput_at_8``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from layerskip.measure.measurement import Request, Sample
from searches.backends.backend import BASELINE, CANDIDATE
from searches.backends.client import Completion
from searches.tracking.names import STARTUP_SECONDS


@dataclass
class RequestMetrics:
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
        """Return the metrics with flat names; those of a single configuration have no prefix."""
        others = [name for name in self.startup_seconds if name != BASELINE]
        prefixes = {name: "" if name == CANDIDATE or others == [name] else f"{name}_" for name in self.startup_seconds}
        found = {f"{prefixes[name]}{STARTUP_SECONDS}": seconds for name, seconds in self.startup_seconds.items()}
        several = len({concurrency for _, concurrency in self.completions}) > 1
        for (name, concurrency), answers in self.completions.items():
            suffix = f"_at_{concurrency}" if several else ""
            rate = sum(answer.count for answer in answers) / self.seconds[name, concurrency]
            first = [answer.first_seconds for answer in answers]
            later = [answer.seconds_per_token for answer in answers if answer.seconds_per_token is not None]
            found |= {f"{prefixes[name]}{key}{suffix}": value for key, value in _values(rate, first, later).items()}
        return found


def sample_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the throughput and the latencies of the requests of samples; empty if they have none.

    With a constant number of requests in flight, the throughput is that number times the tokens of all requests over their
    seconds (Little's law).
    """
    under: dict[int, list[Request]] = {}
    for request in (request for sample in samples for request in sample.requests):
        under.setdefault(request.concurrency, []).append(request)
    found: dict[str, float] = {}
    for concurrency, requests in under.items():
        suffix = f"_at_{concurrency}" if len(under) > 1 else ""
        seconds = sum(request.first_seconds + request.decode_seconds for request in requests)
        rate = concurrency * sum(request.tokens for request in requests) / seconds
        first = [request.first_seconds for request in requests]
        later = [request.decode_seconds / request.decoded_tokens for request in requests if request.decoded_tokens]
        found |= {f"{key}{suffix}": value for key, value in _values(rate, first, later).items()}
    return found


def _values(rate: float, first: Sequence[float], later: Sequence[float]) -> dict[str, float]:
    """Return the throughput, and the percentiles of the seconds to the first token and of those per token after it."""
    values = {"ttft": first, "tpot": later}
    return {"throughput": rate} | {
        f"{name}_p{percent}": float(np.percentile(values[name], percent))
        for name in values
        for percent in (50, 95)
        if values[name]
    }
