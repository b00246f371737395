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

from layerskip.config import EXACT, AcceptRule
from layerskip.decoding.checkpoint_settings import check_settings
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, VerifyOutput
from layerskip.decoding.sampling import Chooser, Sampling, largest_logits
from layerskip.decoding.stats import DecodeStats, Round
from layerskip.decoding.tree import TreeModel, tree_depth, tree_model
from layerskip.decoding.verify import Verdict, accept_lossy, verify
from layerskip.device.transfer import begin_reading, copy_to_device
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache, generation_lock, release_cache
from layerskip.models.forward import NO_FEATURES, Features, forward
from layerskip.models.positions import check_positions, check_rope_scaling
from layerskip.models.prefill import Prefill, run_prefill
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import NotFinite, Target


@dataclass(frozen=True)
class DecodeResult:
    """The output of one decoding.

    Args:
        tokens: the new tokens, including the end-of-sequence token if there is one.
        stats: the rounds that produced them.
        finish: the reason for the end: ``eos``, ``stop`` or ``length``.
    """

    tokens: list[int]
    stats: DecodeStats
    finish: str


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    sampling: Sampling,
    max_new_tokens: int,
    *,
    stops: Callable[[list[int]], bool] | None = None,
    callback: Callable[[list[int]], None] | None = None,
    on_prefill: Callable[[int], None] | None = None,
    seed: int | None = None,
    eos_ids: frozenset[int] | None = None,
    static_shapes: bool | None = None,
    accept: AcceptRule = EXACT,
    prefill: Prefill | None = None,
) -> DecodeResult:
    """Continue a prompt with exactly the tokens that the target alone would produce.

    Args:
        target: the model to decode with.
        drafter: proposes tokens.
        prompt: token ids, at least one.
        sampling: how tokens are chosen.
        max_new_tokens: at least 1.
        stops: called with all tokens, prompt included, after each new token; the output ends where it returns True.
        callback: called with the committed tokens of every round, in order.
        on_prefill: called once after prefill, with the number of new tokens known by then, which is 1.
        seed: makes sampling repeatable.
        eos_ids: the tokens that end the sequence, with which the caller replaces all settings of the checkpoint; None for
            those of the target, whose other settings must then be those of ``sampling``.
        static_shapes: see :func:`~layerskip.models.cache_pool.acquire_cache`.
        accept: the acceptance rule; any rule but the exact one changes the output.
        prefill: a stored prefill of the prompt. The prompt is then not read again, unless the drafter reads hidden states.

    Raises:
        ValueError: the prompt is empty, ``prefill`` has another length, or ``max_new_tokens`` is below 1.
        UnsupportedModel: the model has fewer positions, or would change its rotary embedding within the text.
        TargetError: see :func:`~layerskip.decoding.checkpoint_settings.check_settings`.
        NotFinite: the target gives no distribution.
    """
    if eos_ids is None:
        check_settings(target, sampling)
    if not prompt:
        raise ValueError("prompt: is empty")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens} is not at least 1")
    if prefill is not None and prefill.cache.length != len(prompt):
        raise ValueError(f"prefill: has {prefill.cache.length} tokens, the prompt has {len(prompt)}")
    check_positions(target.model, len(prompt), len(prompt) + max_new_tokens)
    check_rope_scaling(target.model, len(prompt), len(prompt) + max_new_tokens)
    chooser = Chooser(sampling, target.vocabulary, target.device, seed)
    end = _StoppingCriteria(target.eos_ids if eos_ids is None else eos_ids, len(prompt) + max_new_tokens, stops)
    room = end.max_length + drafter.tree_tokens
    with generation_lock(target.model):
        cache = acquire_cache(target.model, target.layers, room, target.device, static_shapes)
        try:
            loop = _Loop(target, drafter, cache, chooser, end, accept)
            committed = loop.prefill(prompt, prefill)
            if on_prefill is not None:
                on_prefill(1)
            if callback is not None:
                callback(committed)
            rounds: list[Round] = []
            while end.reason is None:
                committed, counts = loop.run_round()
                rounds.append(counts)
                if callback is not None:
                    callback(committed)
            return DecodeResult(loop.context.tokens[len(prompt) :], DecodeStats(tuple(rounds)), end.reason)
        finally:  # also after an exception of a callback; the captured passes stay valid
            release_cache(target.model, cache)


