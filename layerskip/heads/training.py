"""What does a head lose to its target? Losses to train by, and how often its drafts would be accepted.

Both kinds learn the target's own next-token distribution from hidden states that were read before. EAGLE heads are unrolled:
behind the target's hidden state they read their own, as they do when drafting several tokens in a row (training-time test,
EAGLE-3, arXiv 2503.01840, section 3.2), every step seeing the target's states before it and its own branch alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import DynamicCache

from layerskip.heads.distillation import cross_entropy, drafted
from layerskip.heads.eagle import EagleHead
from layerskip.heads.feature_store import Thought
from layerskip.heads.medusa import MedusaHeads
from layerskip.heads.readout import Readout
from layerskip.heads.scaling import NATURAL, Units

_FADING = 0.8  # weight of each further token of a draft
_FEATURES = 0.1  # weight of the hidden states' own loss


@dataclass(frozen=True)
class Batch:
    """Texts of about the same length, padded.

    Args:
        tokens: ``[B, n]`` int64.
        read: ``[B, n, F]``: the hidden states behind each that a head reads, in its units.
        final: ``[B, n, H]``: those that the target's output layer reads.
        sought: ``[B, n]`` bool: whether a token is one to be foretold.
        units: the head's.
    """

    tokens: Tensor
    read: Tensor
    final: Tensor
    sought: Tensor
    units: Units

    @classmethod
    def of(
        cls, texts: Sequence[Thought], head: EagleHead | MedusaHeads, units: Units = NATURAL, whole: bool = False
    ) -> Batch:
        """Pad some texts.

        Args:
            texts: with the features of :func:`stored_modules`.
            head: that shall foretell them.
            units: the head's.
            whole: whether prompts are to be foretold, too: what the target would have said there is as good to learn from.
        """
        width = head.shape.hidden
        longest = max(text.tokens.shape[0] for text in texts)

        def pad(rows: list[Tensor]) -> Tensor:
            return nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)

        device = next(head.parameters()).device
        place = torch.arange(longest)
        begins = [1 if whole else text.begin for text in texts]
        ends = [text.tokens.shape[0] for text in texts]
        sought = torch.stack([(place >= begin) & (place < end) for begin, end in zip(begins, ends, strict=True)])
        features = pad([text.features for text in texts]).float()
        read = features[..., : width * len(head.shape.modules)]
        tokens = pad([text.tokens for text in texts])
        return cls(tokens, read / units.read, features[..., -width:], sought.to(device), units)


def stored_modules(modules: tuple[str, ...], final: str) -> tuple[str, ...]:
    """What has to be stored for a head that reads some modules: those, and what the output layer reads."""
    return modules if modules == (final,) else (*modules, final)


@dataclass(frozen=True)
class Foretold:
    """What a head says of one further token.

    Args:
        made: ``[n, H]``: the hidden states that it has the target's output layer read.
        final: ``[n, H]`` float32: those that the target has it read.
        own: ``[n]`` int64: the token that follows, which in an answer is the one that the target says.
        alive: ``[B, m]`` bool: the rows that the n are of, in order.
        nears: whether the one is meant to come near the other.
    """

    made: Tensor
    final: Tensor
    own: Tensor
    alive: Tensor
    nears: bool


def foretell(head: EagleHead | MedusaHeads, embeddings: nn.Module, batch: Batch, steps: int) -> list[Foretold]:
    """What a head says of the next tokens, from every hidden state whose next token is sought.

    Args:
        head: EAGLE's or Medusa's.
        embeddings: the target's.
        batch: of texts.
        steps: how many tokens ahead.
    """
    rows = batch.tokens.shape[1] - steps - 1
    if rows < 1:
        return []
    if isinstance(head, EagleHead):
        hidden, nears = _unroll(head, embeddings, batch, rows, steps), len(head.shape.modules) == 1
    else:
        hidden, nears = list(head(batch.read[:, :rows]).unbind(-2)), False
    found = []
    for step in range(min(steps, len(hidden))):
        # Row i of a step stands for the hidden state behind token i + step + 1, which says token i + step + 2.
        ahead = slice(step + 2, step + 2 + rows)
        alive = batch.sought[:, ahead]
        final = batch.final[:, step + 1 : step + 1 + rows][alive]
        made = hidden[step][alive] * batch.units.states
        found.append(Foretold(made, final, batch.tokens[:, ahead][alive], alive, nears))
    return found


@torch.no_grad()
def fit_linear(head: EagleHead, embeddings: nn.Module, texts: Iterable[Thought], ridge: float = 1e-3) -> None:
    """Set the linear map to what gives the next hidden state best, in closed form: where training begins.

    Args:
        head: one that reads what the target's output layer does; any other is left as it is.
        embeddings: the target's.
        texts: their hidden states.
        ridge: how much large weights cost, as a share of the inputs' mean square.
    """
    if len(head.shape.modules) > 1:
        return
    width = 2 * head.shape.hidden + head.shape.bias
    device = head.fc.weight.device
    squares = torch.zeros(width, width, dtype=torch.float64, device=device)
    products = torch.zeros(width, head.shape.hidden, dtype=torch.float64, device=device)
    for text in texts:
        # The first position's state is like no other's.
        first = max(1, text.begin - 1)
        states = text.features[..., -head.shape.hidden :].to(device).float()
        inputs = [embeddings(text.tokens.to(device))[first + 1 :].float(), states[first:-1]]
        if head.shape.bias:
            inputs.append(torch.ones_like(inputs[0][:, :1]))
        rows = torch.cat(inputs, -1)
        squares += (rows.T @ rows).double()
        products += (rows.T @ states[first + 1 :]).double()
    # Each input's share, as embeddings are a hundredth of hidden states.
    squares += torch.diag(ridge * squares.diagonal().clamp_min(1e-12))
    solved = torch.linalg.solve(squares, products).T.to(head.fc.weight.dtype)
    head.fc.weight.copy_(solved[:, : 2 * head.shape.hidden])
    if head.shape.bias:
        head.fc.bias.copy_(solved[:, -1])


def loss_of(found: Sequence[Foretold], readout: Readout) -> Tensor:
    """The cross entropy to the target's distribution, further tokens counting less, and the hidden states' loss.

    Args:
        found: as :func:`foretell` gives it.
        readout: the target's output layer over what is drafted from.
    """
    total = torch.zeros((), device=found[0].made.device if found else None)
    for step, one in enumerate(found):
        if one.made.shape[0]:
            loss = cross_entropy(readout, one.made, one.final)
            if one.nears:
                loss = loss + _FEATURES * smooth_l1_loss(one.made.float(), one.final)
            total = total + _FADING**step * loss
    return total


@torch.no_grad()
def agreements(found: Sequence[Foretold], readout: Readout) -> list[tuple[int, int]]:
    """For each further token: how many drafts had been right so far, and how many were right there, too.

    Args:
        found: as :func:`foretell` gives it.
        readout: the target's output layer over what is drafted from.
    """
    counts = []
    reached: Tensor | None = None
    for one in found:
        right = drafted(readout, one.made) == one.own
        table = torch.zeros_like(one.alive).masked_scatter(one.alive, right)
        before = one.alive if reached is None else one.alive & reached
        counts.append((int(before.sum()), int((before & table).sum())))
        reached = before & table
    return counts


@torch.no_grad()
def acceptance(
    head: EagleHead | MedusaHeads,
    embeddings: nn.Module,
    readout: Readout,
    texts: Iterable[Thought],
    steps: int,
    units: Units = NATURAL,
) -> list[float]:
    """For each further token of a chain: how often a draft that was right so far is right there, all positions counted.

    Args:
        head: EAGLE's or Medusa's.
        embeddings: the target's.
        readout: the target's output layer over the head's tokens; decoding drafts the text's own, too, and accepts more.
        texts: with the features of :func:`stored_modules`.
        steps: how many tokens ahead.
        units: the head's.
    """
    counts = [(0, 0)] * steps
    for text in texts:
        tried = agreements(foretell(head, embeddings, Batch.of([text], head, units), steps), readout)
        counts = [(a + c, b + d) for (a, b), (c, d) in zip(counts, tried or [(0, 0)] * len(counts), strict=True)]
    return [right / tried if tried else 0.0 for tried, right in counts]


def _unroll(head: EagleHead, embeddings: nn.Module, batch: Batch, rows: int, steps: int) -> list[Tensor]:
    """``[B, rows, H]`` of every step."""
    device = batch.tokens.device
    with torch.no_grad():
        embedded = embeddings(batch.tokens).to(batch.read.dtype) / batch.units.embeddings
        embedded = head.look(embedded, embedded.shape[1])
    causal = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    own = torch.eye(rows, dtype=torch.bool, device=device)
    cache = DynamicCache()
    states, found = head.fuse(batch.read[:, :rows]), []
    for step in range(steps):
        visible = torch.cat((causal, *[own] * step), dim=-1)[None, None].expand(embedded.shape[0], 1, -1, -1)
        positions = (torch.arange(rows, device=device) + step)[None].expand(embedded.shape[0], -1)
        states = head(embedded[:, step + 1 : step + 1 + rows], states, cache, positions, visible)
        found.append(states)
    return found
