"""The trainer of EAGLE and Medusa heads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from omegaconf import DictConfig
from torch import Tensor

from layerskip import Target
from layerskip.files import digest
from layerskip.heads.eagle import EagleHead
from layerskip.heads.feature_store import FeatureStore, TextFeatures
from layerskip.heads.induction import add_induction_heads
from layerskip.heads.medusa import MedusaHeads
from layerskip.heads.readout import Readout
from layerskip.heads.scaling import UNSCALED, HeadScaling
from layerskip.heads.training import Batch, acceptance, fit_linear, head_loss, predict_tokens
from searches.training.trainer import Trainer, TrainingCheckpoint

_SCALED = 32  # texts from which the scale of hidden states is estimated
_VALIDATION = 32  # the most validation texts; one text in twenty is one
# Share of EAGLE's training for the next token only: such a step takes a third of the time, and later tokens depend on it.
_NEXT_ONLY = 0.6


class HeadTrainer(Trainer):
    """Trainer of a head; EAGLE's is trained in scaled units (:mod:`layerskip.heads.scaling`).

    Args:
        config: the composed configuration of the training.
        head: to train.
        target: the target.
        store: hidden states of the training texts.
        held_out: hidden states of held-out texts.
        checkpoint: from which training resumes.
    """

    def __init__(
        self,
        config: DictConfig,
        head: EagleHead | MedusaHeads,
        target: Target,
        store: FeatureStore,
        held_out: list[TextFeatures],
        checkpoint: TrainingCheckpoint,
    ) -> None:
        self.head, self.store, self._held_out = head.to(target.device).float().train(), store, held_out
        self.embeddings = target.model.get_input_embeddings()
        self.readout = Readout(target, self.head.tokens)
        self._autocast = target.dtype == "bfloat16"
        texts = len(store) - min(_VALIDATION, len(store) // 20)
        self._scaling = UNSCALED
        if isinstance(head, EagleHead):
            some = (store[index] for index in range(min(_SCALED, texts)))
            self._scaling = scaling = HeadScaling.of(head, self.embeddings, some)
            identity = digest([checkpoint.identity, scaling.embeddings, scaling.inputs.tolist(), scaling.outputs])
            checkpoint = replace(checkpoint, identity=identity)
            if checkpoint.path.exists():
                scaling.apply(head)  # scales what the checkpoint does not hold; it holds scaled weights
        super().__init__(config, self.head, texts, checkpoint)

    def initialise(self) -> None:
        """Fit EAGLE's linear map in closed form, and add induction heads if it looks back."""
        if isinstance(self.head, EagleHead):
            fit_linear(self.head, self.embeddings, (self.store[index] for index in range(self.texts)))
            tokens = torch.cat([self.store.tokens(index) for index in range(self.texts)])
            add_induction_heads(self.head, self.embeddings, self.readout, tokens)
            self._scaling.apply(self.head)

    def unscale(self) -> None:
        """Convert the head to the target's units."""
        if isinstance(self.head, EagleHead):
            self._scaling.undo(self.head)
            self._scaling = UNSCALED

    def loss(self, indices: list[int]) -> Tensor:
        """Return the loss of the predicted next tokens."""
        batch = Batch.of([self.store[index] for index in indices], self.head, self._scaling, whole=True)
        next_only = isinstance(self.head, EagleHead) and self.progress < _NEXT_ONLY
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            predictions = predict_tokens(self.head, self.embeddings, batch, 1 if next_only else self.config.unroll)
            return head_loss(predictions, self.readout)

    def evaluate(self) -> list[float]:
        """Return the acceptance rates on held-out continuations."""
        return self.acceptance(self._held_out)

    def acceptance(self, texts: Iterable[TextFeatures]) -> list[float]:
        """Return the acceptance rates on texts, if only the tokens of the head's own vocabulary are drafted."""
        self.head.eval()
        rates = acceptance(self.head, self.embeddings, self.readout, texts, int(self.config.unroll), self._scaling)
        self.head.train()
        return rates
