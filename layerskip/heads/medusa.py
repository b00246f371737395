"""What will the target say in a few tokens? Heads that each look one token further, from one hidden state.

Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (arXiv 2401.10774), section 2.1.1: every
head adds a residual block to the hidden state that the target's own output layer then reads. The paper gives each head an
output layer of its own, begun as the target's and trained on; sharing it leaves less to train, and is less free.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.config import ConfigError
from layerskip.models.packing import packed_like
from layerskip.models.target import Target
from layerskip.models.trained_module import load_head
from layerskip.rules import check_integer

KIND = "medusa"


@dataclass(frozen=True)
class MedusaShape:
    """What Medusa heads are made from.

    Args:
        hidden: H, the width of the target's hidden states.
        heads: how many there are; head i foretells the token i + 2 places behind the hidden state's own.
        modules: the target's sub-module that they read.
        vocabulary: how many of the target's tokens are drafted from; None for all of them.

    Raises:
        ConfigError: no heads can be made from it.
    """

    hidden: int
    heads: int
    modules: tuple[str, ...]
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "heads"):
            check_integer(name, getattr(self, name), 1)
        if len(self.modules) != 1 or not isinstance(self.modules[0], str):
            raise ConfigError("modules: are not the name of what they read")
        if self.vocabulary is not None:
            check_integer("vocabulary", self.vocabulary, 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> MedusaShape:
        """The shape that :meth:`to_dict` wrote, though JSON has lists for tuples."""
        return cls(**fields | {"modules": tuple(fields["modules"])})


class MedusaHeads(nn.Module):
    """The trained part; untrained, every head says what the target's own output layer does.

    Args:
        shape: what it is made from.
        tokens: ``[v]`` int64, the target's tokens that are drafted from; None for all.
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

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., heads, H]``: what the output layer shall read for each."""
        return torch.stack([hidden + nn.functional.silu(block(hidden)) for block in self.blocks], dim=-2)


def load_medusa(folder: str | Path, target: Target) -> MedusaHeads:
    """Heads for a target, in its dtype and on its device.

    Raises:
        ConfigError: there are none, they are damaged, or they were made for another target.
    """
    fields, weights = load_head(folder, KIND, target)
    try:
        shape = MedusaShape.from_dict(fields)
        heads = MedusaHeads(shape, weights.pop("tokens", None))
        heads.load_state_dict(weights, strict=False)
        found = {name for name in heads.state_dict() if name != "tokens"}
    except (ConfigError, TypeError, KeyError, RuntimeError) as error:
        raise ConfigError(f"head: {folder} is damaged: {' '.join(str(error).split())[:200]}") from error
    if unread := set(shape.modules) - {name for name, _ in target.model.named_modules()}:
        raise ConfigError(f"head: {folder} is damaged: {target.name} has no {min(unread)} that it could read")
    if found != set(weights):
        raise ConfigError(f"head: {folder} is damaged: {', '.join(sorted(found ^ set(weights))[:3])}")
    return packed_like(target.model, heads.to(target.device, target.model.dtype).eval())
