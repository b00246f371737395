"""Training losses of heads, and the acceptance of their drafts on stored hidden states.

Heads learn the target's next-token distribution from stored hidden states (distillation, arXiv 1503.02531, section 2). They
are unrolled: after the target's hidden state they read their own, as they do when they draft several tokens in a row
(training-time test, EAGLE-3, arXiv 2503.01840, section 3.2). The loss is computed a few rows at a time, because logits over
a whole vocabulary are by far the largest tensors, and a few rows stay in a processor's caches.

During training a head is rescaled so that all its inputs have a root mean square of about 1: AdamW (arXiv 1711.05101) moves
every weight by about the same amount, and embeddings are a twentieth as large as hidden states. A rescaled head computes the
same function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import DynamicCache

from layerskip.heads.eagle import EagleHead
from layerskip.heads.feature_store import TextFeatures
from layerskip.heads.readout import Readout

_ROWS = 128  # at a time on a CPU
_ROWS_ON_DEVICES = 2048
_DISCOUNT = 0.8  # weight of each further token of a draft, relative to the one before
_FEATURE_WEIGHT = 0.1  # weight of the hidden states' own loss


def cross_entropy(readout: Readout, hidden: Tensor, target_hidden: Tensor) -> Tensor:
    """Return the mean cross entropy of the predicted token distributions to the target's, a float32 scalar.

    Of the hidden states ``[n, H]``, n >= 1, only the predicted ones take a gradient.
    """
    loss: Tensor = _CrossEntropy.apply(hidden, target_hidden, readout)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def most_likely_tokens(readout: Readout, hidden: Tensor) -> Tensor:
    """Return ``[n]`` int64: the most likely token of each of ``[n, H]`` hidden states."""
    return readout.tokens_at(torch.cat([readout(some).argmax(-1) for (some,) in _portions(readout, hidden)]))


class _CrossEntropy(torch.autograd.Function):
    """The loss with its gradient, computed together, so that no logits have to be kept or recomputed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, target_hidden: Tensor, readout: Readout) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        gradients: list[Tensor] = []
        for some, target_some in _portions(readout, hidden.detach(), target_hidden):
            wanted = readout(target_some).float().softmax(-1)
            with torch.enable_grad():
                some.requires_grad_()
                loss = -(wanted * readout(some).float().log_softmax(-1)).sum() / hidden.shape[0]
                gradients += torch.autograd.grad(loss, some)
            total += loss.detach()
        ctx.save_for_backward(torch.cat(gradients).to(hidden.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0], None, None


def _portions(readout: Readout, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = _ROWS if rows[0].device.type == "cpu" else _ROWS_ON_DEVICES
    return zip(*(torch.split(some.to(readout.weight.dtype), size) for some in rows), strict=True)


@torch.no_grad()
def measure_scales(embeddings: nn.Module, texts: Iterable[TextFeatures]) -> tuple[float, float]:
    """Return the scales of the target's embeddings and hidden states: their root mean squares over answers.

    They are rounded to powers of two, which scale without rounding errors.
    """
    device = next(embeddings.parameters()).device
    answers = [(text.tokens[text.begin :].to(device), text.features[text.begin :].to(device)) for text in texts]
    tokens, states = (torch.cat(parts) for parts in zip(*answers, strict=True))
    sizes = (float(part.float().square().mean().sqrt()) for part in (embeddings(tokens), states))
    of_embeddings, of_states = (2.0 ** round(math.log2(size)) if size else 1.0 for size in sizes)
    return of_embeddings, of_states


@torch.no_grad()
def rescale(head: EagleHead, of_embeddings: float, of_states: float) -> None:
    """Make a head read and return the target's values divided by these scales; 1 and 1 are the target's own scale."""
    by_embeddings, by_states = of_embeddings / head.scales[0], of_states / head.scales[1]
    head.scales = of_embeddings, of_states
    layer: Any = head.body.layers[0]
    attention, width = layer.self_attn, head.shape.hidden
    head.fc.weight[:, :width] *= by_embeddings / by_states
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        part.weight[:, :width] *= by_states  # no norm comes before them
        part.weight[:, width:] *= by_embeddings
    for part in (attention.o_proj, layer.mlp.down_proj):
        part.weight /= by_states
    layer.post_attention_layernorm.variance_epsilon /= by_states**2


@dataclass(frozen=True)
class Batch:
    """Texts of similar length, padded."""

    tokens: Tensor  # ``[B, n]`` int64
    states: Tensor  # ``[B, n, H]`` float32: the target's hidden states at each token
    predicted: Tensor  # ``[B, n]`` bool: whether a token is to be predicted

    @classmethod
    def of(cls, texts: Sequence[TextFeatures], device: torch.device | str, whole: bool = False) -> Batch:
        """Pad some texts; ``whole`` also predicts the tokens of prompts, whose distributions are as good to learn from."""

        def padded(rows: Iterable[Tensor]) -> Tensor:
            return nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)

        places = (torch.arange(len(text.tokens)) >= (1 if whole else text.begin) for text in texts)
        tokens, states = padded(text.tokens for text in texts), padded(text.features for text in texts)
        return cls(tokens, states.float(), padded(places))


@dataclass(frozen=True)
class HeadPrediction:
    """A head's predictions of the token at one distance."""

    hidden: Tensor  # ``[n, H]``: the predicted hidden states
    target_hidden: Tensor  # ``[n, H]``: the target's, which its output layer reads
    tokens: Tensor  # ``[n]`` int64: the following token of the text
    mask: Tensor  # ``[B, m]`` bool: the positions of the n rows, in order


def predict_tokens(head: EagleHead, embeddings: nn.Module, batch: Batch, steps: int) -> list[HeadPrediction]:
    """Predict the next ``steps`` tokens from every hidden state whose next token is to be predicted."""
    rows, device = batch.tokens.shape[1] - steps - 1, batch.tokens.device
    if rows < 1:
        return []
    with torch.no_grad():
        embedded = embeddings(batch.tokens).float() / head.scales[0]
        embedded = head.with_lookback(embedded, embedded.shape[1])
    causal = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    own = torch.eye(rows, dtype=torch.bool, device=device)
    cache, states, predictions = DynamicCache(), batch.states[:, :rows] / head.scales[1], []
    for step in range(steps):
        visible = torch.cat((causal, *[own] * step), dim=-1)[None, None].expand(embedded.shape[0], 1, -1, -1)
        positions = (torch.arange(rows, device=device) + step)[None].expand(embedded.shape[0], -1)
        here, ahead = slice(step + 1, step + 1 + rows), slice(step + 2, step + 2 + rows)
        states = head(embedded[:, here], states, cache, positions, visible)
        # Row i predicts the hidden state at token i + step + 1, which predicts token i + step + 2.
        mask = batch.predicted[:, ahead]
        hidden = states[mask] * head.scales[1]
        predictions.append(HeadPrediction(hidden, batch.states[:, here][mask], batch.tokens[:, ahead][mask], mask))
    return predictions


@torch.no_grad()
def fit_linear(head: EagleHead, embeddings: nn.Module, texts: Iterable[TextFeatures], ridge: float = 1e-3) -> None:
    """Set the linear map of a head to the best predictor of the next hidden state, from which training starts.

    ``ridge`` is the penalty of large weights, as a share of each input's mean square.
    """
    weight = head.fc.weight
    squares = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64, device=weight.device)
    products = torch.zeros(weight.shape[1], weight.shape[0], dtype=torch.float64, device=weight.device)
    for text in texts:
        # The first position's state is an outlier.
        first = max(1, text.begin - 1)
        states = text.features.to(weight.device).float()
        rows = torch.cat((embeddings(text.tokens.to(weight.device))[first + 1 :].float(), states[first:-1]), -1)
        squares += (rows.T @ rows).double()
        products += (rows.T @ states[first + 1 :]).double()
    # A share of each input's own mean square, because embeddings are a hundredth of hidden states.
    squares += torch.diag(ridge * squares.diagonal().clamp_min(1e-12))
    weight.copy_(torch.linalg.solve(squares, products).T)


