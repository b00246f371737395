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
from layerskip.models.trained_module import load_trained

KIND = "medusa"


@dataclass(frozen=True)
class MedusaShape:
    """The architecture of Medusa heads.

    Args:
        hidden: H, the width of the target's hidden states.
        heads: number of heads. Head i predicts the token i + 2 places after the hidden state's own.
        modules: name of the target's sub-module whose output they read, as a tuple of one.
        vocabulary: number of the target's tokens that may be drafted; None for all.

    Raises:
        ConfigError: a value is out of range.
    """

    hidden: int
    heads: int
    modules: tuple[str, ...]
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "heads"):
            check_integer(name, getattr(self, name), 1)
        if len(self.modules) != 1 or not isinstance(self.modules[0], str):
            raise ConfigError("modules: are not the name of one sub-module")
        if self.vocabulary is not None:
            check_integer("vocabulary", self.vocabulary, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the shape as a dictionary that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> MedusaShape:
        """Return the shape of a dictionary from :meth:`to_dict`, with JSON's lists converted to tuples."""
        return cls(**fields | {"modules": tuple(fields["modules"])})


class MedusaHeads(nn.Module):
    """Medusa heads. Untrained heads return the hidden state, and so predict what the target's output layer does.

    Args:
        shape: the architecture of the heads.
        tokens: ``[v]`` int64: the target's tokens that may be drafted; None for all.
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
    """Load heads for a target, in its dtype and on its device.

    Heads that are damaged or were made for another target are refused with a :class:`ConfigError`.
    """
    fields, weights = load_trained(folder, KIND, target)
    try:
        shape = MedusaShape.from_dict(fields)
        heads = MedusaHeads(shape, weights.pop("tokens", None))
        heads.load_state_dict(weights, strict=False)
        names = {name for name in heads.state_dict() if name != "tokens"}
    except (ConfigError, TypeError, KeyError, RuntimeError) as error:
        raise ConfigError(f"head: {folder} is damaged: {' '.join(str(error).split())[:200]}") from error
    if unread := set(shape.modules) - {name for name, _ in target.model.named_modules()}:
        raise ConfigError(f"head: {folder} is damaged: {target.name} has no sub-module {min(unread)}")
    if names != set(weights):
        raise ConfigError(f"head: {folder} is damaged: {', '.join(sorted(names ^ set(weights))[:3])}")
    heads = heads.to(target.device, target.model.dtype).eval()
    compile_like(target.model, heads)
    return pack_like(target.model, heads)
