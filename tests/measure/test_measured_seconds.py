"""Measuring: which seconds count, and for which tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from layerskip import DecodeStats, Measurement, PromptSet, Round, Target
from layerskip.decoding.decode import DecodeResult
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, NoDraft
from layerskip.measure.measure import Decoder, Task, interleave
from layerskip.prompts import PromptItem
from tests.accelerator import DEVICE

PROMPTS = PromptSet.of(f"Tell me about the number {i}." for i in range(2))
TASK = Task(max_new_tokens=12)


class Clock:
    """A clock that only the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Timed:
    """A contender that takes a known time, and has ``known`` tokens when prefill ends."""

    clock: Clock
    prefill: float
    decode: float
    known: int

    def __call__(self, prompt: Sequence[int], task: Task, on_prefill: Callable[[int], None]) -> DecodeResult:
        self.clock.now += self.prefill
        on_prefill(self.known)
        self.clock.now += self.decode
        return DecodeResult([7] * 9, DecodeStats((Round(2, 1, 2),)), "length")


def test_tokens_from_prefill_are_not_credited_to_decoding(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    contenders = {"ours": Timed(clock, 2.0, 4.0, known=1), "peer": Timed(clock, 1.0, 3.0, known=3)}
    talk = PromptItem("talk", "chat", "One.", ("Two.",))
    row, both = interleave(tiny_target, PromptSet((*PROMPTS.items[:1], talk)), contenders, TASK)
    ours, peer = row["ours"], row["peer"]
    assert (ours.tokens, ours.decoded_tokens, ours.prefill_seconds, ours.decode_seconds) == (9, 8, 2.0, 4.0)
    assert (peer.tokens, peer.decoded_tokens, peer.prefill_seconds, peer.decode_seconds) == (9, 6, 1.0, 3.0)
    assert (ours.tokens_per_second, peer.tokens_per_second) == (2.0, 2.0)
    assert ours.stats == DecodeStats((Round(2, 1, 2),))
    talked = both["ours"]
    assert (talked.prefill_seconds, talked.decode_seconds, talked.decoded_tokens) == (4.0, 8.0, 16)


class _Slow(NoDraft):
    """A drafter that sleeps."""

    def draft(self, context: Context, limit: int) -> Draft:
        time.sleep(0.01)
        return super().draft(context, limit)


@pytest.mark.skipif(DEVICE != "cpu", reason="the clock of a GPU does not see the host sleep")
def test_drafting_time_is_part_of_decoding_time(tiny_target: Target) -> None:
    contenders = {"baseline": Decoder(tiny_target, NoDraft()), "candidate": Decoder(tiny_target, _Slow())}
    measurement = Measurement.of(interleave(tiny_target, PROMPTS, contenders, TASK), "baseline", "candidate")
    for sample in measurement.candidate:
        # The last token is never drafted for: a round adds one of the target's own.
        assert 0.01 * (sample.decoded_tokens - 1) <= sample.draft_seconds < sample.decode_seconds
    assert 0 <= Measurement(measurement.baseline, measurement.baseline).draft_share < measurement.draft_share < 1