def head_loss(predictions: Sequence[HeadPrediction], readout: Readout) -> Tensor:
    """Return the cross entropy to the target's distribution, discounted by distance, plus the hidden states' loss."""
    total = torch.zeros((), device=predictions[0].hidden.device if predictions else None)
    for step, prediction in enumerate(predictions):
        if prediction.hidden.shape[0]:
            loss = cross_entropy(readout, prediction.hidden, prediction.target_hidden)
            regression = smooth_l1_loss(prediction.hidden.float(), prediction.target_hidden)
            total = total + _DISCOUNT**step * (loss + _FEATURE_WEIGHT * regression)
    return total


@torch.no_grad()
def acceptance(
    head: EagleHead, embeddings: nn.Module, readout: Readout, texts: Iterable[TextFeatures], steps: int
) -> list[float]:
    """Return, for each distance up to ``steps``, the acceptance of drafts that are right before it, over all positions.

    The readout has the head's tokens. Decoding also drafts the tokens of the text, and accepts more.
    """
    tried, accepted = [0] * steps, [0] * steps
    for text in texts:
        batch = Batch.of([text], readout.weight.device)
        reached = batch.predicted.new_ones(())  # positions at which all drafts before are right
        for step, prediction in enumerate(predict_tokens(head, embeddings, batch, steps)):
            right = most_likely_tokens(readout, prediction.hidden) == prediction.tokens
            reached = reached & prediction.mask
            tried[step] += int(reached.sum())
            reached = reached & torch.zeros_like(prediction.mask).masked_scatter(prediction.mask, right)
            accepted[step] += int(reached.sum())
    return [right / count if count else 0.0 for right, count in zip(accepted, tried, strict=True)]
