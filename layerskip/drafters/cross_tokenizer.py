"""Drafting with a smaller model of another tokenizer, on its own cache.

Greedy drafts are re-encoded in the target's tokens: universal assisted generation, as in transformers. New text is
re-encoded together with some tokens before it, as tokens merge across any border, and then aligned with the earlier
encoding. If tokens are drawn, the model drafts tokens that both vocabularies share, so that q is known for every token:
token-level intersection, Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies (arXiv 2502.05202), algorithm 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from layerskip.config import ConfigError, Method, SpeculativeConfig, StopRule, shared
from layerskip.decoding.draft import DeviceTree, Draft
from layerskip.decoding.drafter import Context
from layerskip.decoding.sampling import Chooser, to_full_vocabulary
from layerskip.decoding.stopping import Stopper, StopRuleDrafter
from layerskip.device.transfer import copy_to_device, read_to_host
from layerskip.drafters.chain import draft_chain, draft_label, load_draft_view
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.draft_head import DraftHead
from layerskip.models.forward import clamp_tokens
from layerskip.models.graph_capture import CapturingCache
from layerskip.models.positions import max_positions
from layerskip.models.prefill import run_prefill
from layerskip.models.target import Target

_MAX_GROWTH = 4  # draft tokens per target token that the cache has capacity for; beyond that nothing is drafted
_OVERLAP = 10  # tokens that are encoded again with new ones
_SAMPLED = 64  # tokens whose text is encoded as a check
_BROKEN = "\ufffd"  # the decoding of an incomplete character


class UnalignedTokenizers(ValueError):
    """Two tokenizers share no token, or the draft's does not reproduce its input."""


