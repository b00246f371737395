"""Translation between the tokens of two tokenizers: from the target's to a draft model's and back, and what they share.

New text is re-encoded together with some tokens before it, as tokens merge across any border, and then aligned with the
earlier encoding: universal assisted generation, as in transformers. If tokens are drawn, only tokens of both vocabularies
may be drafted: token-level intersection, Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies (arXiv 2502.05202), algorithm 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_OVERLAP = 10  # tokens that are encoded again with new ones
_SAMPLED = 64  # tokens whose text is encoded as a check
_BROKEN = "\ufffd"  # the decoding of an incomplete character


class UnalignedTokenizers(ValueError):
    """Two tokenizers share no token, or the draft's does not reproduce its input."""


class Translation:
    """A translation of sequences into a draft model's tokens, and of its drafts into the target's.

    Args:
        target: the target's tokenizer.
        draft: the draft model's tokenizer.

    Attributes:
        shared: pairs of the target's and the draft's token for the same bytes, and for the end of a sequence.

    Raises:
        UnalignedTokenizers: they share no token, or the draft's tokenizer does not reproduce the text that it encodes.
    """

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
        self._target, self._draft = target, draft
        ends = [token for token in (draft.eos_token_id,) if token is not None]
        self._begin = [token for token in _encode(draft, "", special=True) if token not in ends]
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
            same = common_prefix(old, new)
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
        new_tokens = list(drafted)
        ends = self._draft.eos_token_id in new_tokens
        if ends:
            new_tokens = new_tokens[: new_tokens.index(self._draft.eos_token_id)]
        overlap = list(known[-_OVERLAP:])
        before, text = _decode(self._draft, overlap), _decode(self._draft, overlap + new_tokens)
        text = text[len(before) :] if text.startswith(before) else _decode(self._draft, new_tokens)
        whole = text.partition(_BROKEN)[0]
        before = _decode(self._target, list(tokens[-_OVERLAP:]))
        old, new = _encode(self._target, before), _encode(self._target, before + whole)
        # If the draft would merge with the last token, it is encoded alone, as that token is committed already.
        translated = new[len(old) :] if new[: len(old)] == old else _encode(self._target, whole)
        closed = ends and whole == text and self._target.eos_token_id is not None
        return [*translated, int(self._target.eos_token_id)] if closed else translated


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    text = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


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
