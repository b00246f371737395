"""When does a drafter that knows its confidence stop early?

A fixed threshold, or the adaptive one of Draft & Verify (arXiv 2309.08168), section 3.3. The token whose confidence fell
below the threshold stays in the draft: it has been drafted by then, and verifying one more token costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip.config import StopRule

_ROWS = 8


def confidence(logits: Tensor) -> Tensor:
    """``[n]`` float32 of ``[n, V]`` logits: the probability of each row's most likely token."""
    return torch.cat([part.float().softmax(-1).amax(-1) for part in portions(logits)])


def portions(rows: Tensor) -> Sequence[Tensor]:
    """``[n, ...]`` in parts: on a CPU few rows at a time, as what they unfold to then stays in its caches."""
    at_once = _ROWS if rows.device.type == "cpu" else max(1, rows.shape[0])
    return [rows[first : first + at_once] for first in range(0, max(1, rows.shape[0]), at_once)]


class Stopped:
    """A drafter whose drafts a stop rule ends."""

    stopper: Stopper

    @property
    def learns(self) -> bool:
        """Whether an adaptive stop rule carries on."""
        return self.stopper.rule.kind == "adaptive" and self.stopper.rule.carry

    def forget(self) -> None:
        """Drop what an adaptive stop rule carried on."""
        self.stopper.forget()


class Stopper:
    """Applies one stop rule over the rounds of a decoding, and over several where the rule carries on."""

    def __init__(self, rule: StopRule) -> None:
        self.rule = rule
        self.forget()

    def forget(self) -> None:
        """Be where the rule begins."""
        self.threshold = self.rule.threshold
        self._acceptance_rate: float | None = None

    def start(self) -> None:
        """Begin a prompt."""
        if not self.rule.carry:
            self.forget()

    def stops(self, logits: Tensor) -> bool:
        """Whether drafting ends behind the token of these ``[1, V]`` logits. Reading the confidence waits for the device."""
        if self.rule.kind == "length":
            return False
        return self.stops_at(float(confidence(logits)))

    def stops_at(self, confident: float) -> bool:
        """Whether drafting ends behind a token of this confidence."""
        return self.rule.kind != "length" and confident < self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        """Let an adaptive threshold follow the acceptance rate of a round that drafted something."""
        rule = self.rule
        if rule.kind != "adaptive" or drafted == 0:
            return
        rate = accepted / drafted
        if self._acceptance_rate is not None:
            rate = rule.acceptance_decay * self._acceptance_rate + (1 - rule.acceptance_decay) * rate
        self._acceptance_rate = rate
        moved = self.threshold + (rule.step if rate <= rule.target_acceptance else -rule.step)
        smoothed = rule.threshold_decay * self.threshold + (1 - rule.threshold_decay) * moved
        self.threshold = min(1.0, max(0.0, smoothed))
