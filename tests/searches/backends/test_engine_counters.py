"""Rounds from an engine's counters, against rounds that were counted."""

from __future__ import annotations

import random
from collections import Counter as Count

import pytest

from layerskip.decoding.stats import DecodeStats
from searches.backends.running_engine import Counters, spread
from tests.searches.backends.standin import counters


@pytest.mark.parametrize("seed", range(20))
def test_rounds_have_the_accepted_and_drafted_tokens_that_were_counted(seed: int) -> None:
    source = random.Random(seed)
    sizes = [source.randint(0, 5) for _ in range(12)]
    earlier = [(3, 1), (5, 5)]
    rounds = [(size, source.randint(0, size)) for size in sizes]
    found = Counters.parse(counters(earlier + rounds)).since(Counters.parse(counters(earlier)))
    decoded = sum(accepted + 1 for _, accepted in rounds)
    stats = DecodeStats(tuple(found.rounds(decoded)))
    assert Count(each.accepted for each in stats.rounds) == Count(accepted for _, accepted in rounds)
    assert stats.mean_acceptance_length == pytest.approx(decoded / len(rounds))
    assert stats.drafted == sum(sizes)
    assert stats.accepted == sum(accepted for _, accepted in rounds)


def test_a_last_round_that_accepted_too_many_adds_what_was_left() -> None:
    found = Counters.parse(counters([(4, 4), (4, 1)]))
    assert sum(each.committed for each in found.rounds(5)) == 5  # 7 were accepted or added, 5 were asked for


def test_counters_of_several_engines_are_added_up() -> None:
    found = Counters.parse(counters([(2, 1)]) + "\n" + counters([(3, 3)], engine="1"))
    assert found == Counters(2, 5, (2, 1, 1))


def test_llama_cpp_counts_under_the_same_names() -> None:
    page = counters([(4, 3), (2, 0)]).replace("vllm:", "llamacpp:")
    plain = "llamacpp:spec_decode_num_drafts_total 2\nllamacpp:spec_decode_num_draft_tokens_total 6"
    assert Counters.parse(page) == Counters(2, 6, (1, 1, 1, 0))
    assert Counters.parse(plain) == Counters(2, 6)  # it writes no labels


def test_a_page_without_counters_is_not_taken_for_no_drafts() -> None:
    assert Counters.parse("vllm:prompt_tokens_total 3.0") is None
    assert Counters.parse(counters([])) == Counters()


def test_rounds_are_dealt_in_proportion() -> None:
    rounds = Counters.parse(counters([(3, 2)] * 10)).rounds(60)  # and 30 tokens without a draft
    parts = spread(rounds, [40, 0, 20])
    assert [len(part.rounds) for part in parts] == [27, 0, 13]
    assert DecodeStats.join(parts).accepted == 20
