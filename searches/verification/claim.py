"""The verdict on an export: its claim compared with a new measurement.

A configuration that drafts claims three things: to keep the output, to be faster than plain decoding, and to be as fast as
its evidence states, up to the difference between machines and days.

- ``confirmed``: all three hold.
- ``refuted``: something that noise cannot explain. The output changed, the interval lies wholly below plain decoding, the
  claim is further above the interval than machines differ, or the evidence contradicts itself.
- ``weaker``: everything else. This includes an interval that still contains 1 when the budget ends, and a claim above the
  interval if its evidence is of other prompts, since categories differ more than machines do.

A lossy configuration does not claim to keep the output and is ``weaker`` at best. A changed output refutes it only if its
evidence states that the output was kept on these prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from layerskip import Export, Measurement, PromptSet
from layerskip.measure.measurement import CONFIDENCE, LEAST_RESAMPLED
from searches.app.checks import InputError

_ROUNDING = 1e-6
_MAX_SPEEDUP_PER_TOKEN = 1.1
"""Highest ratio of speedup to tokens per round. Noise and other kernels may make a round slightly faster than a step."""
_TOLERATED_ERROR = 0.01
"""Share by which figures of one greedy measurement may differ, by rounding and by outputs that a near-tie ended."""
_TOLERATED_ROUNDS = 0.1
"""Share by which tokens per round may fall, if near-ties change the texts. The speed of a machine does not change them."""


@dataclass(frozen=True)
class Speedup:
    """A ratio of tokens/s to plain decoding's, with its 95 % interval, which holds for all looks at it together."""

    value: float
    low: float
    high: float

    @classmethod
    def measured(cls, measurement: Measurement, looks: int) -> Speedup:
        """Return the speedup of a measurement that any of several looks may end, which widens the interval (Bonferroni)."""
        return cls(measurement.speedup, *measurement.interval(confidence=1 - (1 - CONFIDENCE) / looks))

    @classmethod
    def claimed(cls, evidence: Mapping[str, Any]) -> Speedup | None:
        """Return the speedup in an export's evidence; None if there is none. A value without interval is its interval."""
        names = ("speedup", "speedup_low", "speedup_high")
        present = [name for name in names if evidence.get(name) is not None]
        if not present:
            return None
        if present == ["speedup"]:
            value = _number(evidence, "speedup")
            return cls(value, value, value)
        value, low, high = (_number(evidence, name) for name in names)
        if low > high:
            raise InputError(f"evidence.speedup_low: {low} is above speedup_high, {high}")
        return cls(value, low, high)

    @property
    def consistent(self) -> bool:
        """True if the value lies in its interval."""
        return self.low * (1 - _ROUNDING) <= self.value <= self.high * (1 + _ROUNDING)

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Claim:
    """The claim of an export.

    Args:
        speedup: the claimed speedup; None claims only to be faster than plain decoding.
        tokens_per_round: from its evidence, if stated. A round takes no less time than a step of plain decoding, so no
            speedup can exceed it.
        lossy: whether its acceptance rule may change the output.
        kept_output: whether its evidence states that the output was kept nevertheless.
        other_work: whether its evidence is of other held-out prompts than those measured now, or of another output length.
        repeatable: whether greedy decoding of the same prompts must give as many tokens per round, up to near-ties and to
            drafters that learn from prompts in another order.
        implied: names and speedups that follow from other figures of its evidence; empty if tokens are sampled, since the
            lengths of the outputs differ then.
    """

    speedup: Speedup | None = None
    tokens_per_round: float | None = None
    lossy: bool = False
    kept_output: bool = False
    other_work: bool = False
    repeatable: bool = False
    implied: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, export: Export, held_out: PromptSet, prompts: PromptSet, max_new_tokens: int) -> Claim:
        """Return the claim of an export.

        Evidence is of the same work if it is of all held-out prompts, of the measured ones, or of as many as it states.
        Evidence that does not name its prompts is assumed to be of the same work.

        Args:
            export: the export.
            held_out: all held-out prompts.
            prompts: those that are measured now.
            max_new_tokens: tokens per prompt and turn, as measured now.

        Raises:
            InputError: as :meth:`Speedup.claimed`.
        """
        evidence = export.evidence
        names = ("tokens_per_round", "losslessness", "prompts_digest", "prompts")
        per_round, output, prompts_digest, count = (evidence.get(name) for name in names)
        same_length = evidence.get("max_new_tokens", max_new_tokens) == max_new_tokens
        same_work = [held_out, prompts, *([held_out.take(count)] if type(count) is int else [])]
        is_same = prompts_digest is None or prompts_digest in [part.digest for part in same_work]
        return cls(
            Speedup.claimed(evidence),
            float(per_round) if isinstance(per_round, (int, float)) and not isinstance(per_round, bool) else None,
            lossy=not export.config.lossless,
            kept_output=isinstance(output, Mapping) and output.get("verdict") in ("exact", "near_tie"),
            other_work=not (same_length and is_same),
            repeatable=same_length and export.sampling.greedy and prompts_digest == prompts.digest,
            implied=_implied(evidence) if export.sampling.greedy else (),
        )

    @property
    def contradiction(self) -> str | None:
        """A contradiction within the evidence; None if there is none."""
        claimed, per_round = self.speedup, self.tokens_per_round
        if claimed is None:
            return None
        if not claimed.consistent:
            return f"the speedup {claimed} lies outside its own interval"
        if per_round is not None and claimed.value > _MAX_SPEEDUP_PER_TOKEN * per_round:
            return f"{claimed.value:.2f} x is more than {per_round:.2f} tokens per round allow"
        for name, value in self.implied:
            if abs(value / claimed.value - 1) > _TOLERATED_ERROR:
                return f"it states {claimed.value:.2f} x, but its {name} give {value:.2f} x"
        return None


