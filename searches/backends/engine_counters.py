"""The counters of drafted and accepted tokens that vLLM publishes under ``/metrics``, and the rounds that they tell of.

The names are those of vLLM 0.32, ``vllm/v1/spec_decode/metrics.py``. A step in which a request has no draft is not counted
there; such steps follow from the number of tokens.
"""

from __future__ import annotations

import heapq
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from layerskip.decoding.stats import DecodeStats, Round

_LINE = re.compile(r"^vllm:spec_decode_num_(\w+?)_total(?:\{(.*)\})? ([\d.e+]+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Counters:
    """Counts since an engine started.

    Args:
        drafts: rounds with a draft.
        drafted: tokens drafted in them.
        accepted: tokens accepted.
        by_position: entry i: rounds that accepted more than i tokens.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    @classmethod
    def parse(cls, page: str) -> Counters | None:
        """Read a page in Prometheus' text format; None if it has no such counters, as those of other engines.

        Counters of several engines behind one server are added up.
        """
        totals = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
        positions: dict[int, int] = {}
        lines = _LINE.findall(page)
        for name, labels, value in lines:
            position = _POSITION.search(labels)
            if name in totals:
                totals[name] += int(float(value))
            elif name == "accepted_tokens_per_pos" and position is not None:
                place = int(position[1])
                positions[place] = positions.get(place, 0) + int(float(value))
        by_position = tuple(positions.get(place, 0) for place in range(max(positions, default=-1) + 1))
        return cls(totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], by_position) if lines else None

    def since(self, before: Counters) -> Counters:
        """Return the counts after an earlier reading."""
        earlier = before.by_position + (0,) * (len(self.by_position) - len(before.by_position))
        return Counters(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.by_position, earlier, strict=False)),
        )

    def rounds(self, decoded: int) -> list[Round]:
        """Return rounds with these counts: accepted tokens as counted, drafts as equally long as they can be.

        Args:
            decoded: number of tokens that decoding gave; those beyond the counted rounds were decoded one by one. A last
                round may have accepted more than was asked for, and the surplus is taken from the longest ones.
        """
        reached = (self.drafts, *self.by_position, 0)
        lengths = enumerate(itertools.pairwise(reached))
        accepted = [length for length, (at_least, more) in lengths for _ in range(at_least - more)][::-1]
        sizes = _even(accepted, self.drafted)
        surplus = max(0, sum(accepted) + len(accepted) - decoded)
        rounds = []
        for size, length in zip(sizes, accepted, strict=True):
            cut = min(surplus, length)
            surplus -= cut
            rounds.append(Round(size, length, length + 1 - cut))
        plain = decoded - sum(each.committed for each in rounds)
        return rounds + [Round(0, 0, 1)] * max(0, plain)


def _even(least: Sequence[int], total: int) -> list[int]:
    """Return numbers with a sum, at least as large as these and as equal as possible: drafts are mostly of one length."""
    sizes = [(size, place) for place, size in enumerate(least)]
    heapq.heapify(sizes)
    for _ in range(total - sum(least) if sizes else 0):
        size, place = sizes[0]
        heapq.heapreplace(sizes, (size + 1, place))
    return [size for size, _ in sorted(sizes, key=lambda pair: pair[1])]


def spread(rounds: Sequence[Round], decoded: Sequence[int]) -> list[DecodeStats]:
    """Deal the rounds of several requests to them, in proportion to their tokens.

    Counters do not tell requests that are served together apart, so only the sum over them is measured.

    Args:
        rounds: of all requests.
        decoded: number of tokens of each request.
    """
    mixed = random.Random(0).sample(list(rounds), len(rounds))  # else the first requests would get all accepted drafts
    total, places, so_far = sum(decoded), [0], 0
    for tokens in decoded:
        so_far += tokens
        places.append(round(len(mixed) * so_far / total) if total else 0)
    return [DecodeStats(tuple(mixed[low:high])) for low, high in itertools.pairwise(places)]
