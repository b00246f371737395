"""Drafting with a smaller model of another tokenizer, on its own cache.

Its most likely tokens are re-encoded in the target's tokens: universal assisted generation, as in transformers. New text is
re-encoded together with some tokens before it, as tokens merge across any border, and then aligned with the earlier
encoding. Drafts are deterministic, also where the target draws its tokens, because a translated token has no known q.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from layerskip.config import ConfigError, Method, SpeculativeConfig, StopRule, shared
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context
from layerskip.decoding.sampling import Chooser, Sampling
from layerskip.device.transfer import copy_to_device, read_to_host
from layerskip.drafters.chain import ModelDrafter, draft_chain, load_draft_view
from layerskip.models.cache import KVCache
from layerskip.models.target import Target

_MAX_GROWTH = 4  # draft tokens per target token that the cache has capacity for; beyond that nothing is drafted
_OVERLAP = 10  # tokens that are encoded again with new ones
_SAMPLED = 64  # tokens whose text is encoded as a check
_BROKEN = "\ufffd"  # the decoding of an incomplete character


class Translation:
    """A translation of sequences into a draft model's tokens, and of its drafts into the target's."""

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
        self._target, self._draft = target, draft
        self._begin = [token for token in _encode(draft, "", special=True) if token != draft.eos_token_id]
        special = set(target.all_special_ids)
        own = sorted(token for token in target.get_vocab().values() if token not in special)
        sample = [_decode(target, [token]) for token in own[:: max(1, len(own) // _SAMPLED)]]
        texts = [text for text in sample if text.strip() and _BROKEN not in text]
        kept = sum(_decode(draft, _encode(draft, text)).strip() == text.strip() for text in texts)
        if 2 * kept < len(texts):
            raise ConfigError("draft_model: its tokenizer does not reproduce the target's text")

    def to_draft(self, tokens: Sequence[int], before: int = 0, known: Sequence[int] = ()) -> list[int]:
        """Return the target's tokens in the draft's; the first ``before`` of them were translated to ``known`` before."""
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
        """Return a draft after a sequence, ``tokens`` of the target and ``known`` of the draft, in the target's tokens."""
        new_tokens = list(itertools.takewhile(lambda token: token != self._draft.eos_token_id, drafted))
        overlap = known[-_OVERLAP:]
        before, text = _decode(self._draft, overlap), _decode(self._draft, [*overlap, *new_tokens])
        text = text[len(before) :] if text.startswith(before) else _decode(self._draft, new_tokens)
        whole = text.partition(_BROKEN)[0]
        before = _decode(self._target, tokens[-_OVERLAP:])
        old, new = _encode(self._target, before), _encode(self._target, before + whole)
        # If the draft would merge with the last token, it is encoded alone, as that token is committed already.
        translated = new[len(old) :] if new[: len(old)] == old else _encode(self._target, whole)
        closed = len(new_tokens) < len(drafted) and whole == text and self._target.eos_token_id is not None
        return [*translated, int(self._target.eos_token_id)] if closed else translated


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


class CrossTokenizer(ModelDrafter):
    """A drafter of up to ``num_speculative_tokens`` tokens of a model with another tokenizer and vocabulary."""

    method = Method(
        "cross_tokenizer",
        (shared("draft_model"), shared("num_speculative_tokens", range=(1, 8)), shared("stop")),
        source="a smaller model of another tokenizer",
        rank=9,
        color="#17becf",
        short="cross-tok.",
        label=lambda config: config.draft_model,
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
    ) -> None:
        super().__init__(model, layers, num_speculative_tokens, stop)
        self.vocabulary, self.translation = vocabulary, translation

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> CrossTokenizer:
        draft, view = load_draft_view(config, target, same_tokenizer=False)
        assert target.tokenizer is not None
        assert draft.tokenizer is not None
        translation = Translation(target.tokenizer, draft.tokenizer)
        return cls(view, draft.layers, draft.vocabulary, translation, config.num_speculative_tokens, config.stop)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self._target_vocabulary = chooser.vocabulary
        self._encoded, self._known = len(prompt), self.translation.to_draft(prompt)
        room = len(self._known) + _MAX_GROWTH * (cache.capacity - len(prompt) + self.num_speculative_tokens)
        room = min(room, self._most or room)
        self._fed = self._known[:-1] if len(self._known) <= room else []
        self._begin(cache, room, self._fed)
        # The repetition penalty is left out, as it applies to the target's tokens.
        self._greedy = Chooser(Sampling(), self.vocabulary, self._device)

    def draft(self, context: Context, limit: int) -> Draft:
        """Re-encode the committed tokens, feed the new ones, draft, and translate the draft into the target's tokens.

        Rejected tokens are overwritten when the next context is encoded.
        """
        device = context.last.device
        known = self.translation.to_draft(context.tokens, self._encoded, self._known)
        self._encoded, self._known = len(context.tokens), known
        length = min(limit, self.num_speculative_tokens)
        if not known or len(known) + length > self._cache.capacity:
            return Draft.empty(device)
        self._cache.length = min(_common_prefix(self._fed, known), len(known) - 1)
        pending = self._readable(known[self._cache.length :])
        chain = draft_chain(self.model, self._cache, pending, length, self._greedy, self.stopper)
        (drafted,) = read_to_host(chain.tokens)
        self._fed = [*known, *drafted[:-1]]
        translated = self.translation.to_target(context.tokens, known, drafted)[:limit]
        tokens = list(itertools.takewhile(lambda token: token < self._target_vocabulary, translated))
        return Draft(copy_to_device(tokens, device)) if tokens else Draft.empty(device)