class _Loop:
    """The state of one decoding: :meth:`prefill` once, then :meth:`run_round` until the output ends.

    Attributes:
        context: the sequence so far.
    """

    context: Context

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        cache: KVCache,
        chooser: Chooser,
        end: _StoppingCriteria,
        accept: AcceptRule,
    ) -> None:
        self._name, self._model, self._view = target.name, target.model, decoding_view(target.model)
        self._device, self._drafter, self._cache = target.device, drafter, cache
        self._chooser, self._end, self._accept = chooser, end, accept
        self._features = Features(drafter.modules) if drafter.modules else NO_FEATURES
        self._trees: TreeModel | None = None
        # Of plain decoding with static shapes: the logits of the next pass, which is launched before a token is read.
        self._ahead: Tensor | None = None
        ahead = drafter.never_drafts and cache.may_be_static and accept.lossless
        self._runs_ahead = ahead and not chooser.sampling.needs_seen

    def prefill(self, prompt: Sequence[int], known: Prefill | None) -> list[int]:
        """Read the prompt, commit the target's first token and start the drafter."""
        chooser, cache = self._chooser, self._cache
        chooser.observe(prompt)
        block = copy_to_device(prompt, self._device)
        if known is None or self._drafter.modules:
            logits = run_prefill(self._view, block, cache, features=self._features)
        else:
            logits = known.restore(cache)
        distribution = chooser.distribution(logits, block[-1:])
        largest = [largest_logits(logits, distribution)]
        verdict = verify(Draft.empty(self._device), distribution, chooser.generator, largest)
        self.context = Context(list(prompt), verdict.last)
        self._check_finite(verdict.late[0])
        committed = self._end.commit(self.context.tokens, [verdict.next_token])
        if self._end.reason is None:
            self._drafter.start(prompt, cache, chooser)
            if self._drafter.modules:
                self._drafter.observe_features(self._features.read())
        chooser.observe(committed)
        return committed

    def run_round(self) -> tuple[list[int], Round]:
        """Draft, run one pass of the target, verify and commit.

        Returns:
            The committed tokens, and the counts of the round.
        """
        if self._runs_ahead:
            return self._run_plain_round()
        context, cache, chooser, drafter = self.context, self._cache, self._chooser, self._drafter
        # Every round adds one token of the target, so a draft may fill all remaining places but one.
        limit = self._end.max_length - len(context.tokens) - 1
        draft = drafter.draft(context, limit) if limit > 0 else Draft.empty(self._device)
        block = torch.cat((context.last, draft.tokens))
        logits = self._run_target(block, draft)
        distribution = chooser.distribution(logits, block, draft.parents)
        late = drafter.observe_logits(VerifyOutput(block, logits))
        values = [largest_logits(logits, distribution), *(read.values for read in late)]
        if self._accept.lossless:
            verdict = verify(draft, distribution, chooser.generator, values)
        else:
            verdict = accept_lossy(draft, distribution, logits, self._accept, chooser.generator, values)
        largest, *late_values = verdict.late
        self._check_finite([largest[row] for row in verdict.rows])
        if verdict.path is not None:
            cache.gather(verdict.rows)
        cache.length += verdict.accepted + 1
        committed = self._end.commit(context.tokens, verdict.committed)
        context.last = verdict.last
        chooser.observe(committed)
        if self._end.reason is None:
            self._observe_features(verdict)
            drafter.observe(verdict)
            for read, read_values in zip(late, late_values, strict=True):
                read.receive(verdict, read_values)
        return committed, _count(verdict, len(committed))

    def _run_target(self, block: Tensor, draft: Draft) -> Tensor:
        """Return ``[K + 1, V]`` logits after the last token of the sequence and each of the K drafted ones."""
        if draft.parents is None:
            return forward(self._view, block, self._cache, last=block.shape[0], features=self._features)
        self._trees = self._trees or tree_model(self._model)
        return self._trees.run(block, draft.parents, self._cache, self._features)

    def _observe_features(self, verdict: Verdict) -> None:
        """Give the drafter the hidden states of the tokens that stay, if it reads any."""
        if self._features.modules:
            hidden = self._features.read()
            rows = slice(verdict.accepted + 1) if verdict.path is None else copy_to_device(verdict.rows, self._device)
            self._drafter.observe_features(hidden[rows])

    def _run_plain_round(self) -> tuple[list[int], Round]:
        """Choose the next token of plain decoding, and launch the pass after it before the host reads it.

        The device then computes while the host works. Where the output ends, one pass was launched in vain.
        """
        context, cache = self.context, self._cache
        logits = forward(self._view, context.last, cache, last=1) if self._ahead is None else self._ahead
        distribution = self._chooser.distribution(logits, context.last)
        token = self._chooser.choose(distribution)
        read = begin_reading(torch.cat((token, largest_logits(logits, distribution).double())))  # one copy for both
        cache.length += 1
        more = len(context.tokens) + 1 < self._end.max_length
        self._ahead = forward(self._view, token, cache, last=1) if more else None
        context.last = token
        chosen, largest = read()
        self._check_finite([largest])
        committed = self._end.commit(context.tokens, [int(chosen)])
        return committed, Round(0, 0, 1)

    def _check_finite(self, largest: Sequence[float]) -> None:
        """Raise :class:`NotFinite` unless the largest logits after the last token, and those after it, are finite."""
        for row, value in enumerate(largest):
            if not math.isfinite(value):
                raise NotFinite(self._name, len(self.context.tokens) - 1 + row, value)


def _count(verdict: Verdict, committed: int) -> Round:
    """Return the counts of a round. Tokens after the end of the output count neither as drafted nor as accepted."""
    drafted, accepted = len(verdict.drafted), verdict.accepted
    depth = None if verdict.parents is None else tree_depth(verdict.parents)
    if committed <= accepted:
        accepted = committed
        if depth is None:
            drafted = accepted
        else:
            depth = accepted
    return Round(drafted, accepted, committed, depth)


class _StoppingCriteria:
    """The decision, token by token and before anything is committed, where the output ends.

    Args:
        eos_ids: tokens that end a sequence.
        max_length: the most tokens of prompt and output together.
        stops: a further criterion, called with all tokens so far.

    Attributes:
        reason: why the output ended: ``eos``, ``stop`` or ``length``; None while it goes on.
    """

    def __init__(self, eos_ids: frozenset[int], max_length: int, stops: Callable[[list[int]], bool] | None) -> None:
        self.eos_ids, self.max_length, self.stops = eos_ids, max_length, stops
        self.reason: str | None = None

    def commit(self, tokens: list[int], new: list[int]) -> list[int]:
        """Append new tokens to the sequence up to its end, and return the appended ones."""
        before = len(tokens)
        for token in new:
            tokens.append(token)
            if token in self.eos_ids:
                self.reason = "eos"
            elif self.stops is not None and self.stops(tokens):
                self.reason = "stop"
            elif len(tokens) >= self.max_length:
                self.reason = "length"
            if self.reason is not None:
                break
        return tokens[before:]
