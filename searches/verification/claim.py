"""Does a claimed speedup hold? What an export says of itself against a new measurement: confirmed, weaker or refuted.

A configuration that drafts claims to change no output, to be faster than plain decoding, and to be as fast as its evidence
says, if it has any, but for what machines differ from day to day. All three have to hold for ``confirmed``. ``refuted`` is
kept for what no noise explains: an output that changed, an interval wholly below plain decoding, a claim further out of the
interval's reach than machines differ, evidence that contradicts itself. In between lies ``weaker``; an interval that still
has 1 inside when the budget ends is there too, since it speaks neither for nor against the claim. So is a claim out of reach
that is of other prompts, as kinds of work differ further than machines do.

A lossy configuration does not claim to keep the output, so it is ``weaker`` at best, whatever its output was here. A changed
one refutes it only where its evidence says that on these prompts it was kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from layerskip import Export, Measurement, PromptSet
from layerskip.measure.measurement import CONFIDENCE
from searches.app.checks import InputError

_ROUNDING = 1e-6
_MOST_PER_TOKEN = 1.1
"""A round may read a little faster than a step of plain decoding, by noise and by which kernels suit a block."""
_ALIKE = 0.01
"""Figures of one greedy measurement agree but for rounding, and for what a near-tie ended at once."""
_ROUNDS_ALIKE = 0.1
"""By how much tokens per round may fall where near-ties send texts another way: no pace of any machine changes them."""


@dataclass(frozen=True)
class Speedup:
    """A ratio of tokens/s over plain decoding's, and its interval, of 95 % over all looks at it together."""

    value: float
    low: float
    high: float

    @classmethod
    def measured(cls, measurement: Measurement, looks: int) -> Speedup:
        """A measurement's, where the first of so many looks may end the measuring (Bonferroni)."""
        return cls(measurement.speedup, *measurement.interval(confidence=1 - (1 - CONFIDENCE) / looks))

    @classmethod
    def claimed(cls, evidence: Mapping[str, Any]) -> Speedup | None:
        """What an export's evidence says; None where it says nothing. Without an interval the value is one.

        Raises:
            InputError: it is not a number above 0, or an interval is not whole.
        """
        names = ("speedup", "speedup_low", "speedup_high")
        given = [name for name in names if evidence.get(name) is not None]
        if not given:
            return None
        if given == ["speedup"]:
            value = _number(evidence, "speedup")
            return cls(value, value, value)
        value, low, high = (_number(evidence, name) for name in names)
        if low > high:
            raise InputError(f"evidence.speedup_low: {low} is above speedup_high, {high}")
        return cls(value, low, high)

    @property
    def consistent(self) -> bool:
        """Whether the value lies in its interval, as every measured one does."""
        return self.low * (1 - _ROUNDING) <= self.value <= self.high * (1 + _ROUNDING)

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Claim:
    """What an export says of itself.

    Args:
        speedup: None claims no more than being faster than plain decoding.
        tokens_per_round: of its evidence; None where it says nothing. A round takes no less time than a step of plain
            decoding, so no claim can be above it.
        lossy: whether its rule of acceptance may change the output.
        kept: whether its evidence says that the output was kept all the same.
        elsewhere: whether its evidence is of other held-out prompts than those that are measured now, or of outputs that
            might be longer or shorter.
        repeatable: whether greedy decoding of the very prompts of its evidence, as far, must come to as many tokens per
            round, but for near-ties, and for what learns from prompts in another order.
        implied: speedups that follow from other figures of its evidence, by what they follow from; none where tokens are
            sampled, as the two sides' outputs differ in length.
    """

    speedup: Speedup | None = None
    tokens_per_round: float | None = None
    lossy: bool = False
    kept: bool = False
    elsewhere: bool = False
    repeatable: bool = False
    implied: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, export: Export, held_out: PromptSet, prompts: PromptSet, max_new_tokens: int) -> Claim:
        """An export's, where some of these held-out prompts are measured now, so many tokens of each.

        Evidence of all of them, or of as many as it says that it took, is of the same work, whichever part is measured;
        evidence that does not say which it is of is taken to be.

        Raises:
            InputError: as :meth:`Speedup.claimed`.
        """
        said = export.evidence
        rate, output, named, count = (said.get(n) for n in ("tokens_per_round", "losslessness", "prompts_digest", "prompts"))
        as_far = said.get("max_new_tokens", max_new_tokens) == max_new_tokens
        same = [held_out, prompts, *([held_out.take(count)] if type(count) is int else [])]
        return cls(
            Speedup.claimed(said),
            float(rate) if isinstance(rate, (int, float)) and not isinstance(rate, bool) else None,
            lossy=not export.config.lossless,
            kept=isinstance(output, Mapping) and output.get("verdict") in ("exact", "near_tie"),
            elsewhere=not as_far or (named is not None and named not in [part.digest for part in same]),
            repeatable=as_far and export.sampling.greedy and named == prompts.digest,
            implied=_implied(said) if export.sampling.greedy else (),
        )

    @property
    def contradiction(self) -> str | None:
        """What of its evidence does not go together, whatever is measured now; None where all does."""
        said, per_round = self.speedup, self.tokens_per_round
        if said is None:
            return None
        if not said.consistent:
            return f"{said} is a speedup outside its own interval"
        if per_round is not None and said.value > _MOST_PER_TOKEN * per_round:
            return f"{said.value:.2f} x with {per_round:.2f} tokens per round, each of which verifies at least one"
        for name, value in self.implied:
            if abs(value / said.value - 1) > _ALIKE:
                return f"{said.value:.2f} x where its {name} make {value:.2f}"
        return None


