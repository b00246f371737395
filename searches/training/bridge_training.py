"""Training of one mask's bridges, from texts to a folder: a closed form first, then gradient descent.

``python -m searches.train drafter=layer_skip mask=...`` runs it once the training texts are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from layerskip import ConfigError, MaskError, Sampling, SkipMask, Target, UnsupportedModel
from layerskip.bridges.fit import Calibration
from layerskip.files import digest
from layerskip.models.bridge import Bridges, BridgeShape, load_bridges, save_bridges
from layerskip.models.draft_head import save_draft_tokens
from layerskip.scan.scan import Scanner
from layerskip.scan.text_cache import TextCache
from layerskip.texts.continuations import Continuation, continuations_digest
from layerskip.texts.training_texts import TrainingText
from searches.app.checks import InputError
from searches.tracking.tracker import Tracker
from searches.training.bridge_trainer import BridgeTrainer, held_out_acceptance
from searches.training.trainer import TrainingCheckpoint
from searches.training.training_texts import continuations_of, texts_digest


def bridge_shape(config: DictConfig, target: Target) -> BridgeShape:
    """Return the shape of the bridges that a configuration asks for; refuse one that is not possible."""
    text = str(config.drafter.mask if config.mask is None else config.mask)
    try:
        mask = SkipMask.parse(text, target.layers)
    except MaskError as error:
        raise InputError(str(error)) from None
    if not mask.gaps:
        raise InputError("mask: skips nothing, so there is nothing to bridge")
    return parse_bridge_shape("bridge", config.bridge, target, mask)


def parse_bridge_shape(field: str, value: Any, target: Target, mask: SkipMask) -> BridgeShape:
    """Return the shape of a mask's bridges from a field of a configuration with ``kind``, ``rank`` and ``width``.

    Args:
        field: its name.
        value: its content.
        target: the target.
        mask: the bridged mask.
    """
    if not isinstance(value, Mapping):
        raise InputError(f"{field}: {value!r} is not a kind with its rank and its width")
    try:
        return BridgeShape.of(target, mask, value["kind"], value["rank"], value["width"])
    except ConfigError as error:
        raise InputError(f"{field}{str(error).removeprefix('bridge')}") from None


def load_warm_start(config: DictConfig, target: Target, shape: BridgeShape) -> Bridges | None:
    """Load the bridges that a configuration names as the warm start; None if it names none.

    Bridges of another target, kind or size are refused with a :class:`ConfigError`.
    """
    if config.warm_start is None:
        return None
    bridges = load_bridges(str(config.warm_start), target)
    Bridges(shape).warm_start(bridges)  # raises if they do not fit
    return bridges


def held_out_scanner(config: DictConfig, target: Target, continuations: Sequence[Continuation]) -> Scanner:
    """Return a scanner of held-out continuations, which measures the acceptance of bridged drafts.

    Raises:
        InputError: the continuations are too short to draft anything.
        UnsupportedModel: the target cannot be scanned, so bridges cannot be trained, either.
    """
    if not any(continuation.starts > 0 and continuation.limit(0) > 0 for continuation in continuations):
        raise InputError(f"held_out_tokens: {config.held_out_tokens} leave nothing to draft")
    usable = [continuation for continuation in continuations if continuation.starts > 0]
    scanner = Scanner(target, usable, Sampling(), int(config.unroll), most_bytes=int(config.calibration_bytes))
    if len(scanner.continuations) < len(usable):
        held = f"{len(scanner.continuations)} of {len(usable)} held-out texts"
        print(f"calibration_bytes: {config.calibration_bytes:,} hold {held}")
    scanner.check()  # training packs rows in the same way
    return scanner


def train_bridges(
    config: DictConfig,
    target: Target,
    shape: BridgeShape,
    texts: list[TrainingText],
    scanner: Scanner,
    tokens: Tensor | None,
    folder: Path,
    identity: dict[str, Any],
    tracker: Tracker,
    warm_start: Bridges | None,
) -> Path | None:
    """Fit and train the bridges of one mask; return their folder, or None if an empty skip drafts better.

    Args:
        config: the composed configuration of the training.
        target: the target.
        shape: of the bridges, with the mask.
        texts: training texts.
        scanner: of held-out continuations.
        tokens: ``[v]`` int64, the draft vocabulary; None for all tokens.
        folder: for the checkpoint and the result.
        identity: everything that the training depends on, except the texts.
        tracker: takes the metrics and the result.
        warm_start: bridges to begin from if their loss is lower than that of the closed form.

    Raises:
        InputError: no text is long enough to learn from, or a budget is too small.
    """
    continuations = continuations_of(texts)
    if not continuations:
        raise InputError(f"max_new_tokens: {config.max_new_tokens} leave no text of two tokens to learn from")
    empty = held_out_acceptance(scanner, shape, None, tokens)
    print(f"{shape.mask}, empty: accepted on held-out prompts, token by token: {format_rates(empty)}", flush=True)
    data = texts_digest(texts)
    checkpoint = TrainingCheckpoint(folder / "training.pt", digest([identity, data]), digest(identity))
    cache = TextCache(int(config.remembered_bytes))

    def calibration() -> Calibration:
        return calibrate(target, continuations, int(config.calibration_bytes), "calibration_bytes", cache, shape.width)

    trainer = BridgeTrainer(
        config, shape, target, continuations, scanner, tokens, checkpoint, calibration, cache, warm_start
    )
    if trainer.fit is not None:
        fit = trainer.fit
        print(f"closed form, {fit.rows} positions in {fit.seconds:.1f} s: {format_rates(trainer.evaluate())}", flush=True)
    tracker.log(trainer.start_metrics)
    trainer.train(tracker)
    accepted = trainer.evaluate()
    print(f"trained, {trainer.step} steps in {trainer.seconds:.0f} s: {format_rates(accepted)}")
    if accepted[0] <= empty[0]:
        print(f"the draft is not better than with empty skips ({empty[0]:.3f}); nothing is written")
        return None
    training = identity | {"steps_done": trainer.step, "seconds": trainer.seconds, "held_out": accepted, "empty": empty}
    training |= {"data": data, "dtype": target.dtype}
    save_bridges(folder, trainer.bridges, target, training, continuations_digest(continuations))
    if tokens is not None:
        save_draft_tokens(folder / "draft_head", tokens, target, identity)
    tracker.log_file(folder / "head.json")
    also = f" draft_head={folder / 'draft_head'}" if tokens is not None else ""
    print(f"wrote {folder}; decode with kind=layer_skip mask={shape.mask} bridge={folder}{also}")
    return folder


def calibrate(
    target: Target, continuations: list[Continuation], most_bytes: int, field: str, cache: TextCache | None, width: int
) -> Calibration:
    """Read the texts that bridges are fitted to, within the budget that a field of a configuration sets.

    Args:
        target: the target.
        continuations: the texts.
        most_bytes: the budget.
        field: its name, for messages.
        cache: of the target's states of texts; None keeps none.
        width: the largest width of MLPs to be fitted.

    Raises:
        InputError: the budget is too small.
    """
    try:
        return Calibration(target, continuations, most_bytes, text_cache=cache, width=width)
    except UnsupportedModel:
        raise
    except ValueError as error:
        raise InputError(f"{field}: {str(error).removeprefix('most_bytes: ')}") from None


def format_rates(rates: list[float]) -> str:
    """Return acceptance rates as text."""
    return ", ".join(f"{rate:.3f}" for rate in rates)
