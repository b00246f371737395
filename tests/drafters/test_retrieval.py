"""Drafting by retrieval: the contract, the trees against a brute-force count, and which texts are kept."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from layerskip.config import ConfigError, SpeculativeConfig
from layerskip.decoding.tree import path_to
from layerskip.drafters import retrieval
from layerskip.drafters.registry import build_drafter
from layerskip.drafters.retrieval import Datastore, Retrieval
from tests.drafters.contract import contract, target_of, toy_target
from tests.drafters.recorder import proposed, started

SHAPE = {
    "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 4, "tree_tokens": 6, "min_token_prob": 0.0,
}  # fmt: skip


def _propose(drafter: Retrieval, tokens: list[int], limit: int) -> tuple[list[int], list[int], list[float], int]:
    """The tokens of a draft, their parents and path probabilities, and the length of the match."""
    draft = proposed(drafter, tokens, limit)
    return [*draft.lookup_tokens], [*draft.known_parents], [*draft.path_probs], draft.match_length


TestOwnTexts = contract(
    lambda target: build_drafter(SpeculativeConfig.from_dict({"method": "retrieval"} | SHAPE), target),
    trees=True,
    history_dependent=True,
    keeps_state=True,
    samples_by_default=False,
)


def _agreement(text: list[int], context: list[int]) -> int:
    """Returns how many of their last tokens are the same."""
    return max(n for n in range(min(len(text), len(context)) + 1) if not n or text[-n:] == context[-n:])


def _trees(texts: list[list[int]], context: list[int], longest: int, depth: int) -> dict[tuple[int, ...], float]:
    """Returns how often each continuation followed, over occurrences that agree at least half as much as the best.

    Occurrences agree in at least ``longest`` tokens, or in as many as the best one.
    """
    places = [(_agreement(t[:e], context), t[e : e + depth]) for t in texts for e in range(1, len(t))]
    best = max((agreement for agreement, _ in places), default=0)
    rows = [row for agreement, row in places if agreement >= max(1, min(best, longest), best / 2)]
    counts = Counter(tuple(row[: i + 1]) for row in rows for i in range(len(row)))
    shares: dict[tuple[int, ...], float] = {}
    for branch, count in counts.items():
        above = counts[branch[:-1]] if len(branch) > 1 else len(rows)
        shares[branch] = count / above * shares.get(branch[:-1], 1.0)
    return shares


@pytest.mark.parametrize("stored", [False, True], ids=["own texts", "datastore"])
def test_trees_contain_the_most_frequent_continuations(stored: bool) -> None:
    target, source = target_of("llama"), random.Random(1)
    for _ in range(60):
        texts = [source.choices(range(4), k=source.randint(1, 12)) for _ in range(3)]
        store = Datastore.build(texts, target) if stored else None
        drafter = Retrieval(store, 1, 3, 3, 5, 0.15)
        if not stored:
            for text in texts:
                proposed(started(drafter), text, 1)
        started(drafter)
        context = [9, *source.sample(range(4), k=3)]  # without repetitions, which would be a further source
        tokens, parents, chances, _ = _propose(drafter, context, 3)
        branches = [tuple(tokens[i] for i in path_to(node, parents)) for node in range(len(tokens))]
        shares = _trees(texts, context, 3, 3)
        likely = sorted((share for share in shares.values() if share >= 0.15), reverse=True)
        assert [shares[branch] for branch in branches] == pytest.approx(likely[:5])
        assert chances == pytest.approx(likely[:5])


def test_occurrences_with_much_shorter_matches_are_left_out() -> None:
    """Texts are indexed by single tokens; few occurrences that agree with much of the context replace many that do not."""
    source, longest = random.Random(4), 0
    for _ in range(40):
        phrases = [source.sample(range(8), k=6) for _ in range(4)]
        texts = [[*itertools.chain(*source.choices(phrases, k=6))] for _ in range(2)]
        drafter = Retrieval(None, 1, 1, 3, 50, 0.0)
        for text in texts:
            proposed(started(drafter), text, 1)
        started(drafter)
        context = [9, *source.choice(phrases)[: source.randint(1, 5)]]  # without repetitions, a further source
        tokens, parents, _, match = _propose(drafter, context, 3)
        branches = {tuple(tokens[i] for i in path_to(node, parents)) for node in range(len(tokens))}
        expected = _trees(texts, context, 1, 3)
        if not expected:
            assert match == 0
            continue
        assert match == max(_agreement(text[:end], context) for text in texts for end in range(1, len(text)))
        assert branches <= set(expected)
        assert len(branches) == min(len(expected), 10 * match)
        longest = max(longest, match)
    assert longest == 5


def test_a_repetition_in_the_present_text_is_continued() -> None:
    drafter = Retrieval(None, 1, 3, 5, 8, 0.5)
    assert _propose(drafter, [7, 3, 4, 3, 4], 5) == ([3, 4, 3, 4, 3], [-1, 0, 1, 2, 3], [1.0] * 5, 2)


def test_every_occurrence_of_an_ngram_is_found() -> None:
    target, source = target_of("llama"), random.Random(2)
    texts = [source.choices(range(3), k=source.randint(0, 30)) for _ in range(20)]
    store = Datastore.build(texts, target)
    for size in (1, 2, 3, 5):
        for _ in range(20):
            ngram = source.choices(range(3), k=size)
            followed = [t[e : e + 4] for t in texts for e in range(size, len(t) + 1) if t[e - size : e] == ngram]
            assert sorted(store.continuations(ngram, 4, 10_000)) == sorted(followed)
            assert len(store.places(ngram)) == len(followed)
            assert len(store.continuations(ngram, 4, 2)) == min(2, len(followed))
    assert not store.places([11])


def test_a_datastore_is_saved_and_belongs_to_its_vocabulary(tmp_path: Path) -> None:
    target = target_of("llama")
    folder = tmp_path / "store"
    Datastore.build([[3, 4, 5], [3, 4, 6]], target, "two texts").save(folder)
    assert Datastore.load(folder, target).continuations([3, 4], 2, 9) == [[5], [6]]
    drafter = build_drafter(SpeculativeConfig.from_dict({"method": "retrieval", "datastore": str(folder)}), target)
    assert isinstance(drafter, Retrieval)
    assert _propose(drafter, [9, 3, 4], 2) == ([5, 6], [-1, -1], [0.5, 0.5], 2)
    with pytest.raises(ConfigError, match=r"output: .*store exists already"):
        Datastore.build([[1]], target).save(folder)
    with pytest.raises(ConfigError, match=r"datastore: .*store was built for another vocabulary than that of model"):
        Datastore.load(folder, toy_target())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("datastore.json", lambda _: b"{", "cannot read"),
        ("datastore.json", lambda _: b'{"schema": "other"}', "is not a datastore of this version"),
        ("datastore.json", lambda data: data.replace(b'"prompts"', b'"prompt"'), "is not a datastore of this version"),
        ("tokens.npy", lambda _: b"", "cannot read"),
        ("suffixes.npy", lambda data: data.replace(b"<i4", b"<f4"), "damaged: its arrays are not rows of int32"),
        ("suffixes.npy", lambda _: b"\x93NUMPY\x01\x00", "cannot read"),
        # A token that the target lacks would break decoding a round later.
        ("tokens.npy", lambda data: data[:-4] + bytes([data[-4] ^ 1]) + data[-3:], "damaged: its tokens do not match"),
        ("suffixes.npy", lambda data: data[:-4] + bytes([data[-4] ^ 1]) + data[-3:], "damaged: its suffixes do not"),
    ],
)
def test_a_damaged_datastore_is_refused_in_one_line(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    target, folder = target_of("llama"), tmp_path / "store"
    Datastore.build([[3, 4, 5], [6, 7]], target).save(folder)
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    with pytest.raises(ConfigError, match=rf"^datastore: [^\n]*{message}[^\n]*$"):
        Datastore.load(folder, target)


def test_a_corpus_without_tokens_or_with_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "_MAX_TOKENS", 5)
    too_long = "has 6 tokens; a datastore holds at most 5"  # with an end after each text
    for texts, reason in (([[], []], "has no tokens"), ([[99]], "has token ids outside"), ([[3, 4], [5, 6]], too_long)):
        with pytest.raises(ConfigError, match=f"corpus: {reason}"):
            Datastore.build(texts, target_of("llama"))


def test_the_oldest_texts_are_dropped_if_memory_is_full() -> None:
    """The end of a text that is longer than the memory stays."""
    drafter = Retrieval(None, 1, 2, 2, 4, 0.0)
    drafter.memory = 20
    texts = [[*range(first, first + 4)] for first in range(0, 40, 4)]
    for read, known, gone in ((texts, 36, 0), ([[*range(30)]], 27, 3)):
        for text in read:
            proposed(started(drafter), text, 2)
        for last, found in ((known, (known + 1, known + 2)), (gone, ())):
            assert proposed(started(drafter), [last], 2).lookup_tokens == found
    assert sum(map(len, drafter._texts)) <= 20 + 4
