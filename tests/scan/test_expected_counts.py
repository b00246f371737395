"""Tests the expected counts of sampled decoding against an enumeration of all outcomes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from layerskip.config import StopRule
from layerskip.decoding.decode import Stops, decode
from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.draft_plan import DraftPlan
from layerskip.models.skip_view import skip_view
from layerskip.models.target import Target
from layerskip.scan.scan import Scanner
from layerskip.texts.continuations import Continuation
from tests.accelerator import DEVICE
from tests.families import build
from tests.reference import processed_probs

Tokens = tuple[int, ...]
Outcome = tuple[float, int, int]
"""Probability of an outcome of a round, and its drafted and committed tokens."""

VOCABULARY, NEW, PROMPT = 5, 7, (3, 4, 2)
SAMPLING = Sampling(temperature=1.2, top_p=0.9)
MASK = DraftPlan.parse("layers:3", 4)  # the last layer: its draft can be computed without a cache
HALF = StopRule("threshold", 0.58)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(build("llama", vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def laws(target: Target) -> tuple[Law, Law]:
    """Distributions of the target and the draft."""
    return Law(target.model), Law(skip_view(target.model, MASK))


@pytest.fixture(scope="module")
def continuations(target: Target) -> list[Continuation]:
    """Sampled continuations, every third of which ends early."""
    texts = [decode(target, NoDraft(), PROMPT, SAMPLING, NEW, seed=i, stops=Stops(frozenset())).tokens for i in range(9)]
    cut = [tuple(text[: 4 if i % 3 == 0 else NEW]) for i, text in enumerate(texts)]
    return [Continuation(str(i), "test", PROMPT, tokens, NEW) for i, tokens in enumerate(cut)]


class Law:
    """A model's next-token distribution and confidence after every text, from passes without a cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[Tokens, tuple[list[float], float]] = {}

    def __call__(self, text: Tokens) -> tuple[list[float], float]:
        if text not in self._known:
            texts = [(*text[:-1], token) for token in range(VOCABULARY)]
            with torch.inference_mode():
                rows = self._model(input_ids=torch.tensor(texts, device=DEVICE), use_cache=False).logits[:, -1]
            for each, row in zip(texts, rows, strict=True):
                probs = processed_probs(each, row, SAMPLING).double()
                self._known[each] = (probs / probs.sum()).tolist(), float(row.softmax(-1).max())
        return self._known[text]


def _drafts(q: Law, text: Tokens, limit: int, stop: StopRule, draft: Tokens = ()) -> Iterator[tuple[Tokens, float]]:
    """Yield every draft after a text, and its probability."""
    unsure = bool(draft) and stop.method != "length" and q(text[:-1])[1] < stop.threshold
    if len(draft) >= limit or unsure:
        yield draft, 1.0
        return
    for token, chance in enumerate(q(text)[0]):
        if chance > 0:
            for found, rest in _drafts(q, (*text, token), limit, stop, (*draft, token)):
                yield found, chance * rest


def _outcomes(p: Law, q: Law, continuation: Continuation, start: int, length: int, stop: StopRule) -> Iterator[Outcome]:
    """Yield every outcome of a round that outputs the continuation: a literal algorithm 1 of arXiv 2211.17192."""
    text, ahead = (*continuation.prompt, *continuation.tokens[: start + 1]), continuation.tokens[start + 1 :]
    for draft, chance in _drafts(q, text, min(length, continuation.limit(start)), stop):
        for place, token in enumerate(draft):
            here = (*text, *draft[:place])
            target_probs, draft_probs = p(here)[0], q(here)[0]
            accepted = min(1.0, target_probs[token] / draft_probs[token])
            rest = [max(0.0, one - other) for one, other in zip(target_probs, draft_probs, strict=True)]
            if accepted < 1:
                yield chance * (1 - accepted) * rest[ahead[place]] / sum(rest), len(draft), place + 1
            if token != ahead[place]:
                break
            chance *= accepted
            if place + 1 == len(ahead):  # the end of the sequence inside a draft
                yield chance, place + 1, place + 1
                break
        else:
            yield chance * p((*text, *draft))[0][ahead[len(draft)]], len(draft), len(draft) + 1


def _exact(p: Law, q: Law, continuation: Continuation, length: int, stop: StopRule) -> tuple[float, float, float]:
    """Return the continuation's probability, and the expected rounds and drafted tokens, given that it is the output."""
    chances, sums = [0.0] * continuation.starts + [1.0], [[0.0] * 2 for _ in range(continuation.starts + 1)]
    for start in reversed(range(continuation.starts)):
        for chance, drafted, committed in _outcomes(p, q, continuation, start, length, stop):
            following = start + committed
            chances[start] += chance * chances[following]
            for which, value in enumerate((1, drafted)):
                sums[start][which] += chance * (value * chances[following] + sums[following][which])
    rounds, drafts = sums[0]
    return chances[0], rounds / chances[0], drafts / chances[0]


@pytest.mark.parametrize(("length", "stop"), [(1, StopRule()), (3, StopRule()), (2, HALF), (3, HALF)])
def test_expected_counts_equal_those_of_all_outcomes(
    length: int, stop: StopRule, target: Target, laws: tuple[Law, Law], continuations: list[Continuation]
) -> None:
    """Only the stop after a wrong token is an approximation."""
    scanner = Scanner(target, continuations, SAMPLING, depth=3, max_rows=2048)
    (scan,) = scanner.scan([MASK])
    first = np.concatenate([trace.confidence[:, 0] for trace in scan.traces])
    assert 0.3 < (first[~np.isnan(first)] < HALF.threshold).mean() < 0.7  # the share that HALF stops after one token
    found = scanner.counts(scan, length, stop)
    for continuation, counts in zip(continuations, found, strict=True):
        chance, rounds, drafted = _exact(*laws, continuation, length, stop)
        likely = [
            laws[0]((*PROMPT, *continuation.tokens[:i]))[0][continuation.tokens[i]]
            for i in range(1, len(continuation.tokens))
        ]
        assert chance == pytest.approx(math.prod(likely))  # the output is as likely as without drafts
        assert sum(counts.verified) == pytest.approx(rounds, rel=1e-4)
        guessed = stop == HALF and length > 2
        assert counts.drafted == pytest.approx(drafted, rel=0.1 if guessed else 1e-4)
