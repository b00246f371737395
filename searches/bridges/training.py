"""Training of one mask's bridges, from texts to a folder: a closed form first, then gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from layerskip import ConfigError, MaskError, Sampling, SkipMask, Target, UnsupportedModel
from layerskip.bridges.bridge import Bridges, BridgeShape, load_bridges, save_bridges
from layerskip.bridges.fit import Calibration, Fit
from layerskip.bridges.training import BridgeTraining
from layerskip.models.draft_head import save_draft_tokens
from layerskip.scan.scan import Scanner
from layerskip.scan.text_batch import TextCache
from layerskip.texts.continuations import Continuation, continuations_digest
from layerskip.texts.training_texts import TrainingText
from searches.app.checks import InputError
from searches.training.texts import continuations_of, texts_digest
from searches.training.trainer import Trainer, TrainingCheckpoint, TrainingRun

_COMPARED = 8  # texts on which a warm start is compared with the closed form
_USED = 0.9  # share of the budget of a step; passes need the rest temporarily
_PARAMETER_BYTES = 24  # per parameter: closed form, warm start, gradient, two moments, one temporary


@dataclass(frozen=True)
class BridgeTexts:
    """What bridges are trained on.

    Args:
        tokens: ``[v]`` int64, the draft vocabulary; None for all tokens.
        calibration: makes the statistics for the closed form, if it is needed.
        cache: the target's states of texts; None computes them again.
    """

    target: Target
    continuations: list[Continuation]
    tokens: Tensor | None
    calibration: Callable[[], Calibration]
    cache: TextCache | None


class BridgeTrainer(Trainer):
    """Trainer of bridges.

    Training begins from the closed form or the warm start, whichever has the lower loss on a few texts. A step uses as many
    texts as fit the configuration's budget. Without a scanner of held-out continuations, it evaluates nothing.
    """

    def __init__(
        self,
        config: DictConfig,
        shape: BridgeShape,
        texts: BridgeTexts,
        checkpoint: TrainingCheckpoint,
        scanner: Scanner | None = None,
        warm_start: Bridges | None = None,
    ) -> None:
        self.fit: Fit | None = None
        self._calibrate, self._scanner, self._warm_start = texts.calibration, scanner, warm_start
        self._target, self._continuations, self._tokens = texts.target, texts.continuations, texts.tokens
        self.bridges = Bridges(shape).to(texts.target.device)
        vocabulary = texts.tokens if texts.tokens is not None else torch.arange(texts.target.vocabulary)
        self._training = BridgeTraining(texts.target, self.bridges, vocabulary, int(config.unroll), texts.cache)
        fixed = _PARAMETER_BYTES * shape.parameter_count
        count, one = _texts_at_once(self._training, texts.continuations, int(_USED * config.training_bytes - fixed))
        if count < 1:
            needed = int((fixed + one) / _USED) + 1
            raise InputError(f"training_bytes: {config.training_bytes} hold not even one text, which takes {needed}")
        super().__init__(config, self.bridges, len(texts.continuations), checkpoint)
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
        return self._training.loss([self._continuations[index] for index in indices])

    def evaluate(self) -> list[float]:
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
    """Return the acceptance rate of each further drafted token, given that the draft was right so far, in a scan.

    For sampled tokens it is the mean probability of acceptance. Without bridges skips are empty.
    """
    mask = SkipMask.parse(shape.mask, shape.layers)
    (scan,) = scanner.scan([mask], replacements=[bridges], tokens=tokens)
    if not scan.traces:
        return []
    # NaN if nothing was drafted, or after a wrong token.
    acceptance = np.concatenate([trace.acceptance for trace in scan.traces])
    known = np.nan_to_num(acceptance)
    reached = np.cumprod(np.hstack((np.ones((len(known), 1)), known[:, :-1])), axis=1) * ~np.isnan(acceptance)
    return [float(rate) for rate in (reached * known).sum(0) / np.maximum(reached.sum(0), np.finfo(float).tiny)]


def bridge_shape(config: DictConfig, target: Target) -> BridgeShape:
    """Return the shape of the bridges that a configuration asks for; refuse one that is not possible."""
    text, made = str(config.drafter.mask if config.mask is None else config.mask), config.bridge
    if not isinstance(made, Mapping):
        raise InputError(f"bridge: {made!r} is not a kind with its rank and its width")
    try:
        mask = SkipMask.parse(text, target.layers)
        if not mask.gaps:
            raise InputError("mask: skips nothing, so there is nothing to bridge")
        return BridgeShape.of(target, mask, made["kind"], made["rank"], made["width"])
    except (MaskError, ConfigError) as error:
        raise InputError(str(error)) from None


def load_warm_start(config: DictConfig, target: Target, shape: BridgeShape) -> Bridges | None:
    """Load the bridges that a configuration names as the warm start, if any; refuse another target, kind or size."""
    if config.warm_start is None:
        return None
    bridges = load_bridges(str(config.warm_start), target)
    Bridges(shape).warm_start(bridges)  # raises if they do not fit
    return bridges


def held_out_scanner(config: DictConfig, target: Target, continuations: Sequence[Continuation]) -> Scanner:
    """Return a scanner of held-out continuations, which measures the acceptance of bridged drafts; refuse too short ones."""
    if not any(continuation.starts > 0 and continuation.limit(0) > 0 for continuation in continuations):
        raise InputError(f"held_out_tokens: {config.held_out_tokens} leave nothing to draft")
    usable = [continuation for continuation in continuations if continuation.starts > 0]
    scanner = Scanner(target, usable, Sampling(), int(config.unroll), max_bytes=int(config.calibration_bytes))
    if len(scanner.continuations) < len(usable):
        held = f"{len(scanner.continuations)} of {len(usable)} held-out texts"
        print(f"calibration_bytes: {config.calibration_bytes:,} hold {held}")
    scanner.check()  # training packs rows in the same way
    return scanner


def train_bridges(
    run: TrainingRun,
    shape: BridgeShape,
    texts: list[TrainingText],
    scanner: Scanner,
    tokens: Tensor | None,
    warm_start: Bridges | None,
) -> Path | None:
    """Fit and train the bridges of one mask; return their folder, or None if an empty skip drafts better."""
    config, target, folder, continuations = run.config, run.target, run.folder, continuations_of(texts)
    if not continuations:
        raise InputError(f"max_new_tokens: {config.max_new_tokens} leave no text of two tokens to learn from")
    empty = held_out_acceptance(scanner, shape, None, tokens)
    print(f"{shape.mask}, empty: accepted on held-out prompts, token by token: {format_rates(empty)}", flush=True)
    data = texts_digest(texts)
    checkpoint = run.checkpoint([run.identity, data])
    cache = TextCache(int(config.remembered_bytes))

    def calibration() -> Calibration:
        return calibrate(target, continuations, int(config.calibration_bytes), "calibration_bytes", cache, shape.width)

    source = BridgeTexts(target, continuations, tokens, calibration, cache)
    trainer = BridgeTrainer(config, shape, source, checkpoint, scanner, warm_start)
    if trainer.fit is not None:
        fit = trainer.fit
        print(f"closed form, {fit.rows} positions in {fit.seconds:.1f} s: {format_rates(trainer.evaluate())}", flush=True)
    run.tracker.log(trainer.start_metrics)
    trainer.train(run.tracker)
    accepted = trainer.evaluate()
    print(f"trained, {trainer.step} steps in {trainer.seconds:.0f} s: {format_rates(accepted)}")
    if accepted[0] <= empty[0]:
        print(f"the draft is not better than with empty skips ({empty[0]:.3f}); nothing is written")
        return None
    training = run.identity | {"steps_done": trainer.step, "seconds": trainer.seconds, "held_out": accepted, "empty": empty}
    training |= {"data": data, "dtype": target.dtype}
    save_bridges(folder, trainer.bridges, target, training, continuations_digest(continuations))
    if tokens is not None:
        save_draft_tokens(folder / "draft_head", tokens, target, run.identity)
    run.tracker.log_file(folder / "head.json")
    also = f" draft_head={folder / 'draft_head'}" if tokens is not None else ""
    print(f"wrote {folder}; decode with method=layer_skip mask={shape.mask} bridge={folder}{also}")
    return folder


def calibrate(
    target: Target, continuations: list[Continuation], max_bytes: int, field: str, cache: TextCache | None, width: int
) -> Calibration:
    """Read the texts that bridges are fitted to, within a budget of bytes that ``field`` sets, for MLPs up to a width."""
    try:
        return Calibration(target, continuations, max_bytes, text_cache=cache, width=width)
    except UnsupportedModel:
        raise
    except ValueError as error:
        raise InputError(f"{field}: {str(error).removeprefix('max_bytes: ')}") from None


def format_rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:.3f}" for rate in rates)
