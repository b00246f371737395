"""Drafting by lookup: the contract, and the drafts against a brute-force search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from layerskip.drafters.prompt_lookup import PromptLookup
from tests.drafters.contract import contract
from tests.drafters.recorder import proposed, started

TestLastMatch = contract(lambda target: PromptLookup(1, 3, "last", 4))


def _search(tokens: Sequence[int], sizes: tuple[int, int], match: str, length: int) -> list[int]:
    """Returns what followed an earlier occurrence of the longest n-gram that has one, continued with the copied tokens."""
    minimum, maximum = sizes
    for size in range(maximum, minimum - 1, -1):
        if size < len(tokens):
            ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tokens[-size:]]
            if ends:
                end = ends[-1] if match == "last" else ends[0]
                extended = list(tokens)
                for offset in range(length):
                    extended.append(extended[end + offset])
                return extended[len(tokens) :]
    return []


@pytest.mark.parametrize("match", ["last", "first"])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 2), (2, 4)], ids=str)
def test_drafts_equal_those_of_a_brute_force_search(sizes: tuple[int, int], match: str) -> None:
    """The context grows by one to four tokens a round, over an alphabet small enough for many matches."""
    chance = random.Random(0)
    drafter, found = PromptLookup(*sizes, match, 5), 0
    for _, limit in itertools.product(range(10), (2, 9)):
        tokens = [chance.randrange(5) for _ in range(chance.randint(1, 12))]
        started(drafter, *tokens)
        for _ in range(12):
            expected = _search(tokens, sizes, match, min(5, limit))
            draft = proposed(drafter, tokens, limit)
            assert (draft.tokens.tolist(), draft.probs, draft.parents) == (expected, None, None)
            found += bool(expected)
            tokens = [*tokens, *(chance.randrange(5) for _ in range(chance.randint(1, 4)))]
    assert found > 40


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ([1, 2, 7, 1, 2], 2),
        ([9, 1, 2, 7, 8, 1, 2], 2),
        ([9, 1, 2, 3, 7, 9, 1, 2, 3], 4),  # longer than the n-gram that found it
        ([1, 2, 3, 7, 1, 2, 3], 3),  # up to the start of the text
        ([6] * 30, 8),  # but at most MAX_MATCH
        ([1, 2, 3], 0),
    ],
)
def test_a_match_counts_all_tokens_that_agree(tokens: list[int], match: int) -> None:
    assert proposed(started(PromptLookup(1, 2, "last", 3), *tokens), tokens, 3).match_length == match
