"""The decoding loop: where it ends and what it reports; the adaptive threshold of stop rules, worked out by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.decode import DecodeResult, Stops, decode
from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stopping import Stopper
from layerskip.drafters.registry import build_drafter
from layerskip.models.prefill import Prefill
from layerskip.models.target import Target
from tests.drafters.contract import greedy_tokens, target_of
from tests.drafters.members import SECONDS, member_of
from tests.families import SKIPPABLE, build

GREEDY = Sampling()
PROMPT = [3, 4, 5, 3, 4, 5, 3, 4]
METHODS = ("none", *SECONDS, "draft_model", "cascade")


@pytest.fixture(scope="module")
def target() -> Target:
    """A model without an end-of-sequence token."""
    return target_of("llama")


@pytest.mark.parametrize("family", SKIPPABLE)
def test_greedy_tokens_of_every_family_equal_those_of_generate(family: str) -> None:
    """Beyond the sliding windows of families that have one."""
    target = Target(build(family, eos_token_id=None))
    prompt = [(7 * i) % 61 + 3 for i in range(9)]
    config = SpeculativeConfig(method="layer_skip", mask="attention:0;mlp:2", num_speculative_tokens=3)
    expected = greedy_tokens(target, prompt, max_new_tokens=12)
    assert decode(target, build_drafter(config, target), prompt, GREEDY, 12).tokens == expected


@pytest.mark.parametrize("method", ["none", "token_recycling", "layer_skip"])
def test_a_stop_predicate_sees_every_token_and_ends_the_output(target: Target, method: str) -> None:
    plain = decode(target, NoDraft(), PROMPT, GREEDY, 16)
    assert plain.finish == "length"
    for length in range(1, 12):
        seen: list[list[int]] = []

        def stops(tokens: list[int], length: int = length, seen: list[list[int]] = seen) -> bool:
            seen.append(list(tokens))
            return len(tokens) == len(PROMPT) + length

        result = decode(target, member_of(method, target), PROMPT, GREEDY, 16, stops=Stops(criterion=stops))
        assert (result.tokens, result.finish) == (plain.tokens[:length], "stop")
        assert seen == [PROMPT + plain.tokens[: i + 1] for i in range(length)]


def test_an_end_token_takes_precedence_over_a_stop_and_a_stop_over_the_limit(target: Target) -> None:
    tokens = decode(target, NoDraft(), PROMPT, GREEDY, 8).tokens
    first = tokens.index(tokens[-1]) + 1
    ends = frozenset(tokens[-1:])

    def finish(eos_ids: frozenset[int], stopping: bool) -> str:
        def stops(seen: list[int]) -> bool:
            return stopping and len(seen) == len(PROMPT) + first

        result = decode(target, NoDraft(), PROMPT, GREEDY, first, stops=Stops(eos_ids, stops))
        assert result.tokens == tokens[:first]
        return result.finish

    assert finish(ends, True) == finish(ends, False) == "eos"
    assert finish(frozenset(), True) == "stop"
    assert finish(frozenset(), False) == "length"


def test_the_first_token_is_reported_before_any_draft(target: Target) -> None:
    events: list[str] = []

    class Watched(NoDraft):
        def draft(self, *args: Any) -> Any:
            events.append("draft")
            return super().draft(*args)

    decode(target, Watched(), PROMPT, GREEDY, 3, callback=lambda tokens: events.append(f"commit {len(tokens)}"))
    # The last round has room for the target's own token only, and asks for no draft.
    assert events == ["commit 1", "draft", "commit 1", "commit 1"]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", [*METHODS, "eagle"])
def test_a_stored_prefill_and_a_seed_give_the_same_result(target: Target, method: str, sampling: Sampling) -> None:
    """Also for a drafter that reads the prompt's hidden states, and repeatedly."""
    prefill = Prefill.of(target, PROMPT)

    def outcome(prompt: Prefill | list[int], seed: int = 5) -> DecodeResult:
        torch.rand(1)  # other random numbers must not matter
        return decode(target, member_of(method, target), prompt, sampling, 20, seed=seed)

    plain = outcome(PROMPT)
    assert outcome(prefill) == outcome(prefill) == plain
    assert (outcome(PROMPT, 8).tokens == plain.tokens) == sampling.greedy
    assert prefill.cache.length == len(PROMPT)


@pytest.mark.parametrize(("prompt", "length", "named"), [(PROMPT, 0, "max_new_tokens: 0"), ([], 4, "prompt")])
def test_a_prompt_or_a_limit_that_leaves_nothing_to_decode_is_refused(
    target: Target, prompt: list[int], length: int, named: str
) -> None:
    with pytest.raises(ValueError, match=f"^{named} ?"):
        decode(target, NoDraft(), prompt, GREEDY, length)


def test_threads_take_turns_at_a_model(target: Target) -> None:
    """Also if each has a target of its own over it. Views, captured passes and drafters hold the state of one text."""
    drafter, ended, found = member_of("layer_skip", target), list[str](), dict[str, list[int]]()

    def run(name: str, prompt: list[int], callback: Callable[[list[int]], None] | None = None) -> None:
        found[name] = decode(Target(target.model), drafter, prompt, GREEDY, 12, callback=callback).tokens
        ended.append(name)

    second = threading.Thread(target=run, args=("second", PROMPT[2:]))

    def interrupt(_: list[int]) -> None:
        if second.ident is None:
            second.start()
        second.join(0.02)  # time for all of its rounds, unless it waits

    run("first", PROMPT, interrupt)
    second.join()
    assert ended == ["first", "second"]
    for name, prompt in (("first", PROMPT), ("second", PROMPT[2:])):
        assert found[name] == greedy_tokens(target, prompt, max_new_tokens=12)


def test_the_adaptive_threshold_follows_the_acceptance_rate_until_it_is_reset() -> None:
    """The first round's rate counts alone; each later one is averaged with the past, half and half."""
    stopper = Stopper(StopRule("adaptive", 0.6))
    rounds = [
        (4, 4, 0.600 - 0.001),  # rate 1, above 0.9: 0.9 * 0.6 + 0.1 * (0.6 - 0.01)
        (16, 14, 0.599 - 0.001),  # rate 0.5 * 1 + 0.5 * 0.875 = 0.9375, still above
        (0, 0, 0.598),  # nothing drafted, no change
        (2, 0, 0.598 + 0.001),  # rate 0.46875
        (1, 1, 0.599 + 0.001),  # rate 0.734375, still at most 0.9
        (8, 8, 0.600 + 0.001),  # rate 0.8671875
        (3, 3, 0.601 - 0.001),  # rate 0.93359375
    ]
    for _ in range(2):
        for drafted, accepted, expected in rounds:
            stopper.observe(drafted, accepted)
            assert stopper.threshold == pytest.approx(expected)
        stopper.reset()


@pytest.mark.parametrize(("start", "accepted", "end"), [(0.9995, 0, 1.0), (0.0005, 4, 0.0)])
def test_the_threshold_stays_a_probability(start: float, accepted: int, end: float) -> None:
    stopper = Stopper(StopRule("adaptive", start))
    stopper.observe(4, accepted)
    assert stopper.threshold == end
