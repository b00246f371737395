"""How is a prompt continued? The one decoding loop: draft, one pass of the target, verify, commit.

Speculative decoding as in arXiv 2211.17192; with the drafter that proposes nothing it is plain decoding. The loop names no
drafter: whatever proposes the tokens, the output is the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, Reader, Said
from layerskip.decoding.lossy import accept_lossy
from layerskip.decoding.sampling import Chooser, Sampling
from layerskip.decoding.stats import DecodeStats, Round
from layerskip.decoding.tree import TreeModel, depth, tree_model
from layerskip.decoding.verify import verify
from layerskip.device.upload import upload
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache, one_at_a_time, release_cache
from layerskip.models.features import NOTHING, Features
from layerskip.models.forward import forward
from layerskip.models.positions import check_edges
from layerskip.models.prefill import Prefill
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target
from layerskip.rules import EXACT, AcceptRule


@dataclass(frozen=True)
class DecodeResult:
    """What a decoding produced.

    Args:
        tokens: the new tokens; an end-of-sequence token is the last of them.
        stats: the rounds that made them.
        finish: why it ended: ``eos``, ``stop`` or ``length``.
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
    """Continue a prompt with exactly the tokens that the target alone would give.

    Args:
        target: the model to decode with.
        drafter: what proposes tokens.
        prompt: token ids, at least one.
        sampling: how tokens are chosen.
        max_new_tokens: at least 1.
        stops: given all tokens up to some new one, prompt included: does the output end there?
        callback: gets the committed tokens of every round, in order.
        on_prefill: called once, when prefill is done, with how many new tokens are known by then: 1.
        seed: makes sampling repeatable.
        eos_ids: what ends the sequence; the target's own where None.
        static_shapes: see :func:`~layerskip.models.cache_pool.acquire_cache`.
        accept: which drafted tokens pass; any rule but the exact one changes the output.
        prefill: the prompt as the target read it before, which is not read again but for a drafter that has to see it.

    Raises:
        ValueError: the prompt is empty, the prefill is of one of another length, or ``max_new_tokens`` is below 1.
        UnsupportedModel: the model's positions turn otherwise from some token on that the text may come to.
    """
    if not prompt:
        raise ValueError("prompt: is empty")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens} is not at least 1")
    if prefill is not None and prefill.cache.length != len(prompt):
        raise ValueError(f"prefill: is of {prefill.cache.length} tokens, the prompt has {len(prompt)}")
    check_edges(target.model, len(prompt), len(prompt) + max_new_tokens)
    chooser = Chooser(sampling, target.vocabulary, target.device, seed)
    ending = _Ending(target.eos_ids if eos_ids is None else eos_ids, len(prompt) + max_new_tokens, stops)
    room = ending.length + drafter.tree_tokens
    with one_at_a_time(target.model):
        cache = acquire_cache(target.model, target.layers, room, target.device, static_shapes)
        try:
            return _continue(target, drafter, prompt, cache, chooser, ending, callback, on_prefill, accept, prefill)
        finally:  # whatever a callback raised, the records are as good as before
            release_cache(target.model, cache)


def _continue(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    cache: KVCache,
    chooser: Chooser,
    ending: _Ending,
    callback: Callable[[list[int]], None] | None,
    on_prefill: Callable[[int], None] | None,
    accept: AcceptRule,
    prefill: Prefill | None,
) -> DecodeResult:
    model, device = decoding_view(target.model), target.device
    chooser.observe(prompt)
    reader = drafter if isinstance(drafter, Reader) and drafter.modules else None
    features = NOTHING if reader is None else Features(reader.modules)

    block = upload(prompt, device)
    if prefill is None or reader is not None:
        logits = forward(model, block, cache, last=1, features=features)
    else:
        logits = prefill.lay(cache)
    verdict = verify(Draft.empty(device), chooser.distribution(logits, block[-1:]), chooser.generator)
    cache.length = len(prompt)
    context = Context(list(prompt), verdict.last)
    committed = ending.commit(context.tokens, [verdict.next_token])
    if ending.reason is None:
        drafter.start(prompt, cache, chooser)
        if reader is not None:
            reader.read(features.read())
    if on_prefill is not None:
        on_prefill(1)
    chooser.observe(committed)
    if callback is not None:
        callback(committed)

    trees: TreeModel | None = None
    rounds: list[Round] = []
    while ending.reason is None:
        # The round adds one token of the target's, so a draft may fill all but one of the places left.
        limit = ending.length - len(context.tokens) - 1
        draft = drafter.draft(context, limit) if limit > 0 else Draft.empty(device)
        block = torch.cat((context.last, draft.tokens))
        if draft.parents is None:
            logits = forward(model, block, cache, last=block.shape[0], features=features)
            distribution = chooser.distribution(logits, block)
        else:
            trees = trees or tree_model(target.model)
            logits = trees.run(block, draft.parents, cache, features)
            distribution = chooser.distribution(logits, block, draft.parents)
        if accept.lossless:
            verdict = verify(draft, distribution, chooser.generator)
        else:
            verdict = accept_lossy(draft, distribution, logits, accept, chooser.generator)
        kept = None if verdict.path is None else [0, *(node + 1 for node in verdict.path)]
        if kept is not None:
            cache.gather(kept)
        cache.length += verdict.accepted + 1
        committed = ending.commit(context.tokens, verdict.committed)
        context.last = verdict.last
        chooser.observe(committed)
        if ending.reason is None:
            if reader is not None:
                found = features.read()
                reader.read(found[: verdict.accepted + 1] if kept is None else found[upload(kept, device)])
            drafter.observe(verdict)
            drafter.hear(Said(block, logits))
        drafted, accepted = len(verdict.drafted), verdict.accepted
        deep = None if draft.parents is None else depth(draft.parents)
        if len(committed) <= accepted:  # what lies behind an end of sequence counts nowhere
            accepted = len(committed)
            if deep is None:
                drafted = accepted
            else:
                deep = accepted
        rounds.append(Round(drafted, accepted, len(committed), deep))
        if callback is not None:
            callback(committed)
    return DecodeResult(context.tokens[len(prompt) :], DecodeStats(tuple(rounds)), ending.reason)


class _Ending:
    """Decides where the output ends, token by token, before anything is committed.

    Args:
        eos_ids: tokens that end a sequence.
        length: prompt and output together may be this long.
        stops: a further reason to end.
    """

    def __init__(self, eos_ids: frozenset[int], length: int, stops: Callable[[list[int]], bool] | None) -> None:
        self.eos_ids, self.length, self.stops = eos_ids, length, stops
        self.reason: str | None = None

    def commit(self, tokens: list[int], new: list[int]) -> list[int]:
        """Append new tokens to the sequence up to its end, and return those that were appended."""
        before = len(tokens)
        for token in new:
            tokens.append(token)
            if token in self.eos_ids:
                self.reason = "eos"
            elif self.stops is not None and self.stops(tokens):
                self.reason = "stop"
            elif len(tokens) >= self.length:
                self.reason = "length"
            if self.reason is not None:
                break
        return tokens[before:]
