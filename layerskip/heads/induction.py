"""Initialisation of an EAGLE head's attention, with lookback, as induction heads, which copy from earlier in the text.

In-context Learning and Induction Heads (arXiv 2209.11895): language models copy by two layers. The first one gives every
token its predecessor, and the second one searches for the current token among these predecessors. Attention that reads the
embeddings of previous tokens (``lookback``) needs one layer and no training for this. Queries project the current token,
keys project the predecessors with the same projection, and values project the tokens themselves; the attention's output
makes the target's output layer predict them. A short training does not find this by itself, but starts well from it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.heads.eagle import EagleHead
from layerskip.heads.readout import Readout

_COMMON = 8192  # the most tokens, the most frequent ones, from whose embeddings projections are computed
_SLOW = 2e-3  # the most radians per token that a dimension may rotate, for matches across some hundred tokens
_GROUPS = 3  # the most key heads that copy
_MATCH = 11.0  # score of a full match before the softmax, which outweighs a hundred half matches
_BOOST = 3.0  # logits that all heads together add to the token after a full match
_FLOOR = 0.05  # lower bound of a direction's variance, as a share of the median
_LEAST = 1e-4  # and as a share of the largest: few tokens span few directions
_CALIBRATED = 512  # tokens


@torch.no_grad()
def add_induction_heads(head: EagleHead, embeddings: nn.Module, readout: Readout, text: Tensor) -> None:
    """Set some attention heads to copy what followed the last two tokens, or the last one, earlier in the text.

    In each of up to three groups of heads with shared keys, the first head searches for both tokens and the second for the
    last one. If every head has its own keys, heads alternate between the two. A head without lookback stays as it is.
    The head is in the target's scale; ``text``, ``[n]`` int64, are the target's own texts, for the frequencies of tokens.
    """
    shape = head.shape
    layer: Any = head.body.layers[0]
    attention = layer.self_attn
    slow = _slow_dimensions(shape.head_dim, shape.rope_theta)
    searched = min(2, shape.lookback)
    each = len(slow) // searched if searched else 0  # dimensions that encode one token
    if not each:
        return
    embedded, output_rows, weights = _common_tokens(embeddings, readout, text)
    whitening = _whitening(embedded, weights)
    draws = torch.Generator().manual_seed(0)

    def projection(count: int) -> Tensor:
        drawn = torch.randn(count, shape.hidden, generator=draws, dtype=torch.float64)
        return drawn.to(embedded.device) / math.sqrt(shape.hidden) @ whitening

    # Input columns after the linear map's output: the current token, its predecessor, and the one before that.
    columns = [slice((1 + back) * shape.hidden, (2 + back) * shape.hidden) for back in range(1 + searched)]
    sharing = shape.heads // shape.key_value_heads
    groups, copying = min(_GROUPS, shape.key_value_heads), min(searched, sharing)
    for group in range(groups):
        rows = slice(group * shape.head_dim, (group + 1) * shape.head_dim)
        codes = [(slow[back * each : (back + 1) * each], projection(each)) for back in range(searched)]
        _set_rows(attention.k_proj, rows, [(dims, columns[1 + back], by) for back, (dims, by) in enumerate(codes)])
        value = projection(shape.head_dim)
        _set_rows(attention.v_proj, rows, [(list(range(shape.head_dim)), columns[0], value)])
        decoder = _decoder(embedded @ value.T, output_rows, weights) * _BOOST / (groups * copying * readout.scale)
        for copier in range(copying):
            query = codes if (copier if sharing > 1 else group) % 2 == 0 else codes[:1]
            sharpness = _MATCH * math.sqrt(shape.head_dim) / (each * len(query))
            own = slice((group * sharing + copier) * shape.head_dim, (group * sharing + copier + 1) * shape.head_dim)
            blocks = [(dims, columns[back], sharpness * by) for back, (dims, by) in enumerate(query)]
            _set_rows(attention.q_proj, own, blocks)
            attention.o_proj.weight[:, own] = decoder.to(attention.o_proj.weight.dtype)


def _slow_dimensions(head_dim: int, base: float) -> list[int]:
    """Return the dimensions of queries and keys that hardly rotate with distance; pairs are half a head apart."""
    half = head_dim // 2
    pairs = [pair for pair in range(half) if base ** (-pair / half) <= _SLOW]
    return [*pairs, *(pair + half for pair in pairs)]


def _common_tokens(embeddings: nn.Module, readout: Readout, text: Tensor) -> tuple[Tensor, ...]:
    """Return embeddings and output rows ``[c, H]`` float64 of the commonest drafted tokens, and their weights ``[c]``."""
    rows = readout.weight
    drafted = torch.arange(rows.shape[0], device=rows.device) if readout.tokens is None else readout.tokens
    counts = torch.bincount(text.to(rows.device), minlength=int(drafted.max()) + 1)[drafted]
    top = counts.topk(min(_COMMON, counts.shape[0]))
    weights = (top.values.double() + 0.1).sqrt()  # the root limits common tokens, so that rare ones stay distinguishable
    places = top.indices
    return embeddings(drafted[places]).double(), rows.detach()[places].double(), weights / weights.sum()


def _whitening(rows: Tensor, weights: Tensor) -> Tensor:
    """Return ``[H, H]`` that gives all directions of some rows the same variance and removes what all rows share."""
    mean = weights @ rows
    spread = (rows - mean).T @ (weights[:, None] * (rows - mean))
    variances, directions = torch.linalg.eigh(spread)
    minimum = torch.maximum(_FLOOR * variances.median(), _LEAST * variances[-1])
    white: Tensor = variances.clamp_min(minimum).rsqrt()[:, None] * directions.T
    common = torch.nn.functional.normalize(white @ mean, dim=0)
    return white - torch.outer(common, common @ white)


def _decoder(values: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return ``[H, d]`` from a token's value to a hidden state that raises the token's logit over the others' by 1.

    ``rows`` are the output rows ``[c, H]`` of the common tokens. The rise is the mean over the commonest of them.
    """
    rows = rows - weights @ rows
    spread = rows.T @ (weights[:, None] * rows)
    spread += _FLOOR * spread.diagonal().median() * torch.eye(len(spread), dtype=spread.dtype, device=spread.device)
    decoder: Tensor = torch.linalg.solve(spread, rows.T @ (weights[:, None] * values))
    some = slice(0, _CALIBRATED)
    return decoder / ((values[some] @ decoder.T) * rows[some]).sum(-1).mean()


def _set_rows(part: nn.Linear, rows: slice, blocks: list[tuple[list[int], slice, Tensor]]) -> None:
    """Set some outputs of a linear map to zero except for blocks: outputs among the rows, input columns, weights."""
    part.weight[rows] = 0
    for dims, columns, by in blocks:
        part.weight[[rows.start + dim for dim in dims], columns] = by.to(part.weight.dtype)