class Translation:
    """A translation of sequences into a draft model's tokens, and of its drafts into the target's.

    Attributes:
        shared: pairs of the target's and the draft's token for the same bytes, and for the end of a sequence.

    Raises:
        UnalignedTokenizers: they share no token, or the draft's tokenizer does not reproduce the text that it encodes.
    """

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
        self._target, self._draft = target, draft
        self._begin = [token for token in _encode(draft, "", special=True) if token != draft.eos_token_id]
        own, other = _spellings(target), _spellings(draft)
        self.shared = sorted((own[spelling], other[spelling]) for spelling in own.keys() & other.keys())
        if not self.shared:
            raise UnalignedTokenizers("the two tokenizers share no token")
        if target.eos_token_id is not None and draft.eos_token_id is not None:
            self.shared.append((int(target.eos_token_id), int(draft.eos_token_id)))
        sample = [_decode(target, [token]) for token in list(own.values())[:: max(1, len(own) // _SAMPLED)]]
        texts = [text for text in sample if text.strip() and _BROKEN not in text]
        kept = sum(_decode(draft, _encode(draft, text)).strip() == text.strip() for text in texts)
        if 2 * kept < len(texts):
            raise UnalignedTokenizers("the draft's tokenizer does not reproduce the text that it encodes")

    def to_draft(self, tokens: Sequence[int], before: int = 0, known: Sequence[int] = ()) -> list[int]:
        """Return a sequence in the draft's tokens.

        Args:
            tokens: the target's tokens.
            before: how many of them were translated before.
            known: the result of that translation.
        """
        if before:
            overlap = tokens[max(0, before - _OVERLAP) : before]
            old = _encode(self._draft, _decode(self._target, overlap))
            new = _encode(self._draft, _decode(self._target, [*overlap, *tokens[before:]]))
            same = _common_prefix(old, new)
            stay = len(known) - (len(old) - same)
            # The last token to keep must equal the known one, or the fragment was encoded otherwise than in the text.
            if same and stay > 0 and list(known[stay - 1 :]) == old[same - 1 :]:
                return [*known[:stay], *new[same:]]
        return [*self._begin, *_encode(self._draft, _decode(self._target, tokens))]

    def to_target(self, tokens: Sequence[int], known: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """Return a draft in the target's tokens.

        Args:
            tokens: the sequence in the target's tokens.
            known: the same sequence in the draft's tokens.
            drafted: the draft's tokens after it.
        """
        new_tokens = list(itertools.takewhile(lambda token: token != self._draft.eos_token_id, drafted))
        overlap = list(known[-_OVERLAP:])
        before, text = _decode(self._draft, overlap), _decode(self._draft, overlap + new_tokens)
        text = text[len(before) :] if text.startswith(before) else _decode(self._draft, new_tokens)
        whole = text.partition(_BROKEN)[0]
        before = _decode(self._target, list(tokens[-_OVERLAP:]))
        old, new = _encode(self._target, before), _encode(self._target, before + whole)
        # If the draft would merge with the last token, it is encoded alone, as that token is committed already.
        translated = new[len(old) :] if new[: len(old)] == old else _encode(self._target, whole)
        closed = len(new_tokens) < len(drafted) and whole == text and self._target.eos_token_id is not None
        return [*translated, int(self._target.eos_token_id)] if closed else translated


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def _spellings(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """Return every ordinary token by the bytes that it encodes."""
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    bytelevel = sum("Ġ" in token for token in vocabulary) > sum("▁" in token for token in vocabulary)
    letters = _byte_letters() if bytelevel else {}
    found = {}
    for token, number in vocabulary.items():
        if number in special:
            continue
        if bytelevel:
            if all(letter in letters for letter in token):
                found[bytes(letters[letter] for letter in token)] = number
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            found.setdefault(bytes([int(token[3:5], 16)]), number)
        else:
            found[token.replace("▁", " ").encode()] = number
    return found


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter of byte-level tokenizers: printable bytes are themselves, others start at 256."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + place): byte for place, byte in enumerate(others)}


class CrossTokenizer(StopRuleDrafter):
    """A drafter with a model of another tokenizer.

    Args:
        vocabulary: the width of its logits.
        num_speculative_tokens: the most tokens per round, in the model's tokens.
    """

    method = Method(
        "cross_tokenizer",
        (shared("draft_model"), shared("draft_head"), shared("num_speculative_tokens", range=(1, 8)), shared("stop")),
        source="a smaller model of another tokenizer",
        rank=9,
        color="#17becf",
        short="cross-tok.",
        label=draft_label,
        engine_method="cross_tokenizer",
    )

    def __init__(
        self,
        model: PreTrainedModel,
        layers: int,
        vocabulary: int,
        translation: Translation,
        num_speculative_tokens: int,
        stop: StopRule,
        head: DraftHead | None = None,
    ) -> None:
        self.model, self.layers, self.vocabulary = model, layers, vocabulary
        self.translation, self.num_speculative_tokens, self._head = translation, num_speculative_tokens, head
        self.stopper, self._most = Stopper(stop), max_positions(model)

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> CrossTokenizer:
        draft, view, head = load_draft_view(config, target, same_tokenizer=False)
        assert target.tokenizer is not None
        assert draft.tokenizer is not None
        try:
            translation = Translation(target.tokenizer, draft.tokenizer)
        except UnalignedTokenizers as error:
            raise ConfigError(f"draft_model: {config.draft_model} cannot draft for {target.name}: {error}") from error
        shared_tokens = {in_draft for own, in_draft in translation.shared if own < target.vocabulary}
        if head is not None and shared_tokens.isdisjoint(head.tokens.tolist()):  # no token could be drawn
            raise ConfigError(f"draft_head: {config.draft_head} shares no token with {target.name}")
        return cls(view, draft.layers, draft.vocabulary, translation, config.num_speculative_tokens, config.stop, head)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        device = next(self.model.parameters()).device
        if self._head is not None:
            self._head.begin()
        self._shared = _SharedTokensChooser(chooser, self.vocabulary, self.translation, device)
        self._encoded, self._known = len(prompt), self.translation.to_draft(prompt)
        self._seen = list(self._known)  # all encodings so far: the last tokens of a text may be encoded again
        new_tokens = cache.capacity - len(prompt) + self.num_speculative_tokens
        room = len(self._known) + _MAX_GROWTH * new_tokens
        room = min(room, self._most or room)
        self._cache = acquire_cache(self.model, self.layers, room, device, isinstance(cache, CapturingCache), self)
        self._fed = self._known[:-1] if len(self._known) <= room else []
        if self._fed:
            run_prefill(self.model, clamp_tokens(self.model, copy_to_device(self._fed, device)), self._cache)
        self.stopper.start()

    def draft(self, context: Context, limit: int) -> Draft:
        """Re-encode the committed tokens, feed the new ones, draft, and translate the draft into the target's tokens.

        Rejected tokens are overwritten when the next context is encoded.
        """
        device = context.last.device
        known = self.translation.to_draft(context.tokens, self._encoded, self._known)
        self._seen += known[_common_prefix(self._known, known) :]
        self._encoded, self._known = len(context.tokens), known
        length = min(limit, self.num_speculative_tokens)
        if not known or len(known) + length > self._cache.capacity:
            return Draft.empty(device)
        self._cache.length = min(_common_prefix(self._fed, known), len(known) - 1)
        pending = clamp_tokens(self.model, copy_to_device(known[self._cache.length :], device))
        vocabulary = None if self._head is None else self._head.follow(self._seen)
        chain = draft_chain(self.model, self._cache, pending, length, self._shared, self.stopper, vocabulary=vocabulary)
        (drafted,) = read_to_host(chain.tokens)
        self._fed = [*known, *drafted[:-1]]
        if chain.probs is not None:
            return replace(self._shared.translate(chain.tokens, chain.probs), stopped_at_first=chain.stopped_at_first)
        translated = self.translation.to_target(context.tokens, known, drafted)[:limit]
        tokens = list(itertools.takewhile(lambda token: token < self._shared.width, translated))
        if not tokens:
            return Draft.empty(device)
        return Draft(copy_to_device(tokens, device), stopped_at_first=chain.stopped_at_first)


class _SharedTokensChooser(Chooser):
    """A choice of the draft's tokens like the target's; drawn tokens are limited to those that the target shares.

    The repetition penalty is left out: it applies to the target's tokens, and q may be any distribution.
    """

    def __init__(self, chooser: Chooser, vocabulary: int, translation: Translation, device: torch.device) -> None:
        super().__init__(replace(chooser.sampling, repetition_penalty=1.0), vocabulary, device)
        self.generator = chooser.generator
        self.width = chooser.vocabulary
        pairs = [pair for pair in translation.shared if pair[0] < self.width and pair[1] < vocabulary]
        self._own, self._in_draft = (copy_to_device(part, device) for part in zip(*pairs, strict=True))
        self._in_target = torch.full((vocabulary,), -1, device=device).index_copy(0, self._in_draft, self._own)

    def distribution(
        self,
        logits: Tensor,
        block: Tensor,
        parents: Sequence[int] | DeviceTree | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the distributions over the model's tokens; see :meth:`Chooser.distribution`."""
        if not self.sampling.greedy:
            in_target = self._in_target if tokens is None else self._in_target.index_select(0, tokens)
            logits = logits.masked_fill(in_target < 0, -float("inf"))
        return super().distribution(logits, block, parents, tokens)

    def translate(self, tokens: Tensor, probs: Tensor) -> Draft:
        """Return drawn tokens ``[K]`` and their distributions ``[K, V']`` in the target's tokens."""
        shared_probs = to_full_vocabulary(probs.index_select(1, self._in_draft), self._own, self.width)
        return Draft(self._in_target.index_select(0, tokens), probs=shared_probs)
