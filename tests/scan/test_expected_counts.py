"""Expected counts of sampled decoding: against every outcome of every round, and against the real decoder's draws."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.drafters.registry import build_drafter
from layerskip.mask import SkipMask
from layerskip.models.skip_view import skip_view
from layerskip.models.target import Target
from layerskip.scan.replay import count
from layerskip.scan.scan import Scan, Scanner
from layerskip.texts.continuations import Continuation
from tests.accelerator import DEVICE
from tests.families import build
from tests.processors import processed_probs

Tokens = tuple[int, ...]
Outcome = tuple[float, int, int, int]
"""Its chance, and a round's drafted, accepted and committed tokens."""

VOCABULARY, NEW, PROMPT = 5, 7, (3, 4, 2)
SAMPLING = Sampling(temperature=1.2, top_p=0.9)
MASK = SkipMask.parse("layers:3", 4)  # of the last layer: a pass without a cache tells what its draft does
HALF = StopRule("threshold", 0.58)
NAMES = ("rounds", "drafted", "accepted")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(build("llama", vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def laws(target: Target) -> tuple[Law, Law]:
    """The target's and the draft's."""
    return Law(target.model), Law(skip_view(target.model, MASK))


@pytest.fixture(scope="module")
def continuations(target: Target) -> list[Continuation]:
    """Sampled ones, every third of which ends early."""
    texts = [decode(target, NoDraft(), PROMPT, SAMPLING, NEW, seed=i, eos_ids=frozenset()).tokens for i in range(9)]
    cut = [tuple(text[: 4 if i % 3 == 0 else NEW]) for i, text in enumerate(texts)]
    return [Continuation(str(i), "test", PROMPT, tokens, NEW) for i, tokens in enumerate(cut)]


class Law:
    """What a model says behind every text, from uncached passes; and how sure it is."""

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
    """Every draft behind a text, and its chance."""
    unsure = bool(draft) and stop.kind != "length" and q(text[:-1])[1] < stop.threshold
    if len(draft) >= limit or unsure:
        yield draft, 1.0
        return
    for token, chance in enumerate(q(text)[0]):
        if chance > 0:
            for found, rest in _drafts(q, (*text, token), limit, stop, (*draft, token)):
                yield found, chance * rest


def _outcomes(p: Law, q: Law, continuation: Continuation, start: int, length: int, stop: StopRule) -> Iterator[Outcome]:
    """Every outcome of a round that gives the continuation's own tokens: algorithm 1 of arXiv 2211.17192, word by word."""
    text, ahead = (*continuation.prompt, *continuation.tokens[: start + 1]), continuation.tokens[start + 1 :]
    for draft, chance in _drafts(q, text, min(length, continuation.limit(start)), stop):
        for place, token in enumerate(draft):
            here = (*text, *draft[:place])
            wanted, said = p(here)[0], q(here)[0]
            passes = min(1.0, wanted[token] / said[token])
            rest = [max(0.0, one - other) for one, other in zip(wanted, said, strict=True)]
            if passes < 1:
                yield chance * (1 - passes) * rest[ahead[place]] / sum(rest), len(draft), place, place + 1
            if token != ahead[place]:
                break
            chance *= passes
            if place + 1 == len(ahead):  # the end of the sequence inside a draft
                yield chance, place + 1, place + 1, place + 1
                break
        else:
            yield chance * p((*text, *draft))[0][ahead[len(draft)]], len(draft), len(draft), len(draft) + 1


def _exact(p: Law, q: Law, continuation: Continuation, length: int, stop: StopRule) -> tuple[float, dict[str, float]]:
    """The continuation's probability, and the expected counts, given that it came out."""
    chances, sums = [0.0] * continuation.starts + [1.0], [[0.0] * 3 for _ in range(continuation.starts + 1)]
    for start in reversed(range(continuation.starts)):
        for chance, drafted, accepted, committed in _outcomes(p, q, continuation, start, length, stop):
            behind = start + committed
            chances[start] += chance * chances[behind]
            for which, value in enumerate((1, drafted, accepted)):
                sums[start][which] += chance * (value * chances[behind] + sums[behind][which])
    return chances[0], dict(zip(NAMES, (each / chances[0] for each in sums[0]), strict=True))


def _cut(scan: Scan) -> float:
    """How many drafts HALF stops behind their first token, of those that may go on."""
    sure = np.concatenate([trace.confidence[:, 0] for trace in scan.traces])
    return float((sure[~np.isnan(sure)] < HALF.threshold).mean())


@pytest.mark.parametrize(("length", "stop"), [(1, StopRule()), (3, StopRule()), (2, HALF), (3, HALF)])
def test_expected_counts_are_those_of_all_outcomes(
    length: int, stop: StopRule, target: Target, laws: tuple[Law, Law], continuations: list[Continuation]
) -> None:
    """Where a stop rule ends what is drafted behind a wrong token is all that is guessed."""
    scanner = Scanner(target, continuations, SAMPLING, depth=3, max_rows=2048)
    (scan,) = scanner.scan([MASK])
    assert 0.3 < _cut(scan) < 0.7
    found = scanner.counts(scan, length, stop)
    for continuation, counts in zip(continuations, found, strict=True):
        chance, expected = _exact(*laws, continuation, length, stop)
        likely = [
            laws[0]((*PROMPT, *continuation.tokens[:i]))[0][continuation.tokens[i]]
            for i in range(1, len(continuation.tokens))
        ]
        assert chance == pytest.approx(math.prod(likely))  # what comes out is as likely as without drafts
        for name in NAMES:
            guessed = name == "drafted" and stop == HALF and length > 2
            assert getattr(counts, name) == pytest.approx(expected[name], rel=0.1 if guessed else 1e-4), name
    assert 0.3 < sum(counts.accepted for counts in found) / sum(counts.drafted for counts in found) < 0.9


def test_expected_counts_are_the_mean_of_real_draws(target: Target) -> None:
    """Each beside what is expected of the very text that came out, so that texts' differences are no noise."""
    drafter = build_drafter(SpeculativeConfig("layer_skip", 2, mask=MASK.format(), stop=HALF), target)
    real = [decode(target, drafter, PROMPT, SAMPLING, NEW, seed=i, eos_ids=frozenset()) for i in range(30)]
    continuations = [Continuation(str(i), "test", PROMPT, tuple(out.tokens), NEW) for i, out in enumerate(real)]
    scanner = Scanner(target, continuations, SAMPLING, depth=2, max_rows=2048)
    (scan,) = scanner.scan([MASK])
    stats, foretold = [count(out.stats.rounds) for out in real], scanner.counts(scan, 2, HALF)
    for name in NAMES:
        found, expected = (np.array([getattr(each, name) for each in some]) for some in (stats, foretold))
        spread = (found - expected).std(ddof=1) / math.sqrt(len(found))
        assert abs(found.mean() - expected.mean()) < 4 * spread < 0.25 * found.mean(), name
