"""Pearson's chi-square test of counts, at a significance level that fixed seeds pass reliably."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping

from scipy.stats import chisquare

_SIGNIFICANCE = 1e-4
_RARE = 5.0  # below this expected count Pearson's statistic is not chi-square distributed


def assert_follows(outcomes: Iterable[Hashable], law: Mapping[Hashable, float]) -> None:
    """Assert that outcomes follow a distribution.

    Args:
        outcomes: the drawn values.
        law: the probability of each value; they sum to 1.
    """
    counts = Counter(outcomes)
    assert abs(sum(law.values()) - 1.0) < 1e-5
    impossible = [outcome for outcome in counts if law.get(outcome, 0.0) == 0.0]
    assert not impossible, f"of probability 0: {impossible[:5]}"
    total = sum(counts.values())
    observed, expected, rest_observed, rest_expected = [], [], 0, 0.0
    for outcome, probability in sorted(law.items(), key=lambda item: -item[1]):
        if probability * total < _RARE:
            rest_observed += counts[outcome]
            rest_expected += probability * total
        else:
            observed.append(counts[outcome])
            expected.append(probability * total)
    if rest_expected >= _RARE or not observed:
        observed.append(rest_observed)
        expected.append(rest_expected)
    elif rest_expected > 0:
        observed[-1] += rest_observed
        expected[-1] += rest_expected
    if len(observed) == 1:
        return  # one cell leaves nothing to test; impossible outcomes are excluded above
    scale = total / sum(expected)  # chisquare requires equal sums; float32 probabilities are off by 1e-7
    result = chisquare(observed, [value * scale for value in expected])
    assert result.pvalue > _SIGNIFICANCE, f"p = {result.pvalue:.1e}: {observed} where {expected} is expected"


def assert_sequences_follow(sequences: Iterable[tuple[int, ...]], law: Mapping[tuple[int, ...], float]) -> None:
    """Assert that sequences, and their beginnings of every length, follow a distribution.

    An error in the second token moves few beginnings of two tokens by much, but many whole sequences by little, and many
    cells hide it. Fewer sequences therefore show as much as a test of whole sequences alone.

    Args:
        sequences: the drawn sequences.
        law: the probability of each whole sequence; they sum to 1.
    """
    drawn = list(sequences)
    for length in range(1, max(map(len, law)) + 1):
        beginnings: dict[Hashable, float] = defaultdict(float)
        for sequence, probability in law.items():
            beginnings[sequence[:length]] += probability
        assert_follows((sequence[:length] for sequence in drawn), beginnings)
