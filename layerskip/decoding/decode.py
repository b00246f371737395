"""The decoding loop: draft, run one pass of the target, verify, commit.

Speculative decoding (arXiv 2211.17192). With a drafter that proposes nothing it is plain decoding. The loop knows no
particular drafter: whatever the drafter proposes, the output is the target's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip.decoding.checkpoint_settings import check_settings
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, VerifyOutput
from layerskip.decoding.sampling import Chooser, Sampling, largest_logits
from layerskip.decoding.stats import DecodeStats, Round
from layerskip.decoding.tree import tree_depth, tree_model
from layerskip.decoding.verify import Verdict, verify
from layerskip.device.transfer import begin_reading, copy_to_device
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache, generation_lock, release_cache
from layerskip.models.forward import Features, forward
from layerskip.models.positions import check_positions
from layerskip.models.prefill import Prefill, run_prefill
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import NotFinite, Target


@dataclass(frozen=True)
class DecodeResult:
    """The new tokens with the end-of-sequence token if there is one, their rounds, and why they end."""

    tokens: list[int]
    stats: DecodeStats
    finish: str  # ``eos``, ``stop`` or ``length``


@dataclass(frozen=True)
class Stops:
    """Where an output ends before its greatest length.

    With its own ``eos_ids``, a caller replaces all settings of the checkpoint. Without, those must be those of the sampling.
    """

    eos_ids: frozenset[int] | None = None  # the tokens that end the sequence; None for those of the target
    criterion: Callable[[list[int]], bool] | None = None  # called with all tokens after each new one; True ends the output


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int] | Prefill,
    sampling: Sampling,
    max_new_tokens: int,
    *,
    stops: Stops = Stops(),
    callback: Callable[[list[int]], None] | None = None,
    seed: int | None = None,
) -> DecodeResult:
    """Continue a prompt with exactly the tokens that the target alone would produce.

    Args:
        prompt: token ids, at least one; or their stored prefill. They are then read again only for a drafter that reads
            hidden states.
        max_new_tokens: at least 1.
        callback: called with the first token after prefill, then with the committed tokens of every round.
        seed: makes sampling repeatable.

    Raises:
        ValueError: the prompt is empty, or ``max_new_tokens`` is below 1.
        UnsupportedModel: the model has fewer positions, or would change its rotary embedding within the text.
        TargetError: see :func:`~layerskip.decoding.checkpoint_settings.check_settings`.
        NotFinite: the target gives no distribution.
    """
    if stops.eos_ids is None:
        check_settings(target, sampling)
    tokens, known = (list(prompt.tokens), prompt) if isinstance(prompt, Prefill) else (list(prompt), None)
    if not tokens:
        raise ValueError("prompt: is empty")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens} is not at least 1")
    length, max_length = len(tokens), len(tokens) + max_new_tokens
    check_positions(target.model, length, max_length)
    chooser = Chooser(sampling, target.vocabulary, target.device, seed)
    with generation_lock(target.model):
        cache = acquire_cache(target.model, target.layers, max_length + drafter.tree_tokens, target.device)
        try:
            loop = _Loop(target, drafter, cache, chooser, stops, max_length)
            committed = loop.prefill(tokens, known)
            rounds: list[Round] = []
            while True:
                if callback is not None:
                    callback(committed)
                if loop.finish is not None:
                    return DecodeResult(loop.context.tokens[length:], DecodeStats(tuple(rounds)), loop.finish)
                committed, counts = loop.run_round()
                rounds.append(counts)
        finally:  # also after an exception of a callback; the captured passes stay valid
            release_cache(target.model, cache)


class _Loop:
    """The state of one decoding: :meth:`prefill` once, then :meth:`run_round` until there is a reason to ``finish``."""

    context: Context
    finish: str | None = None

    def __init__(
        self, target: Target, drafter: Drafter, cache: KVCache, chooser: Chooser, stops: Stops, max_length: int
    ) -> None:
        self._name, self._view, self._device = target.name, decoding_view(target.model), target.device
        self._drafter, self._cache, self._chooser = drafter, cache, chooser
        self._eos_ids = target.eos_ids if stops.eos_ids is None else stops.eos_ids
        self._criterion, self._max_length = stops.criterion, max_length
        self._features = Features() if drafter.reads_features else None
        self._trees = tree_model(target.model) if drafter.tree_tokens else None
        self._only_largest = chooser.sampling.needs_largest_only and not drafter.reads_logits
        # Of plain decoding with static shapes: the logits of the next pass, which is launched before a token is read.
        self._ahead: Tensor | None = None
        self._runs_ahead = drafter.never_drafts and cache.may_be_static and not chooser.sampling.needs_seen

    def prefill(self, prompt: list[int], known: Prefill | None) -> list[int]:
        """Read the prompt, commit the target's first token and start the drafter."""
        chooser, cache, drafter = self._chooser, self._cache, self._drafter
        chooser.observe(prompt)
        block = copy_to_device(prompt, self._device)
        if known is None or self._features is not None:
            logits = run_prefill(self._view, block, cache, features=self._features)
        else:
            logits = known.restore(cache)
        distribution = chooser.distribution(logits, block[-1:])
        late = [largest_logits(logits, distribution)]
        verdict = verify(Draft.empty(self._device), distribution, chooser.generator, late)
        self.context = Context(list(prompt), verdict.last)
        self._check_finite(verdict.late[0])
        committed = self._commit(verdict.committed)
        if self.finish is None:
            drafter.start(prompt, cache, chooser)
            if self._features is not None:
                drafter.observe_features(self._features.states)
        chooser.observe(committed)
        return committed

    def run_round(self) -> tuple[list[int], Round]:
        """Draft, run one pass of the target, verify and commit; return the committed tokens and the round's counts."""
        if self._runs_ahead:
            return self._run_plain_round()
        context, cache, chooser, drafter = self.context, self._cache, self._chooser, self._drafter
        # Every round adds one token of the target, so a draft may fill all remaining places but one.
        limit = self._max_length - len(context.tokens) - 1
        draft = drafter.draft(context, limit) if limit > 0 else Draft.empty(self._device)
        block = torch.cat((context.last, draft.tokens))
        if draft.parents is None:
            logits = self._forward(block, block.shape[0], self._features)
        else:
            assert self._trees is not None, "a drafter of trees states their tree_tokens"
            logits = self._trees.run(block, draft.parents, cache, self._features, self._only_largest)
        distribution = chooser.distribution(logits, block, draft.parents)
        late = drafter.observe_logits(VerifyOutput(block, logits))
        values = [largest_logits(logits, distribution), *(read.values for read in late)]
        verdict = verify(draft, distribution, chooser.generator, values)
        largest, *late_values = verdict.late
        self._check_finite([largest[row] for row in verdict.rows])
        if verdict.path is not None:
            cache.gather(verdict.rows)
        cache.length += verdict.accepted + 1
        committed = self._commit(verdict.committed)
        context.last = verdict.last
        chooser.observe(committed)
        if self.finish is None:
            if self._features is not None:
                rows = slice(verdict.accepted + 1) if verdict.path is None else copy_to_device(verdict.rows, self._device)
                drafter.observe_features(self._features.states[rows])
            drafter.observe(verdict)
            for read, read_values in zip(late, late_values, strict=True):
                read.receive(verdict, read_values)
        return committed, _count(verdict, len(committed))

    def _run_plain_round(self) -> tuple[list[int], Round]:
        """Choose the next token of plain decoding, and launch the pass after it before the host reads it.

        The device then computes while the host works. Where the output ends, one pass was launched in vain.
        """
        context, cache = self.context, self._cache
        logits = self._forward(context.last, 1) if self._ahead is None else self._ahead
        distribution = self._chooser.distribution(logits, context.last)
        token = self._chooser.choose(distribution)
        read = begin_reading(torch.cat((token, largest_logits(logits, distribution).double())))  # one copy for both
        cache.length += 1
        more = len(context.tokens) + 1 < self._max_length
        self._ahead = self._forward(token, 1) if more else None
        context.last = token
        chosen, largest = read()
        self._check_finite([largest])
        return self._commit([int(chosen)]), Round(0, 0, 1)

    def _forward(self, block: Tensor, last: int, features: Features | None = None) -> Tensor:
        """Run one pass of the target."""
        return forward(self._view, block, self._cache, last, features=features, only_largest=self._only_largest)

    def _commit(self, new: list[int]) -> list[int]:
        """Append new tokens to the sequence, one by one up to its end, and return the appended ones."""
        tokens, before = self.context.tokens, len(self.context.tokens)
        for token in new:
            tokens.append(token)
            if token in self._eos_ids:
                self.finish = "eos"
            elif self._criterion is not None and self._criterion(tokens):
                self.finish = "stop"
            elif len(tokens) >= self._max_length:
                self.finish = "length"
            if self.finish is not None:
                break
        return tokens[before:]

    def _check_finite(self, largest: Sequence[float]) -> None:
        """Raise :class:`NotFinite` unless the largest logits after the last token, and those after it, are finite."""
        for row, value in enumerate(largest):
            if not math.isfinite(value):
                raise NotFinite(self._name, len(self.context.tokens) - 1 + row, value)


def _count(verdict: Verdict, committed: int) -> Round:
    """Return the counts of a round. Tokens after the end of the output count neither as drafted nor as accepted."""
    drafted, accepted = len(verdict.drafted), min(verdict.accepted, committed)
    depth = None if verdict.parents is None else tree_depth(verdict.parents)
    if committed <= verdict.accepted:
        drafted, depth = (committed, None) if depth is None else (drafted, committed)
    return Round(drafted, accepted, committed, depth)
