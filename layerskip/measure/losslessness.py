"""The check whether drafting changed the output.

In float32 the tokens must be equal. In half precision a block of tokens and a single token run different kernels, so two
nearly equal logits may change places. The target then judges the first different token in one more pass over the common
prefix: if both tokens are its most likely one up to rounding, the difference is a near-tie, which is counted and shown. If
not, the output was changed and the measurement fails its check.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from layerskip.decoding.sampling import Sampling
from layerskip.device.transfer import copy_to_device
from layerskip.models.cache import KVCache
from layerskip.models.prefill import run_prefill
from layerskip.models.target import Target

NEAR_TIE_ULPS = 4
"""In half precision, logits that differ by at most so many rounding steps of the largest logit count as equal."""

_ENDS = 1e9
"""The margin if one output ends before the other: rounding does not explain it, and JSON has no infinity."""


@dataclass(frozen=True)
class Divergence:
    """The first difference between two greedy outputs of one prompt."""

    prompt_id: str
    position: int  # index of the first new token that differs
    margin: float  # how far the lower of the two tokens' logits is below the largest logit
    tolerance: float  # the largest margin that rounding explains; 0 between decoders of this library in float32
    largest_logit: float = 0.0  # in magnitude, where they differ

    @property
    def near_tie(self) -> bool:
        """True if rounding explains the difference."""
        return self.margin <= self.tolerance and self.tolerance > 0


@dataclass(frozen=True)
class Losslessness:
    """The result of comparing the outputs of one measurement."""

    compared: int
    divergences: tuple[Divergence, ...] = ()
    basis: str = "measured outputs"  # those that were compared; if these are sampled, greedy ones made for the check

    @property
    def verdict(self) -> str:
        """``exact``, ``near_tie`` (only near-ties differ), ``different``, or ``unchecked``."""
        if not (self.compared and self.divergences):
            return "exact" if self.compared else "unchecked"
        return "near_tie" if all(d.near_tie for d in self.divergences) else "different"

    def judged_in(self, dtype: torch.dtype) -> Losslessness:
        """Return the comparison with a decoder that computes in another data type, whose rounding explains more."""
        steps = NEAR_TIE_ULPS * torch.finfo(dtype).eps
        judged = (replace(each, tolerance=max(each.tolerance, steps * each.largest_logit)) for each in self.divergences)
        return replace(self, divergences=tuple(judged))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for exports and logs; ``tolerance`` is that of the divergence with the largest margin."""
        worst = max(self.divergences, key=lambda divergence: divergence.margin, default=None)
        return {
            "verdict": self.verdict,
            "basis": self.basis,
            "compared": self.compared,
            "near_ties": sum(d.near_tie for d in self.divergences),
            "different": sum(not d.near_tie for d in self.divergences),
            "largest_margin": 0.0 if worst is None else worst.margin,
            "tolerance": 0.0 if worst is None else worst.tolerance,
        }

    @classmethod
    def join(cls, parts: Iterable[Losslessness]) -> Losslessness:
        """Return one result for several measurements."""
        parts = list(parts)
        return cls(
            sum(part.compared for part in parts),
            tuple(d for part in parts for d in part.divergences),
            next((part.basis for part in parts if part.compared), "measured outputs"),
        )


@torch.inference_mode()
def find_divergence(
    target: Target,
    prompt_id: str,
    prompt: Sequence[int],
    expected: Sequence[int],
    actual: Sequence[int],
    sampling: Sampling,
) -> Divergence | None:
    """Compare two greedy continuations of a prompt, and let the target judge the first difference.

    Args:
        sampling: greedy, with the repetition penalty of both.
    """
    if list(expected) == list(actual):
        return None
    shorter, pairs = min(len(expected), len(actual)), enumerate(zip(expected, actual, strict=False))
    position = next((place for place, (one, other) in pairs if one != other), shorter)
    if position == shorter:
        return Divergence(prompt_id, position, _ENDS, 0.0)  # one output ends before the other
    block = copy_to_device([*prompt, *expected[:position]], target.device)
    cache = KVCache(target.layers, len(block), device=target.device)
    logits = run_prefill(target.model, block, cache).float()
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=target.device).index_fill_(1, block, True)
    scores = sampling.penalise(logits, seen)[0]
    margin = float(scores.max() - scores[[expected[position], actual[position]]].min())
    half, largest = target.model.dtype != torch.float32, float(scores.max().abs())
    tolerance = NEAR_TIE_ULPS * torch.finfo(target.model.dtype).eps * largest if half else 0.0
    return Divergence(prompt_id, position, margin, tolerance, largest)
