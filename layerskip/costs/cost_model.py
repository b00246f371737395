"""What does a round of decoding take? The time of its parts, and what follows from them for any configuration.

Speculative decoding pays for a round with its drafted tokens and one verification (arXiv 2211.17192, theorem 3.8). What a
draft pass takes is the sum of what it keeps: the head with everything that every pass does, each attention and MLP
sub-layer, and what a block does around them. What a verification takes is a curve over its drafted tokens, measured and not
assumed to be flat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerskip.config import StopRule
from layerskip.mask import SkipMask
from layerskip.models.bridge import BridgeShape
from layerskip.scan.replay import Counts
from layerskip.scan.trace import CHAIN, Branching


@dataclass(frozen=True)
class Aids:
    """What a draft has beside the sub-layers that it keeps.

    Args:
        bridges: how many stand in for skipped ones.
        numbers: that a pass reads for all of them together.
        left_out: tokens that are never drafted.
        maps: how many of the bridges look at what they are given, which means do not.
    """

    bridges: int = 0
    numbers: int = 0
    left_out: int = 0
    maps: int = 0

    @classmethod
    def of(cls, shape: BridgeShape | None, left_out: int = 0) -> Aids:
        """Those of a mask's bridges, and of a draft head."""
        if shape is None:
            return cls(left_out=left_out)
        return cls(shape.spans, shape.numbers, left_out, shape.spans if shape.kind != "mean" else 0)


NO_AIDS = Aids()
"""Empty skips, and the whole vocabulary."""


@dataclass(frozen=True)
class CostProfile:
    """Seconds of everything that decoding is made of, for one target on one device in one dtype.

    Args:
        context: how many positions the cache held.
        head_seconds: a draft pass with every sub-layer skipped.
        block_seconds: what a block that is not skipped whole adds beside its sub-layers.
        attention_seconds: every layer's attention.
        mlp_seconds: every layer's MLP.
        confidence_seconds: reading how sure a draft is of a token, which a stop rule does.
        round_seconds: what a round takes for having drafted with a model at all, beside its draft passes and verification.
        verify_seconds: entry g: verifying g drafted tokens; entry 0 is a step of plain decoding.
        bridge_seconds: what a bridge takes for being there at all.
        number_seconds: what each number that bridges read adds.
        token_seconds: what the output layer takes for each token of the vocabulary.
        siblings_seconds: what a drafted token takes for having its siblings looked for, and put beside it if there are any.
        tree_seconds: what verifying a tree takes beside what as many tokens of a chain would.
        map_seconds: what a bridge that looks at what it is given takes beside ``bridge_seconds``.
    """

    context: int
    head_seconds: float
    block_seconds: float
    attention_seconds: tuple[float, ...]
    mlp_seconds: tuple[float, ...]
    confidence_seconds: float
    round_seconds: float
    verify_seconds: tuple[float, ...]
    bridge_seconds: float = 0.0
    number_seconds: float = 0.0
    token_seconds: float = 0.0
    siblings_seconds: float = 0.0
    tree_seconds: float = 0.0
    map_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> CostProfile:
        """The profile that :meth:`to_dict` wrote."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**values)

    def draft_seconds(self, mask: SkipMask, aids: Aids = NO_AIDS) -> float:
        """One draft pass with a mask."""
        pairs = list(zip(mask.attention, mask.mlp, strict=True))
        return (
            max(0.0, self.head_seconds - self.token_seconds * aids.left_out)
            + self.bridge_seconds * aids.bridges
            + self.map_seconds * aids.maps
            + self.number_seconds * aids.numbers
            + self.block_seconds * sum(not (attention and mlp) for attention, mlp in pairs)
            + sum(cost for cost, (skipped, _) in zip(self.attention_seconds, pairs, strict=True) if not skipped)
            + sum(cost for cost, (_, skipped) in zip(self.mlp_seconds, pairs, strict=True) if not skipped)
        )

    def saved_seconds(self, kind: str) -> tuple[float, ...]:
        """What skipping each layer's sub-layer of a kind, ``attention`` or ``mlp``, takes off a draft pass."""
        return self.attention_seconds if kind == "attention" else self.mlp_seconds

    def seconds(
        self, counts: Counts, mask: SkipMask, stop: StopRule, aids: Aids = NO_AIDS, branching: Branching = CHAIN
    ) -> float:
        """What decoding takes that is so counted. Who asks for siblings pays for looking, whether any are found or not.

        Raises:
            ValueError: it verifies more tokens at once than were measured.
        """
        if len(counts.verified) > len(self.verify_seconds):
            raise ValueError(f"verified: {len(counts.verified) - 1} tokens at once; the profile ends at {self.longest}")
        each = self.draft_seconds(mask, aids) + (self.confidence_seconds if stop.kind != "length" else 0.0)
        each += self.siblings_seconds if branching.siblings else 0.0
        drafting = (counts.drafted - counts.beside) * each + counts.trees * self.tree_seconds
        return drafting + sum(counts.verified[1:]) * self.round_seconds + self._verifying(counts)

    def speedup(
        self, counts: Counts, mask: SkipMask, stop: StopRule, aids: Aids = NO_AIDS, branching: Branching = CHAIN
    ) -> float:
        """Predicted speedup over plain decoding; 1.0 where nothing is decoded."""
        if not counts.tokens:
            return 1.0
        return counts.tokens * self.verify_seconds[0] / self.seconds(counts, mask, stop, aids, branching)

    def lookup_speedup(self, counts: Counts) -> float:
        """The same for a drafter that runs no model, whose drafts cost next to nothing beside their verification."""
        return counts.tokens * self.verify_seconds[0] / self._verifying(counts) if counts.tokens else 1.0

    def _verifying(self, counts: Counts) -> float:
        return sum(times * cost for times, cost in zip(counts.verified, self.verify_seconds, strict=False))

    def round(self, mask: SkipMask, draft_length: int, aids: Aids = NO_AIDS) -> float:
        """A round that drafts with a mask, and verifies what it drafted."""
        return draft_length * self.draft_seconds(mask, aids) + self.round_seconds + self.verify_seconds[draft_length]

    def bound(self, mask: SkipMask, aids: Aids = NO_AIDS) -> float:
        """The speedup that no draft length can beat even if every drafted token were accepted."""
        return max((1 + g) * self.verify_seconds[0] / self.round(mask, g, aids) for g in range(1, self.longest + 1))

    @property
    def longest(self) -> int:
        """The most drafted tokens whose verification was measured."""
        return len(self.verify_seconds) - 1

    @property
    def verify_cost(self) -> tuple[float, ...]:
        """What verifying 1, 2, ... drafted tokens takes, in steps of plain decoding."""
        return in_steps(self.verify_seconds)


def in_steps(verify_seconds: Sequence[float]) -> tuple[float, ...]:
    """What verifying 1, 2, ... drafted tokens takes, to two decimals, in what verifying none does."""
    step, *others = verify_seconds
    return tuple(round(seconds / step, 2) for seconds in others)
