"""Sampling: the distribution that a token is drawn from, made of the target's logits.

Target and draft, every row of a verification pass and the bonus token all go through the same :class:`Sampling`, because
speculative sampling is lossless only for the exact distribution that was sampled from (Fast Inference from Transformers via
Speculative Decoding, arXiv 2211.17192, appendix A.1). Processors run in the order of ``transformers.generate``: repetition
penalty (arXiv 1909.05858), temperature, top-k, top-p (arXiv 1904.09751), min-p (arXiv 2407.01082).

A distribution over V tokens has one of two forms: ``[n, V]`` float32 rows that sum to 1, or, if every row is one-hot (greedy
decoding), ``[n]`` int64 with the index of each row's one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerskip.decoding.draft import DeviceTree
from layerskip.decoding.tree import tree_shape
from layerskip.device.transfer import copy_to_device
from layerskip.kernels.cpu import find_likeliest

_FLOAT32 = torch.finfo(torch.float32)


class SamplingError(ValueError):
    """A sampling parameter is out of range; the message begins with the field."""


@dataclass(frozen=True)
class Sampling:
    """The choice of tokens, with the parameters of ``transformers.generate``.

    Args:
        temperature: at least 0; 0 is greedy decoding.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this total probability, in (0, 1].
        min_p: drop tokens below this share of the most likely token's probability, in [0, 1].
        repetition_penalty: above 0; the logits of tokens seen so far are divided (positive) or multiplied (negative) by it.

    Raises:
        SamplingError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise SamplingError(f"{name}: {value!r} is not a number")
        for name, valid, expected in (
            ("temperature", 0.0 <= self.temperature < float("inf"), "at least 0"),
            ("top_k", 0 <= self.top_k < float("inf") and self.top_k == int(self.top_k), "a whole number of at least 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < float("inf"), "above 0"),
        ):
            if not valid:
                raise SamplingError(f"{name}: {getattr(self, name)!r} is not {expected}")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Sampling:
        """Build from plain values; an unknown key is refused."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise SamplingError(f"{name}: is not a field of sampling; the fields are {', '.join(known)}")
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_largest_only(self) -> bool:
        """Whether the distribution depends on the largest logit alone."""
        return self.greedy and not self.needs_seen

    @property
    def needs_seen(self) -> bool:
        """Whether the distribution depends on the tokens that came before."""
        return self.repetition_penalty != 1.0

    def distribution(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the distribution of each row's next token, in the form that the module describes.

        Args:
            logits: ``[n, V]`` in any floating dtype.
            seen: ``[n, V]`` bool, the tokens in each row's own prefix; required if ``needs_seen``.
        """
        if self.greedy:
            return most_likely(self.penalise(logits, seen) if self.needs_seen else logits)
        scores = self.penalise(logits, seen)
        # At extreme temperatures neither they nor the quotients may overflow: the largest score becomes 0.
        temperature = min(max(self.temperature, _FLOAT32.tiny), _FLOAT32.max)
        return self._filter((scores - scores.amax(-1, keepdim=True)) / temperature).softmax(-1)

    def penalise(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the logits after the repetition penalty, before temperature and filters: ``[n, V]`` float32."""
        scores = logits.float()
        if not self.needs_seen:
            return scores
        if seen is None:
            raise ValueError("seen: is required by the repetition penalty")
        penalty = min(max(self.repetition_penalty, _FLOAT32.tiny), _FLOAT32.max)  # beyond it, 0 becomes 0 / 0
        penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
        return torch.where(seen, penalised.clamp_max(_FLOAT32.max), scores)  # an extreme penalty overflows

    def _filter(self, scores: Tensor) -> Tensor:
        dropped = -float("inf")
        if 0 < self.top_k < scores.shape[-1]:
            kth = scores.topk(int(self.top_k), dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth, dropped)
        if self.top_p < 1.0:
            ascending, order = scores.sort(dim=-1)
            below = ascending.softmax(-1).cumsum(-1) <= 1.0 - self.top_p
            below[..., -1] = False  # rounding must not drop the most likely token
            scores = scores.masked_fill(below.scatter(-1, order, below), dropped)
        if self.min_p > 0.0:
            probs = scores.softmax(-1)
            scores = scores.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), dropped)
        return scores


def most_likely(logits: Tensor) -> Tensor:
    """Return the index of each row's maximum, the first of several: ``[..., V]`` to ``[...]`` int64."""
    found = find_likeliest(logits)
    return logits.max(-1).indices if found is None else found[0]  # on a CPU in bfloat16 faster than argmax


def largest_logits(logits: Tensor, distribution: Tensor) -> Tensor:
    """Return ``[n]``: each row's largest logit, which is finite if and only if the row has a distribution.

    Args:
        distribution: of the ``[n, V]`` logits, in either form.
    """
    if distribution.dtype == torch.int64:  # found already; a repetition penalty keeps what is not finite
        return logits.gather(-1, distribution[:, None])[:, 0]
    return logits.amax(-1)


def draw(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one index per row in proportion to its weights, without waiting for the device: ``[...]`` int64.

    An exponential race: the index with the smallest arrival time ``e / weight`` wins with a probability proportional to its
    weight. The weights, ``[..., V]`` float32, are at least 0 and have a positive sum; they need not be normalised.
    """
    arrival = torch.empty_like(weights).exponential_(generator=generator)
    # An arrival time of exactly 0 would turn a weight of 0 into 0/0, and argmax returns NaN before any number.
    return most_likely(weights.div(arrival.clamp_min_(torch.finfo(weights.dtype).tiny)))


def to_full_vocabulary(probs: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """Return ``[n, vocabulary]`` probabilities from ``[n, v]`` probabilities of the tokens ``[v]``; other tokens get 0."""
    return probs.new_zeros(probs.shape[0], vocabulary).index_copy_(1, tokens, probs)


class Chooser:
    """The choice of tokens in one decoding: its sampling, its source of randomness, and the tokens seen so far.

    Target and drafter share one chooser, so the draft's q and the target's p go through the same warping. Without a
    ``seed``, torch's global generator is used.
    """

    def __init__(self, sampling: Sampling, vocabulary: int, device: torch.device, seed: int | None = None) -> None:
        self.sampling, self.vocabulary = sampling, vocabulary
        self.generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device) if sampling.needs_seen else None

    def observe(self, tokens: Sequence[int]) -> None:
        """Add tokens that have joined the sequence."""
        if self._seen is not None:
            self._seen[copy_to_device(tokens, self._seen.device)] = True

    def distribution(
        self,
        logits: Tensor,
        block: Tensor,
        parents: Sequence[int] | DeviceTree | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the distributions after the last n tokens of a block that continues the sequence.

        Args:
            logits: ``[n, V]``, or ``[n, v]`` for a part of the vocabulary, whose columns the result has, too.
            block: ``[m]`` int64, m >= n: the last token of the sequence, then drafted tokens. The repetition penalty of row
                i counts its own prefix: the sequence and the block up to the row's token.
            parents: of a tree, as in :class:`~layerskip.decoding.draft.Draft`; the block is then the root and all nodes.
            tokens: ``[v]`` int64, the tokens of the columns of ``logits``; None for the whole vocabulary.
        """
        if self._seen is None:
            return self.sampling.distribution(logits)
        rows, size = logits.shape[0], block.shape[0]
        if parents is None:
            precedes = torch.ones(rows, size, dtype=torch.bool, device=block.device).tril(size - rows)
        else:
            precedes = tree_shape(parents, block.device)[1]
        # The root, which precedes all, stands in for tokens that do not precede a row.
        seen = self._seen.repeat(rows, 1).scatter_(1, torch.where(precedes, block, block[0]), True)
        return self.sampling.distribution(logits, seen if tokens is None else seen.index_select(1, tokens))

    def choose(self, distribution: Tensor) -> Tensor:
        """Return one token per row, ``[n]`` int64, for either form of distribution."""
        return distribution if distribution.dtype == torch.int64 else draw(distribution, self.generator)
