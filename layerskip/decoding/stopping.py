"""Stop rules, by which a drafter ends a draft early because its confidence is low.

Either a fixed threshold, or the adaptive one of Draft & Verify (arXiv 2309.08168), section 3.3. The token whose confidence
fell below the threshold stays in the draft: it is drafted already, and verifying one more token costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip.config import StopRule
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.verify import Verdict
from layerskip.device.transfer import read_to_host
from layerskip.kernels.cpu import find_likeliest

_ROWS = 8
# Of the adaptive rule, as in the paper:
_TARGET_ACCEPTANCE = 0.9
_STEP = 0.01  # of the threshold in a round, before it is smoothed
_ACCEPTANCE_DECAY = 0.5  # weight of the past in the acceptance rate
_THRESHOLD_DECAY = 0.9  # weight of the past in the threshold


def confidence(logits: Tensor) -> Tensor:
    """Return ``[n]`` float32 for ``[n, V]`` logits: the probability of each row's most likely token."""
    found = find_likeliest(logits.float(), with_probabilities=True)
    return torch.cat([part.float().softmax(-1).amax(-1) for part in portions(logits)]) if found is None else found[1]


def portions(rows: Tensor) -> Sequence[Tensor]:
    """Return ``[n, ...]`` rows in parts; on a CPU few rows at a time, so that intermediate results stay in its caches."""
    size = _ROWS if rows.device.type == "cpu" else max(1, rows.shape[0])
    return [rows[first : first + size] for first in range(0, max(1, rows.shape[0]), size)]


class Stopper:
    """A stop rule over the rounds of all prompts."""

    def __init__(self, rule: StopRule) -> None:
        self.rule = rule
        self.reset()

    def reset(self) -> None:
        """Return to the rule's initial threshold."""
        self.threshold = self.rule.threshold
        self._acceptance_rate: float | None = None

    def stops(self, logits: Tensor) -> bool:
        """Return whether the draft ends after the token of these ``[1, V]`` logits; waits for the device."""
        if self.rule.method == "length":
            return False
        ((value,),) = read_to_host(confidence(logits))
        return bool(value < self.threshold)

    def observe(self, drafted: int, accepted: int) -> None:
        """Move an adaptive threshold by the acceptance rate of a round; rounds without a draft change nothing."""
        if self.rule.method != "adaptive" or drafted == 0:
            return
        rate = accepted / drafted
        if self._acceptance_rate is not None:
            rate = _ACCEPTANCE_DECAY * self._acceptance_rate + (1 - _ACCEPTANCE_DECAY) * rate
        self._acceptance_rate = rate
        moved = self.threshold + (_STEP if rate <= _TARGET_ACCEPTANCE else -_STEP)
        smoothed = _THRESHOLD_DECAY * self.threshold + (1 - _THRESHOLD_DECAY) * moved
        self.threshold = min(1.0, max(0.0, smoothed))


class StopRuleDrafter(Drafter):
    """A drafter that runs a model, and whose drafts its ``stopper`` may end."""

    stopper: Stopper

    @property
    def keeps_state(self) -> bool:
        return self.stopper.rule.method == "adaptive"

    def reset_state(self) -> None:
        self.stopper.reset()

    def observe(self, verdict: Verdict) -> None:
        self.stopper.observe(len(verdict.drafted), verdict.accepted)
