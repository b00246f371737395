"""Bridges of one mask, from texts to a folder: the closed form first, then by gradient.

What ``python -m searches.train drafter=layer_skip mask=...`` does once the target's own texts are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from layerskip import ConfigError, MaskError, Sampling, SkipMask, Target, UnsupportedModel
from layerskip.bridges.fit import Calibration, Fit
from layerskip.bridges.training import BridgeTraining
from layerskip.files import digest
from layerskip.models.bridge import Bridges, BridgeShape, load_bridges, save_bridges
from layerskip.models.draft_head import save_draft_tokens
from layerskip.scan.scan import Scan, Scanner
from layerskip.scan.text_cache import Memory
from layerskip.texts.continuations import Continuation, digest_of
from layerskip.texts.training_texts import TrainingText
from searches.app.checks import InputError
from searches.training.learner import Learner, TrainingFile
from searches.training.training_texts import continuations_of, told_apart

if TYPE_CHECKING:
    from searches.tracking.tracker import Tracker

_COMPARED = 8  # texts that tell whether to begin as a neighbour
_USED = 0.9  # of the budget of a step; the rest is for what passes take on the way
_LEARNT = 24  # bytes beside every number of bridges: its closed form, a neighbour's, its gradient, two moments, one more


def shape_of(config: DictConfig, target: Target) -> BridgeShape:
    """The bridges that a configuration asks for.

    Raises:
        InputError: they cannot be.
    """
    text = str(config.drafter.mask if config.mask is None else config.mask)
    try:
        mask = SkipMask.parse(text, target.layers)
    except MaskError as error:
        raise InputError(str(error)) from None
    if not mask.gaps:
        raise InputError("mask: skips nothing, so there is nothing to stand in for")
    return made_of("bridge", config.bridge, target, mask)


def made_of(field: str, made: Any, target: Target, mask: SkipMask) -> BridgeShape:
    """The bridges of a mask, made from what a field of a configuration says.

    Raises:
        InputError: they cannot be; the message begins with the field's name.
    """
    if not isinstance(made, Mapping):
        raise InputError(f"{field}: {made!r} is not a kind with its rank and its width")
    try:
        return BridgeShape.of(target, mask, made["kind"], made["rank"], made["width"])
    except ConfigError as error:
        raise InputError(f"{field}{str(error).removeprefix('bridge')}") from None


def neighbour_of(config: DictConfig, target: Target, shape: BridgeShape) -> Bridges | None:
    """The bridges to begin with, if a configuration names some.

    Raises:
        ConfigError: there are none, or of another target, kind or size.
    """
    if config.warm_start is None:
        return None
    neighbour = load_bridges(str(config.warm_start), target)
    Bridges(shape).warm(neighbour)  # refuses what does not fit
    return neighbour


def judge_of(config: DictConfig, target: Target, continued: Sequence[Continuation]) -> Scanner:
    """What says how often bridged drafts would be accepted, from what the target says to held-out prompts.

    Raises:
        InputError: that leaves nothing to draft.
        UnsupportedModel: the target cannot be scanned, so that bridges cannot learn, either.
    """
    if not any(continuation.starts > 0 and continuation.limit(0) > 0 for continuation in continued):
        raise InputError(f"held_out_tokens: {config.held_out_tokens} leave nothing to draft")
    read = [continuation for continuation in continued if continuation.starts > 0]
    scanner = Scanner(target, read, Sampling(), int(config.unroll), most_bytes=int(config.calibration_bytes))
    if len(scanner.continuations) < len(read):
        print(
            f"calibration_bytes: {config.calibration_bytes:,} hold {len(scanner.continuations)} of {len(read)} held-out texts"
        )
    scanner.check()  # bridges learn in such rows, too
    return scanner


def train_bridges(
    config: DictConfig,
    target: Target,
    shape: BridgeShape,
    texts: list[TrainingText],
    scanner: Scanner,
    tokens: Tensor | None,
    folder: Path,
    learnt: dict[str, Any],
    tracker: Tracker,
    neighbour: Bridges | None,
) -> Path | None:
    """Fit and train the bridges of one mask; returns their folder, or None where an empty skip drafts better.

    Args:
        config: of ``conf/train.yaml``.
        target: the model.
        shape: of the bridges.
        texts: the target's own, to learn from.
        scanner: judges, by other texts.
        tokens: ``[v]`` int64: those that are drafted; None for all.
        folder: to write.
        learnt: what tells this training from others.
        tracker: for losses and rates.
        neighbour: what they begin as, where it loses less than the closed form.
    """
    continuations = continuations_of(texts)
    if not continuations:
        raise InputError(f"max_new_tokens: {config.max_new_tokens} leave no text of two tokens to learn from")
    empty = _judged(scanner, shape, None, tokens)
    print(f"{shape.mask}, empty: accepted on held-out prompts, token by token: {shown(empty)}", flush=True)
    written = told_apart(texts)
    file = TrainingFile(folder / "training.pt", digest([learnt, written]), digest(learnt))
    memory = Memory(int(config.remembered_bytes))

    def calibration() -> Calibration:
        return calibrate(target, continuations, int(config.calibration_bytes), "calibration_bytes", memory, shape.width)

    learner = BridgeLearner(config, shape, target, continuations, scanner, tokens, file, calibration, memory, neighbour)
    if learner.fit is not None:
        fit = learner.fit
        print(f"closed form, {fit.rows} positions in {fit.seconds:.1f} s: {shown(learner.judge())}", flush=True)
    tracker.log(tracker.run_id, learner.begun_as)
    learner.learn_all(tracker)
    accepted = learner.judge()
    print(f"trained, {learner.step} steps in {learner.seconds:.0f} s: {shown(accepted)}")
    if accepted[0] <= empty[0]:
        print(f"the draft is not better than with empty skips ({empty[0]:.3f}); nothing is written")
        return None
    training = learnt | {"steps_done": learner.step, "seconds": learner.seconds, "held_out": accepted, "empty": empty}
    training |= {"data": written, "dtype": target.dtype}
    save_bridges(folder, learner.bridges, target, training, digest_of(continuations))
    if tokens is not None:
        save_draft_tokens(folder / "draft_head", tokens, target, learnt)
    tracker.log_file(folder / "head.json")
    also = f" draft_head={folder / 'draft_head'}" if tokens is not None else ""
    print(f"wrote {folder}; decode with kind=layer_skip mask={shape.mask} bridge={folder}{also}")
    return folder


def calibrate(
    target: Target, continuations: list[Continuation], most_bytes: int, field: str, memory: Memory | None, width: int
) -> Calibration:
    """What bridges are fitted to, MLPs of some width at most, within a budget that a field of a configuration sets."""
    try:
        return Calibration(target, continuations, most_bytes, memory=memory, width=width)
    except UnsupportedModel:
        raise
    except ValueError as error:
        raise InputError(f"{field}: {str(error).removeprefix('most_bytes: ')}") from None


class BridgeLearner(Learner):
    """Bridges in training.

    They begin as their closed form, or as a neighbour's, whichever loses less on a few texts. A step looks at as many texts
    as fit the configuration's budget.
    """

    def __init__(
        self,
        config: DictConfig,
        shape: BridgeShape,
        target: Target,
        continuations: list[Continuation],
        scanner: Scanner | None,
        tokens: Tensor | None,
        file: TrainingFile,
        calibration: Callable[[], Calibration],
        memory: Memory | None,
        neighbour: Bridges | None = None,
    ) -> None:
        self._calibrate = calibration
        self.fit: Fit | None = None
        self._neighbour = neighbour
        self._target, self._passages, self._scanner, self._tokens = target, continuations, scanner, tokens
        self.bridges = Bridges(shape).to(target.device)
        said = tokens if tokens is not None else torch.arange(target.vocabulary)
        self._training = BridgeTraining(target, self.bridges, said, int(config.unroll), memory)
        learnt = _LEARNT * shape.numbers
        fit, least = _at_once(self._training, continuations, int(_USED * config.training_bytes - learnt))
        if fit < 1:
            takes = int((learnt + least) / _USED) + 1
            raise InputError(f"training_bytes: {config.training_bytes} hold not even one text, which takes {takes}")
        super().__init__(config, self.bridges, len(continuations), file)
        self.texts_per_step = min(self.texts_per_step, fit)

    def begin(self) -> None:
        """The closed form, or a neighbour's where that loses less."""
        self.fit = self._calibrate().fit(self.bridges.shape)
        self.begun_as = {"fit_seconds": self.fit.seconds, "agreement_closed_form": self.fit.bridged}
        self.bridges.load_state_dict(self.fit.bridges.state_dict())
        if self._neighbour is not None:
            fitted = self._compared()
            self.bridges.warm(self._neighbour.to(self._target.device).float())
            if self._compared() >= fitted:
                self.bridges.load_state_dict(self.fit.bridges.state_dict())

    @torch.no_grad()
    def _compared(self) -> float:
        """The loss on a few texts, one after the other, as no budget says that all of them fit."""
        return sum(float(self._training.loss([continuation])) for continuation in self._passages[:_COMPARED])

    def loss(self, places: list[int]) -> Tensor:
        """Of drafts on some texts."""
        return self._training.loss([self._passages[place] for place in places])

    def judge(self) -> list[float]:
        """By a scan of held-out continuations, as they decode; nothing where there are none."""
        if self._scanner is None:
            return []
        return _judged(self._scanner, self.bridges.shape, self.bridges.decoding(self._target), self._tokens)


