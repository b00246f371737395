"""The trainer of bridges, and the acceptance rates of bridged drafts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from layerskip import SkipMask, Target
from layerskip.bridges.fit import Calibration, Fit
from layerskip.bridges.training import BridgeTraining
from layerskip.models.bridge import Bridges, BridgeShape
from layerskip.scan.scan import Scan, Scanner
from layerskip.scan.text_cache import TextCache
from layerskip.texts.continuations import Continuation
from searches.app.checks import InputError
from searches.training.trainer import Trainer, TrainingCheckpoint

_COMPARED = 8  # texts on which a warm start is compared with the closed form
_USED = 0.9  # share of the budget of a step; passes need the rest temporarily
_PARAMETER_BYTES = 24  # per parameter: closed form, warm start, gradient, two moments, one temporary


class BridgeTrainer(Trainer):
    """Trainer of bridges.

    Training begins from the closed form or the warm start, whichever has the lower loss on a few texts. A step uses as many
    texts as fit the configuration's budget.

    Args:
        config: the composed configuration of a training.
        shape: of the bridges.
        target: the target.
        continuations: the training texts.
        scanner: of held-out continuations; None evaluates nothing.
        tokens: ``[v]`` int64, the draft vocabulary; None for all tokens.
        checkpoint: from which training resumes.
        calibration: makes the statistics for the closed form, if it is needed.
        cache: of the target's states of texts; None computes them again.
        warm_start: bridges to begin from if their loss is lower than that of the closed form.
    """

    def __init__(
        self,
        config: DictConfig,
        shape: BridgeShape,
        target: Target,
        continuations: list[Continuation],
        scanner: Scanner | None,
        tokens: Tensor | None,
        checkpoint: TrainingCheckpoint,
        calibration: Callable[[], Calibration],
        cache: TextCache | None,
        warm_start: Bridges | None = None,
    ) -> None:
        self._calibrate = calibration
        self.fit: Fit | None = None
        self._warm_start = warm_start
        self._target, self._continuations, self._scanner, self._tokens = target, continuations, scanner, tokens
        self.bridges = Bridges(shape).to(target.device)
        vocabulary = tokens if tokens is not None else torch.arange(target.vocabulary)
        self._training = BridgeTraining(target, self.bridges, vocabulary, int(config.unroll), cache)
        fixed = _PARAMETER_BYTES * shape.parameter_count
        count, one = _texts_at_once(self._training, continuations, int(_USED * config.training_bytes - fixed))
        if count < 1:
            needed = int((fixed + one) / _USED) + 1
            raise InputError(f"training_bytes: {config.training_bytes} hold not even one text, which takes {needed}")
        super().__init__(config, self.bridges, len(continuations), checkpoint)
        self.texts_per_step = min(self.texts_per_step, count)

    def initialise(self) -> None:
        """Fit the closed form, and take the warm start instead if its loss is lower."""
        self.fit = self._calibrate().fit(self.bridges.shape)
        self.start_metrics = {"fit_seconds": self.fit.seconds, "agreement_closed_form": self.fit.bridged}
        self.bridges.load_state_dict(self.fit.bridges.state_dict())
        if self._warm_start is not None:
            fitted = self._start_loss()
            self.bridges.warm_start(self._warm_start.to(self._target.device).float())
            if self._start_loss() >= fitted:
                self.bridges.load_state_dict(self.fit.bridges.state_dict())

    @torch.no_grad()
    def _start_loss(self) -> float:
        """Return the loss on a few texts, one by one, because no budget ensures that all of them fit together."""
        return sum(float(self._training.loss([continuation])) for continuation in self._continuations[:_COMPARED])

    def loss(self, indices: list[int]) -> Tensor:
        """Return the loss of drafts on some texts."""
        return self._training.loss([self._continuations[index] for index in indices])

    def evaluate(self) -> list[float]:
        """Return the acceptance rates in a scan of held-out continuations; an empty list without a scanner."""
        if self._scanner is None:
            return []
        return held_out_acceptance(self._scanner, self.bridges.shape, self.bridges.for_decoding(self._target), self._tokens)


def _texts_at_once(training: BridgeTraining, continuations: list[Continuation], budget: int) -> tuple[int, int]:
    """Return how many texts fit a budget of bytes together, whichever they are, and the bytes of the largest one.

    The rows of one text are masked from those of the others, so a part of the bytes grows with the square of their number.
    """
    one, largest = max(
        ((training.nbytes(continuation), continuation) for continuation in _largest(continuations)), key=lambda pair: pair[0]
    )
    if 2 * one > budget:
        return int(one <= budget), one
    pair = max(0, training.nbytes(largest, largest) - 2 * one)
    count = 1
    while count < len(continuations) and (count + 1) * one + pair * (count + 1) * count // 2 <= budget:
        count += 1
    return count, one


def _largest(continuations: list[Continuation]) -> list[Continuation]:
    """Return the texts that no other exceeds both in positions to draft from and in length; any may need the most memory.

    Answers often have the largest length that is allowed. Then only prompts differ.
    """
    found: list[Continuation] = []
    longest = 0
    for continuation in sorted(continuations, key=lambda continuation: (-continuation.starts, -_length(continuation))):
        if _length(continuation) > longest:
            longest = _length(continuation)
            found.append(continuation)
    return found


def _length(continuation: Continuation) -> int:
    return len(continuation.prompt) + len(continuation.tokens)


def held_out_acceptance(scanner: Scanner, shape: BridgeShape, bridges: Bridges | None, tokens: Tensor | None) -> list[float]:
    """Return the acceptance rates of a mask's drafts with bridges, or with empty skips, in a scan.

    Args:
        scanner: of held-out continuations.
        shape: of the bridges, with the mask.
        bridges: None for empty skips.
        tokens: the draft vocabulary, ``[v]`` int64; None for all tokens.
    """
    mask = SkipMask.parse(shape.mask, shape.layers)
    (scan,) = scanner.scan([mask], bridges=[bridges], tokens=tokens)
    return acceptance_rates(scan)


def acceptance_rates(scan: Scan) -> list[float]:
    """Return the acceptance rate of each further drafted token, given that the draft was right so far.

    For sampled tokens it is the mean probability of acceptance.
    """
    if not scan.traces:
        return []
    # NaN if nothing was drafted, or after a wrong token.
    acceptance = np.concatenate([trace.acceptance for trace in scan.traces])
    known = np.nan_to_num(acceptance)
    reached = np.cumprod(np.hstack((np.ones((len(known), 1)), known[:, :-1])), axis=1) * ~np.isnan(acceptance)
    return [float(rate) for rate in (reached * known).sum(0) / np.maximum(reached.sum(0), np.finfo(float).tiny)]
