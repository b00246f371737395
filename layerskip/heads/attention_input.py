"""What the attention of an EAGLE head reads beside the state of its layer: embeddings of tokens.

A decoder layer of transformers hands its attention the output of a norm. Modules of this file take the place of that norm,
and the attention's linear maps get further inputs for what they append.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class AppendedEmbeddings(nn.Module):
    """A layer that appends embeddings ``[B, n, E]`` to the attention's input, in place of a norm.

    Args:
        width: E; 0 appends nothing.

    Attributes:
        embeddings: set for one pass; without them zeros are appended, as in a pass that finds out which maps read one input.
    """

    embeddings: Tensor | None = None

    def __init__(self, width: int = 0) -> None:
        super().__init__()
        self.width = width

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``[B, n, H + E]`` from ``[B, n, H]``."""
        if self.width == 0:
            return hidden
        if self.embeddings is None:
            return pad(hidden, (0, self.width))
        return torch.cat((hidden, self.embeddings.to(hidden.dtype)), -1)


class SideBySide(nn.Module):
    """A layer that normalises a state and the token's embedding, and returns both side by side, as in EAGLE-3.

    Args:
        width: H, of both.
        eps: epsilon of the norms.

    Attributes:
        appended: takes the embeddings; a module without tensors, which copies of this one share.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.appended = AppendedEmbeddings(width)
        self.state_norm, self.embedding_norm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``[B, n, 2 H]`` from ``[B, n, H]``."""
        state, embedding = self.appended(hidden).split(hidden.shape[-1], -1)
        return torch.cat((self.state_norm(state), self.embedding_norm(embedding)), -1)


def widened(part: nn.Linear, more: int) -> nn.Linear:
    """Return the linear map with further inputs, whose weights are zero."""
    wide = nn.Linear(part.in_features + more, part.out_features, bias=part.bias is not None)
    wide.weight.data.zero_()[:, : part.in_features] = part.weight.data
    if part.bias is not None:
        wide.bias.data.copy_(part.bias.data)
    return wide