def _at_once(training: BridgeTraining, continuations: list[Continuation], budget: int) -> tuple[int, int]:
    """How many texts at a time fit a budget of bytes, whichever they are, and what one takes.

    Rows of one text beside another's are masked: part of what texts take grows with the square of how many there are.
    """
    one, dearest = max(
        ((training.nbytes(continuation), continuation) for continuation in _largest(continuations)), key=lambda pair: pair[0]
    )
    if 2 * one > budget:
        return int(one <= budget), one
    beside = max(0, training.nbytes(dearest, dearest) - 2 * one)
    fit = 1
    while fit < len(continuations) and (fit + 1) * one + beside * (fit + 1) * fit // 2 <= budget:
        fit += 1
    return fit, one


def _largest(continuations: list[Continuation]) -> list[Continuation]:
    """Those that no other exceeds in both positions to draft from and length: any of them may take most memory.

    Answers are often as long as they may be, and then it is the prompts that tell them apart.
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


def _judged(scanner: Scanner, shape: BridgeShape, bridges: Bridges | None, tokens: Tensor | None) -> list[float]:
    mask = SkipMask.parse(shape.mask, shape.layers)
    (scan,) = scanner.scan([mask], bridges=[bridges], tokens=tokens)
    return rates(scan)


def rates(scan: Scan) -> list[float]:
    """For each further token: how often a draft that was right so far is right there; where tokens are sampled, the chance
    that it is accepted."""
    if not scan.traces:
        return []
    kept = np.concatenate([trace.kept for trace in scan.traces])  # NaN where nothing was drafted, or behind a wrong token
    chances = np.nan_to_num(kept)
    reached = np.cumprod(np.hstack((np.ones((len(kept), 1)), chances[:, :-1])), axis=1) * ~np.isnan(kept)
    return [float(part) for part in (reached * chances).sum(0) / np.maximum(reached.sum(0), np.finfo(float).tiny)]


def shown(rates: list[float]) -> str:
    return ", ".join(f"{rate:.3f}" for rate in rates)
