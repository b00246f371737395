"""Medusa heads, which each predict one token further ahead from the same hidden state.

Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (arXiv 2401.10774), section 2.1.1: every
head adds a residual block to the hidden state, and the target's output layer reads the sum. In the paper each head has its
own output layer, which starts as the target's and is trained. Sharing the target's leaves less to train, and is less
flexible.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.config import ConfigError, check_integer
from layerskip.models.compiled_layers import compile_like, compile_whole
from layerskip.models.packing import pack_like
from layerskip.models.target import Target
from layerskip.models.trained_module import load_trained, restore_weights

KIND = "medusa"


@dataclass(frozen=True)
class MedusaShape:
    """The architecture of Medusa heads.

    Args:
        hidden: H, the width of the target's hidden states.
        heads: number of heads. Head i predicts the token i + 2 places after the hidden state's own.
        vocabulary: number of the target's tokens that may be drafted; None for all.
    """

    hidden: int
    heads: int
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "heads"):
            check_integer(name, getattr(self, name), 1)
        if self.vocabulary is not None:
            check_integer("vocabulary", self.vocabulary, 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class MedusaHeads(nn.Module):
    """Medusa heads. Untrained heads return the hidden state, and so predict what the target's output layer does.

    ``tokens`` are those that may be drafted, ``[v]`` int64; None for all.
    """

    def __init__(self, shape: MedusaShape, tokens: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.tokens: Tensor | None
        blocks = [nn.Linear(shape.hidden, shape.hidden) for _ in range(shape.heads)]
        for block in blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.blocks = nn.ModuleList(blocks)
        self.register_buffer("tokens", tokens)
        compile_whole(self)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output layer's input for every head, ``[..., heads, H]``, from hidden states ``[..., H]``."""
        return torch.stack([hidden + nn.functional.silu(block(hidden)) for block in self.blocks], dim=-2)


def load_medusa(folder: str | Path, target: Target) -> MedusaHeads:
    """Load heads in the target's dtype and on its device; refuse damaged ones and those of another target (ConfigError)."""
    fields, weights = load_trained(folder, KIND, target)
    damaged = f"head: {folder} is damaged:"
    try:
        heads = MedusaHeads(MedusaShape(**fields), weights.pop("tokens", None))
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{damaged} its shape: {error}") from error
    restore_weights(heads, weights, damaged, ("tokens",))
    heads = heads.to(target.device, target.model.dtype).eval()
    compile_like(target.model, heads)
    return pack_like(target.model, heads)
