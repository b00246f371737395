"""How much goes into a search's bridges? What ``conf/bridging`` says."""

from __future__ import annotations

from dataclasses import dataclass

from searches.app.checks import check_number, check_whole


@dataclass(frozen=True)
class BridgingSettings:
    """What bridges are fitted to.

    Args:
        tokens: of the target's own answers.
        max_new_tokens: of an answer.
        batch: answers written at once.
        calibration_bytes: of hidden states, keys and values in memory, and of what a fit takes beside them.
        train_seconds: of training, for every finalist that is bridged; 0 for none.
        train_width: of the MLPs that are trained beside the maps of finalists that have none; 0 for none.
        learning_rate: of it.
        unroll: tokens in a row that it learns.
        texts_per_step: answers of a step, if they fit.
        training_bytes: of what a step of training and its optimiser hold.
        remembered_bytes: of texts as the target read them, in memory, for training.
        begin_like: a file of prompts that every other text begins like, none of which is measured.

    Raises:
        InputError: one of them is out of range.
    """

    tokens: int = 20000
    max_new_tokens: int = 128
    batch: int = 48
    calibration_bytes: int = 1_500_000_000
    train_seconds: float = 0.0
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
        for name in ("tokens", "max_new_tokens", "batch", "unroll", "texts_per_step"):
            check_whole(f"bridging.{name}", getattr(self, name))
        for name in ("calibration_bytes", "training_bytes", "remembered_bytes"):
            check_whole(f"bridging.{name}", getattr(self, name))
        check_whole("bridging.train_width", self.train_width, 0)