@dataclass(frozen=True)
class Verdict:
    """A verdict with its reason in one sentence; it is not clear while further repeats may change it."""

    name: Literal["confirmed", "weaker", "refuted"]
    reason: str
    clear: bool = True


def judge(
    claim: Claim,
    measured: Speedup,
    losslessness: str,
    tolerance: float,
    tokens_per_round: float | None = None,
    prompts: int = LEAST_RESAMPLED,
) -> Verdict:
    """Compare a claim with a new measurement.

    Args:
        claim: of the export.
        measured: the new speedup.
        losslessness: verdict of :class:`layerskip.measure.losslessness.Losslessness` on the new outputs.
        tolerance: share of the claimed speedup that machines and days may differ by, in [0, 1).
        tokens_per_round: the new ones; None skips their comparison.
        prompts: the number of prompts that the new speedup rests on.
    """
    claimed = claim.speedup
    if losslessness == "different" and (not claim.lossy or (claim.kept_output and not claim.other_work)):
        return Verdict("refuted", "the output differs from plain decoding.")
    if losslessness not in ("exact", "near_tie", "different"):
        reason = "every output ended with its first token, so that nothing was compared with plain decoding."
        return Verdict("weaker", reason, clear=False)
    if claim.contradiction is not None:
        return Verdict("refuted", f"the evidence contradicts itself: {claim.contradiction}.")
    per_round = claim.tokens_per_round if claim.repeatable else None
    if per_round is not None and tokens_per_round is not None and tokens_per_round < per_round * (1 - _TOLERATED_ROUNDS):
        rounds = f"{per_round:.2f} tokens per round claimed, {tokens_per_round:.2f} measured on the same prompts"
        return Verdict("refuted", f"{rounds}; the machine cannot cause this difference.")
    if 0 < prompts < LEAST_RESAMPLED:
        few = f"the outputs of only {prompts} prompts go on after their first token; {LEAST_RESAMPLED} are the least."
        return Verdict("weaker", few, clear=False)
    found = f"measured {measured}"
    if claim.other_work:
        found += " on other prompts or lengths than the evidence's (prompts= and measure.max_new_tokens= choose them)"
    if measured.high < 1:
        return Verdict("refuted", f"slower than plain decoding: {found}.")
    if claimed is not None and measured.high < claimed.low * (1 - tolerance) and not claim.other_work:
        return Verdict("refuted", f"the claim is out of reach: {found}, claimed {claimed}.")
    if measured.low <= 1:
        return Verdict("weaker", f"not significantly faster than plain decoding: {found}.", clear=False)
    if claim.lossy:
        output = losslessness.replace("_", "-")
        return Verdict("weaker", f"faster than plain decoding, but lossy (the output here: {output}): {found}.")
    if claimed is None:
        return Verdict("confirmed", f"faster than plain decoding, as claimed: {found}.")
    if measured.high < claimed.low:
        return Verdict("weaker", f"faster than plain decoding, but less than claimed: {found}, claimed {claimed}.")
    if measured.value < claimed.value * (1 - tolerance):
        # Few or mixed prompts give intervals that are wide enough for nearly any claim.
        reason = f"faster than plain decoding, but more than {tolerance:.0%} below the claim"
        return Verdict("weaker", f"{reason}: {found}, claimed {claimed}.", clear=False)
    return Verdict("confirmed", f"{found}, claimed {claimed}.")


def judge_plain(claim: Speedup | None) -> Verdict:
    """Return the verdict on an export without drafting, which needs no measurement."""
    if claim is not None and not (claim.consistent and abs(claim.value - 1) <= _ROUNDING):
        return Verdict("refuted", f"the evidence contradicts itself: it states a speedup of {claim} for plain decoding.")
    return Verdict("confirmed", "no drafting is plain decoding itself: its output cannot differ, nothing is measured.")


def _implied(evidence: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Return the speedups that follow from rates, and from seconds if both outputs were the same tokens."""
    pairs = {"tokens per second": ("tokens_per_second", "baseline_tokens_per_second")}
    output = evidence.get("losslessness")
    if isinstance(output, Mapping) and output.get("verdict") == "exact":
        pairs["seconds"] = ("baseline_decode_seconds", "decode_seconds")
    figures = {name: [evidence.get(field) for field in fields] for name, fields in pairs.items()}
    return tuple((name, one / other) for name, (one, other) in figures.items() if _is_positive(one) and _is_positive(other))


def _is_positive(value: object) -> TypeGuard[float]:
    """Return whether a value is a number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value)


def _number(evidence: Mapping[str, Any], name: str) -> float:
    value = evidence.get(name)
    if value is None:
        raise InputError(f"evidence.{name}: is missing; a speedup needs both ends of an interval, or none")
    if not _is_positive(value):
        raise InputError(f"evidence.{name}: {value!r} is not a number above 0")
    return float(value)
