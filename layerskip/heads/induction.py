"""Where was a text like this before, and what followed there? Attention that knows it before it learns anything.

In-context Learning and Induction Heads (arXiv 2209.11895): language models copy by two layers, of which the first tells
every token which one came before it, and the second looks for the token at hand among those. Attention that reads the
embeddings of tokens before each (``lookback`` of an EAGLE head) needs one layer, and no training for it: queries and keys
are the same projection of the token at hand and of the one before another, values are projections of that other, and what is
made of those has the target's output layer say it. On SmolLM2 150 seconds of training did not come upon this by themselves:
0.30 of first tokens with the embeddings alone, 0.31 without, 0.51 from such a beginning.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.heads.eagle import EagleHead
from layerskip.heads.readout import Readout

_COMMON = 8192  # tokens, at most, by which embeddings are told apart
_SLOW = 2e-3  # radians that a number turns by from token to token, at most, where texts of some hundred tokens are matched
_GROUPS = 3  # of key heads, at most, that copy
_MATCH = 11.0  # score of a whole match before attention's softmax: a hundred others that match by half weigh less
_BOOST = 3.0  # logits, all heads together, for what followed such a match
_FLOOR = 0.05  # of the median, below which no direction's variance is taken
_LEAST = 1e-4  # nor below so much of the largest: few tokens span few directions
_CALIBRATED = 512  # tokens


@torch.no_grad()
def induce(head: EagleHead, embeddings: nn.Module, readout: Readout, said: Tensor) -> None:
    """Have some of a head's attention copy what followed the last two tokens, or the last one, earlier on.

    In each of up to three groups of heads that share their keys, the first looks for both tokens and the second for the last
    one; where every head has its own keys, they do so in turns. Of further heads the queries stay as they are.

    Args:
        head: in the target's units; one that does not look back is left as it is, and so is one of three layers, whose own
            norm stands before the output layer.
        embeddings: the target's.
        readout: the target's output layer over what is drafted from.
        said: ``[n]`` int64: what the target says, for how often it says each token.
    """
    shape = head.shape
    layer: Any = head.body.layers[0]
    attention = layer.self_attn
    slow = _slow(shape.head_dim, shape.rope_theta)
    seen = min(2, shape.lookback)
    each = len(slow) // seen if seen else 0  # numbers that tell a token
    if not each or len(shape.modules) > 1:
        return
    embedded, saying, weights = _common(embeddings, readout, said)
    whitened = _whitening(embedded, weights)
    draws = torch.Generator().manual_seed(0)

    def projection(count: int) -> Tensor:
        drawn = torch.randn(count, shape.hidden, generator=draws, dtype=torch.float64)
        return drawn.to(embedded.device) / math.sqrt(shape.hidden) @ whitened

    # Behind what the linear map makes: a token, the one before it, and the one before that.
    columns = [slice((1 + back) * shape.hidden, (2 + back) * shape.hidden) for back in range(1 + seen)]
    sharing = shape.heads // shape.key_value_heads
    groups, copying = min(_GROUPS, shape.key_value_heads), min(seen, sharing)
    for group in range(groups):
        rows = slice(group * shape.head_dim, (group + 1) * shape.head_dim)
        known = [(slow[back * each : (back + 1) * each], projection(each)) for back in range(seen)]
        _set(attention.k_proj, rows, [(numbers, columns[1 + back], by) for back, (numbers, by) in enumerate(known)])
        value = projection(shape.head_dim)
        _set(attention.v_proj, rows, [(list(range(shape.head_dim)), columns[0], value)])
        codes = embedded @ value.T
        made = _decoded(codes, saying, weights)
        made *= _BOOST / (groups * copying) / (readout.scale * _gain(codes, made, saying, weights))
        for copier in range(copying):
            sought = known if (copier if sharing > 1 else group) % 2 == 0 else known[:1]
            sharp = _MATCH * math.sqrt(shape.head_dim) / (each * len(sought))
            own = slice((group * sharing + copier) * shape.head_dim, (group * sharing + copier + 1) * shape.head_dim)
            _set(attention.q_proj, own, [(numbers, columns[back], sharp * by) for back, (numbers, by) in enumerate(sought)])
            attention.o_proj.weight[:, own] = made.to(attention.o_proj.weight.dtype)


def _slow(head_dim: int, base: float) -> list[int]:
    """The numbers of a query or key that hardly turn with distance; pairs lie half a head apart."""
    half = head_dim // 2
    pairs = [pair for pair in range(half) if base ** (-pair / half) <= _SLOW]
    return [*pairs, *(pair + half for pair in pairs)]


def _common(embeddings: nn.Module, readout: Readout, said: Tensor) -> tuple[Tensor, ...]:
    """Of the commonest drafted tokens: ``[c, H]`` float64 embeddings and output rows, and ``[c]`` what each weighs."""
    rows = readout.weight
    drafted = torch.arange(rows.shape[0], device=rows.device) if readout.tokens is None else readout.tokens
    counts = torch.bincount(said.to(rows.device), minlength=int(drafted.max()) + 1)[drafted]
    found = counts.topk(min(_COMMON, counts.shape[0]))
    weights = (found.values.double() + 0.1).sqrt()  # a common token is no reason not to tell rare ones apart
    places = found.indices
    return embeddings(drafted[places]).double(), rows.detach()[places].double(), weights / weights.sum()


def _whitening(rows: Tensor, weights: Tensor) -> Tensor:
    """``[H, H]``: what gives each direction of some rows the same variance, and takes out what all have in common."""
    mean = weights @ rows
    spread = (rows - mean).T @ (weights[:, None] * (rows - mean))
    variances, directions = torch.linalg.eigh(spread)
    least = torch.maximum(_FLOOR * variances.median(), _LEAST * variances[-1])
    white: Tensor = variances.clamp_min(least).rsqrt()[:, None] * directions.T
    common = torch.nn.functional.normalize(white @ mean, dim=0)
    rest: Tensor = white - torch.outer(common, common @ white)
    return rest


def _decoded(codes: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """``[H, d]``: from a token's ``[d]`` code, hidden states for which the output layer's ``[c, H]`` rows say that token."""
    rows = rows - weights @ rows
    spread = rows.T @ (weights[:, None] * rows)
    spread += _FLOOR * spread.diagonal().median() * torch.eye(len(spread), dtype=spread.dtype, device=spread.device)
    made: Tensor = torch.linalg.solve(spread, rows.T @ (weights[:, None] * codes))
    return made


def _gain(codes: Tensor, made: Tensor, rows: Tensor, weights: Tensor) -> float:
    """By how much what is made of common tokens' codes raises their own logits above the others', in the mean."""
    some = slice(0, _CALIBRATED)
    return float(((codes[some] @ made.T) * (rows[some] - weights @ rows)).sum(-1).mean())


def _set(part: nn.Linear, rows: slice, blocks: list[tuple[list[int], slice, Tensor]]) -> None:
    """Have some outputs of a linear map read nothing but what is given: which of them, from which inputs, and how."""
    part.weight[rows] = 0
    if part.bias is not None:
        part.bias[rows] = 0
    for numbers, columns, by in blocks:
        part.weight[[rows.start + number for number in numbers], columns] = by.to(part.weight.dtype)
