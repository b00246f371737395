"""How do two tokenizers spell the same text? From the target's tokens to a draft model's and back, and what they share.

Text is re-encoded with a look-behind, as tokens merge across any border, and aligned with what was there before: universal
assisted generation, as transformers has it. Where tokens are drawn, only tokens that both have may be drafted: token-level
intersection, Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies
(arXiv 2502.05202), algorithm 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_LOOK_BEHIND = 10  # tokens that are spelled again beside new ones
_SAMPLED = 64  # tokens whose spelling is tried
_BROKEN = "\ufffd"  # what an incomplete character decodes to


class UnalignedTokenizers(ValueError):
    """Two tokenizers that no text connects."""


class Translation:
    """Spells sequences of the target's in a draft model's tokens, and its drafts in the target's.

    Args:
        target: the target's tokenizer.
        draft: the draft model's.

    Raises:
        UnalignedTokenizers: they share no token, or the draft's does not give back the text that it reads.
    """

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
        self._target, self._draft = target, draft
        ends = [token for token in (draft.eos_token_id,) if token is not None]
        self._begin = [token for token in _encode(draft, "", special=True) if token not in ends]
        own, theirs = _spellings(target), _spellings(draft)
        self.shared = sorted((own[spelling], theirs[spelling]) for spelling in own.keys() & theirs.keys())
        """Pairs of the target's and the draft's token for the same bytes, and for the end of a sequence."""
        if not self.shared:
            raise UnalignedTokenizers("the two tokenizers share no token")
        if target.eos_token_id is not None and draft.eos_token_id is not None:
            self.shared.append((int(target.eos_token_id), int(draft.eos_token_id)))
        sample = [_decode(target, [token]) for token in list(own.values())[:: max(1, len(own) // _SAMPLED)]]
        texts = [text for text in sample if text.strip() and _BROKEN not in text]
        kept = sum(_decode(draft, _encode(draft, text)).strip() == text.strip() for text in texts)
        if 2 * kept < len(texts):
            raise UnalignedTokenizers("the draft's tokenizer does not give back the text that it reads")

    def to_draft(self, tokens: Sequence[int], before: int = 0, known: Sequence[int] = ()) -> list[int]:
        """A sequence in the draft's tokens.

        Args:
            tokens: the target's.
            before: so many of them were spelled before;
            known: that way.
        """
        if before:
            behind = tokens[max(0, before - _LOOK_BEHIND) : before]
            old = _encode(self._draft, _decode(self._target, behind))
            new = _encode(self._draft, _decode(self._target, [*behind, *tokens[before:]]))
            same = common_prefix(old, new)
            stay = len(known) - (len(old) - same)
            # The last token that stays must be the one that was spelled there, or the fragment was read otherwise.
            if same and stay > 0 and list(known[stay - 1 :]) == old[same - 1 :]:
                return [*known[:stay], *new[same:]]
        return [*self._begin, *_encode(self._draft, _decode(self._target, tokens))]

    def to_target(self, tokens: Sequence[int], known: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """A draft in the target's tokens.

        Args:
            tokens: the sequence, in the target's tokens.
            known: the same in the draft's.
            drafted: what follows it, in the draft's.
        """
        said = list(drafted)
        ends = self._draft.eos_token_id in said
        if ends:
            said = said[: said.index(self._draft.eos_token_id)]
        behind = list(known[-_LOOK_BEHIND:])
        before, text = _decode(self._draft, behind), _decode(self._draft, behind + said)
        text = text[len(before) :] if text.startswith(before) else _decode(self._draft, said)
        whole = text.partition(_BROKEN)[0]
        behind = list(tokens[-_LOOK_BEHIND:])
        before = _decode(self._target, behind)
        old, new = _encode(self._target, before), _encode(self._target, before + whole)
        # Where the draft melts into the last token, only its own spelling can follow what is committed.
        found = new[len(old) :] if new[: len(old)] == old else _encode(self._target, whole)
        closed = ends and whole == text and self._target.eos_token_id is not None
        return [*found, int(self._target.eos_token_id)] if closed else found


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    text = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def _spellings(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """Every ordinary token by the bytes that it stands for."""
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
    """The letter that byte-level tokenizers write each byte as: itself where it prints, else one from 256 on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + place): byte for place, byte in enumerate(others)}
