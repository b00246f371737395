"""Settings of a search's bridges (``conf/bridging``)."""

from __future__ import annotations

from dataclasses import dataclass

from searches.app.checks import check_number, check_whole


@dataclass(frozen=True)
class BridgingSettings:
    """Settings of fitting and training bridges.

    Args:
        tokens: of the target's own answers in the training texts.
        max_new_tokens: per answer.
        batch: answers generated together.
        calibration_bytes: budget for hidden states, keys, values and the temporary memory of a fit.
        train_seconds: of training for every bridged finalist; 0 for none.
        train_width: of the MLPs that are trained with the maps of finalists that have none; 0 for none.
        learning_rate: of the training.
        unroll: consecutive tokens that it learns to draft.
        texts_per_step: the most answers of a training step.
        training_bytes: budget of a training step with its optimiser.
        remembered_bytes: budget of the target's states of texts, kept in memory for training.
        begin_like: a file of prompts, none of which is measured; every other text begins like one of them.
    """

    tokens: int = 20000
    max_new_tokens: int = 128
    batch: int = 48
    calibration_bytes: int = 1_500_000_000
    train_seconds: float = 0
    train_width: int = 512
    learning_rate: float = 0.002
    unroll: int = 1
    texts_per_step: int = 3
    training_bytes: int = 2_000_000_000
    remembered_bytes: int = 1_000_000_000
    begin_like: str | None = None

    def __post_init__(self) -> None:
        check_number("bridging.train_seconds", self.train_seconds, or_zero=True)
        check_number("bridging.learning_rate", self.learning_rate, 1.0)
        bytes_fields = ("calibration_bytes", "training_bytes", "remembered_bytes")
        for name in ("tokens", "max_new_tokens", "batch", "unroll", "texts_per_step", *bytes_fields):
            check_whole(f"bridging.{name}", getattr(self, name))
        check_whole("bridging.train_width", self.train_width, 0)
