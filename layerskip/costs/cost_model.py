"""The cost model: seconds of the parts of a round on one machine, and the predicted speedup of any configuration.

A round costs its drafted tokens and one verification (arXiv 2211.17192, theorem 3.8). A draft pass costs the sum of what it
runs: the head, which includes everything that every pass does, each kept attention and MLP sub-layer, and the rest of each
block. Verification is a curve over the number of drafted tokens, measured instead of assumed flat. Every key in the cache
adds the same to the time of an attention sub-layer, so costs at the mean context are the mean costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from layerskip.config import StopRule
from layerskip.draft_plan import BITS, NAMES, SKIP, DraftPlan
from layerskip.scan.replay import Counts


@dataclass(frozen=True)
class CostProfile:
    """Seconds of all parts of decoding, for one target on one device in one dtype."""

    context: int  # positions in the cache during the measurement
    head_seconds: float  # a draft pass with every sub-layer skipped
    block_seconds: float  # a block that is not skipped whole, without its sub-layers
    attention_seconds: tuple[float, ...]  # by layer
    mlp_seconds: tuple[float, ...]  # by layer
    confidence_seconds: float  # computing the draft's confidence in a token, for a stop rule
    round_seconds: float  # fixed cost of drafting with a model in a round, beside its draft passes and verification
    verify_seconds: tuple[float, ...]  # entry g: verifying g drafted tokens; entry 0 is a step of plain decoding
    shares: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """By format of :data:`layerskip.draft_plan.BITS`, the share of these seconds that head, attention and MLP take in it."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, parts: Mapping[str, Any]) -> CostProfile:
        """Return the profile of a dictionary from :meth:`to_dict`, which may have been JSON."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in parts.items()}
        values["shares"] = {name: tuple(shares) for name, shares in values.get("shares", {}).items()}
        return cls(**values)

    def times(self, plan: DraftPlan) -> bool:
        """Return whether all formats of a plan were timed."""
        return {NAMES[bits] for bits in plan.formats} <= self.shares.keys()

    def draft_seconds(self, plan: DraftPlan) -> float:
        """Return the seconds of a draft pass; a ``KeyError`` if a format of the plan was not timed."""
        pairs, seconds = zip(plan.attention, plan.mlp, strict=True), self.head_seconds * self._share(plan.head_bits, 0)
        seconds += self.block_seconds * sum(not (attention and mlp) for attention, mlp in pairs)
        for kind, costs in (("attention", self.attention_seconds), ("mlp", self.mlp_seconds)):
            seconds += sum(self.seconds_at(kind, layer, plan.treatment(kind, layer)) for layer in range(len(costs)))
        return seconds

    def seconds_at(self, kind: str, layer: int, treatment: str) -> float:
        """Return the seconds of the attention or MLP of a layer: as it is stored, skipped, or in a format."""
        if treatment == SKIP:
            return 0.0
        costs = self.attention_seconds if kind == "attention" else self.mlp_seconds
        return costs[layer] * self._share(BITS[treatment], 1 if kind == "attention" else 2)

    def _share(self, bits: int, part: int) -> float:
        return self.shares[NAMES[bits]][part] if bits else 1.0

    def seconds(self, counts: Counts, mask: DraftPlan, stop: StopRule) -> float:
        """Return the seconds of a decoding with these counts. A stop rule other than ``length`` computes confidences.

        Raises:
            ValueError: the counts have more tokens verified at once than were measured.
        """
        if len(counts.verified) > len(self.verify_seconds):
            raise ValueError(f"verified: {len(counts.verified) - 1} tokens at once; the profile ends at {self.longest}")
        each = self.draft_seconds(mask) + (self.confidence_seconds if stop.method != "length" else 0.0)
        return counts.drafted * each + sum(counts.verified[1:]) * self.round_seconds + self._verification(counts)

    def speedup(self, counts: Counts, mask: DraftPlan, stop: StopRule) -> float:
        """Return the predicted speedup over plain decoding."""
        return counts.tokens * self.verify_seconds[0] / self.seconds(counts, mask, stop)

    def lookup_speedup(self, counts: Counts) -> float:
        """Return the predicted speedup of a drafter without a model, whose drafts cost next to nothing."""
        return counts.tokens * self.verify_seconds[0] / self._verification(counts)

    def _verification(self, counts: Counts) -> float:
        return sum(times * cost for times, cost in zip(counts.verified, self.verify_seconds, strict=False))

    def round_cost(self, mask: DraftPlan, num_speculative_tokens: int) -> float:
        """Return the seconds of a round that drafts ``num_speculative_tokens`` tokens with a mask and verifies them."""
        drafting = num_speculative_tokens * self.draft_seconds(mask) + self.round_seconds
        return drafting + self.verify_seconds[num_speculative_tokens]

    def speedup_bound(self, mask: DraftPlan) -> float:
        """Return the highest speedup of any draft length if every drafted token were accepted."""
        lengths = range(1, self.longest + 1)
        return max((1 + length) * self.verify_seconds[0] / self.round_cost(mask, length) for length in lengths)

    @property
    def longest(self) -> int:
        """The most drafted tokens whose verification was measured."""
        return len(self.verify_seconds) - 1


def in_steps(verify_seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the costs of verifying 1, 2, ... drafted tokens in steps of plain decoding (entry 0), to two decimals.

    They are at least 1.0, because a pass over more tokens reads the same weights. Less means that another program disturbed
    the timing of a step.
    """
    step, *others = verify_seconds
    return tuple(max(1.0, round(seconds / step, 2)) for seconds in others)