@dataclass(frozen=True)
class Verdict:
    """What became of a claim.

    Args:
        name: which of the three.
        reason: why, in one sentence.
        clear: whether more repeats are not needed, as the interval lies on one side of whatever it is compared with.
    """

    name: Literal["confirmed", "weaker", "refuted"]
    reason: str
    clear: bool = True


def judge(
    claim: Claim, found: Speedup, losslessness: str, tolerance: float, tokens_per_round: float | None = None
) -> Verdict:
    """Compare a claim with a new measurement.

    Args:
        claim: what its export says.
        found: what was measured now.
        losslessness: its verdict, as in :class:`layerskip.measure.losslessness.Losslessness`.
        tolerance: the share of a claim that machines may differ by from day to day, in [0, 1).
        tokens_per_round: measured now, if they were.
    """
    said = claim.speedup
    if losslessness == "different" and (not claim.lossy or (claim.kept and not claim.elsewhere)):
        return Verdict("refuted", "the output is not that of plain decoding.")
    if losslessness not in ("exact", "near_tie", "different"):
        return Verdict("weaker", "no output was compared with that of plain decoding.", clear=False)
    if claim.contradiction is not None:
        return Verdict("refuted", f"the evidence contradicts itself: {claim.contradiction}.")
    said_rounds = claim.tokens_per_round if claim.repeatable else None
    if said_rounds is not None and tokens_per_round is not None and tokens_per_round < said_rounds * (1 - _ROUNDS_ALIKE):
        rounds = f"{said_rounds:.2f} tokens per round claimed, {tokens_per_round:.2f} on the same prompts now"
        return Verdict("refuted", f"{rounds}, which no machine changes.")
    measured = f"measured {found}"
    if claim.elsewhere:
        measured += " on other prompts or lengths than the evidence's (prompts= and measure.max_new_tokens= choose them)"
    if found.high < 1:
        return Verdict("refuted", f"slower than plain decoding: {measured}.")
    if said is not None and found.high < said.low * (1 - tolerance) and not claim.elsewhere:
        return Verdict("refuted", f"the claim is out of reach: {measured}, claimed {said}.")
    if found.low <= 1:
        return Verdict("weaker", f"it cannot be told from plain decoding: {measured}.", clear=False)
    if claim.lossy:
        output = losslessness.replace("_", "-")
        return Verdict("weaker", f"faster than plain decoding, but lossy (the output here: {output}): {measured}.")
    if said is None:
        return Verdict("confirmed", f"faster than plain decoding, as claimed: {measured}.")
    if found.high < said.low:
        return Verdict("weaker", f"faster than plain decoding, but less than claimed: {measured}, claimed {said}.")
    if found.value < said.value * (1 - tolerance):
        # Few or mixed prompts make intervals so wide that they reach nearly any claim.
        reason = f"faster than plain decoding, but short of the claim by more than {tolerance:.0%}"
        return Verdict("weaker", f"{reason}: {measured}, claimed {said}.", clear=False)
    return Verdict("confirmed", f"{measured}, claimed {said}.")


def judge_plain(claim: Speedup | None) -> Verdict:
    """The verdict on an export without drafting: there is nothing to measure, plain decoding is what it is compared with."""
    if claim is not None and not (claim.consistent and abs(claim.value - 1) <= _ROUNDING):  # so its interval has 1 inside
        return Verdict("refuted", f"the evidence contradicts itself: plain decoding at {claim} times its own speed.")
    return Verdict("confirmed", "no drafting is plain decoding itself: its output cannot differ, nothing is measured.")


def _implied(evidence: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Speedups that other figures give: rates always, seconds where both sides gave the same tokens."""
    pairs = {"tokens per second": ("tokens_per_second", "baseline_tokens_per_second")}
    output = evidence.get("losslessness")
    if isinstance(output, Mapping) and output.get("verdict") == "exact":
        pairs["seconds"] = ("baseline_decode_seconds", "decode_seconds")
    found = {name: [evidence.get(field) for field in fields] for name, fields in pairs.items()}
    return tuple((name, one / other) for name, (one, other) in found.items() if _is_above(one) and _is_above(other))


def _is_above(value: object) -> TypeGuard[float]:
    """Whether a value is a number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value)


def _number(evidence: Mapping[str, Any], name: str) -> float:
    value = evidence.get(name)
    if value is None:
        raise InputError(f"evidence.{name}: is missing; a speedup has a value and both ends of an interval, or no interval")
    if not _is_above(value):
        raise InputError(f"evidence.{name}: {value!r} is not a number above 0")
    return float(value)
