"""Measuring: which contender decodes what and when, what is counted, and whether a changed output is detected."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from layerskip import Measurement, Sampling, SpeculativeConfig, StopRule, Target, generate, load_target, measure
from layerskip.decoding.decode import DecodeResult
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, NoDraft
from layerskip.decoding.stats import DecodeStats, Round
from layerskip.measure.measure import Contender, Decoder, Task, interleave
from layerskip.measure.measurement import Sample
from layerskip.prompts import PromptError, PromptItem, PromptSet
from tests.accelerator import DEVICE
from tests.drafters.contract import greedy_tokens
from tests.tiny import VOCABULARY

PROMPTS = PromptSet.of(f"Tell me about the number {i}." for i in range(6))
TASK = Task(max_new_tokens=12)
SAMPLED = Sampling(temperature=0.8, top_k=20)
CONFIGS = [
    SpeculativeConfig(),
    SpeculativeConfig("layer_skip", mask="attention:0;mlp:1", num_speculative_tokens=3),
    SpeculativeConfig("prompt_lookup", prompt_lookup_min=1, prompt_lookup_max=2),
]
Change = Callable[[list[int]], list[int]]


Log = list[tuple[str, list[int], Task]]


def _logged(target: Target, log: Log | None = None, **changes: Change) -> dict[str, Contender]:
    """Contenders that decode plainly, may change the output, and log their tasks."""
    plain = Decoder(target, NoDraft())

    def contender(name: str, change: Change) -> Contender:
        def decode_and_log(prompt: Sequence[int], task: Task, on_prefill: Callable[[int], None]) -> DecodeResult:
            if log is not None:
                log.append((name, list(prompt), task))
            result = plain(prompt, task, on_prefill)
            return DecodeResult(change(result.tokens), result.stats, result.finish)

        return decode_and_log

    return {name: contender(name, change) for name, change in changes.items()}


def _verdicts(rows: Sequence[dict[str, Sample]]) -> dict[str, set[str]]:
    found = {name: {row[name].lossless.verdict for row in rows if row[name].lossless.compared} for name in rows[0]}
    assert all(found.values())
    return found


def _change(tokens: list[int]) -> list[int]:
    return [*tokens[:-1], 0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_lossless_drafters_are_exact_in_float32(tiny_target: Target, config: SpeculativeConfig) -> None:
    measured = measure(tiny_target, PROMPTS, config, max_new_tokens=16)
    assert measured.lossless.verdict == "exact"
    assert measured.lossless.compared == len(PROMPTS)
    assert [s.prompt_id for s in measured.candidate] == [item.id for item in PROMPTS]
    assert [s.tokens for s in measured.candidate] == [s.tokens for s in measured.baseline] == [16] * 6
    assert measured.tokens_per_second > 0
    assert measured.baseline_tokens_per_second > 0
    assert measured.stats.mean_acceptance_length >= 1
    assert (measured.stats.drafted > 0) == (config.method != "none")
    json.dumps(measured.to_dict(), allow_nan=False)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_contender_that_changes_the_output_is_detected(tiny_target: Target, sampling: Sampling) -> None:
    changes: dict[str, Change] = {"last": _change, "first": lambda ids: [0, *ids[1:]], "shorter": lambda ids: ids[:-1]}
    contenders = _logged(tiny_target, plain=list, honest=list, **changes)
    rows = list(interleave(tiny_target, PROMPTS.take(2), contenders, Task(sampling, 12)))
    assert _verdicts(rows) == {"plain": {"exact"}, "honest": {"exact"}} | {name: {"different"} for name in changes}


def test_an_excluded_contender_decodes_no_more(tiny_target: Target) -> None:
    log, gone, names = Log(), set[str](), []
    contenders = _logged(tiny_target, log, a=list, b=list, c=list)
    for row in interleave(tiny_target, PROMPTS, contenders, TASK, without=gone):
        names.append(set(row))
        gone.add("b")
    assert names == [{"a", "b", "c"}, *[{"a", "c"}] * (len(PROMPTS) - 1)]
    assert sum(name == "b" for name, _, _ in log) == 2  # the warm-up is one of them


def test_all_contenders_decode_every_prompt_in_a_random_order(tiny_target: Target) -> None:
    log, names = Log(), ("a", "b", "c")
    sampled = Task(Sampling(temperature=0.8, repetition_penalty=1.2), 8)
    list(interleave(tiny_target, PROMPTS.take(1), _logged(tiny_target, log, a=list), sampled))
    assert {task.sampling for _, _, task in log} == {sampled.sampling, Sampling(repetition_penalty=1.2)}
    log.clear()
    contenders = _logged(tiny_target, log, **dict.fromkeys(names, list))
    rows = list(interleave(tiny_target, PROMPTS, contenders, TASK, repeats=2))
    assert [row["b"].prompt_id for row in rows] == [item.id for item in PROMPTS] * 2
    warm_up, measured = log[:3], log[3:]
    assert sorted(name for name, _, _ in warm_up) == list(names)
    turns = [measured[i : i + 3] for i in range(0, len(measured), 3)]
    asked = [tiny_target.encode(item.messages()) for item in PROMPTS] * 2
    for turn, prompt in zip(turns, asked, strict=True):
        assert sorted(name for name, _, _ in turn) == list(names)
        assert [seen for _, seen, _ in turn] == [prompt] * 3
        assert len({task for _, _, task in turn}) == 1
    orders = [tuple(name for name, _, _ in turn) for turn in turns]
    assert len(set(orders)) > 2
    assert {order[0] for order in orders} == set(names)
    assert len({turn[0][2].seed for turn in turns}) == len(turns)


def test_all_contenders_continue_from_the_first_contenders_answers(tiny_target: Target) -> None:
    talk = PromptItem("talk", "chat", "Hello there.", ("And then?", "In the end?"))
    log = Log()
    (row,) = interleave(tiny_target, PromptSet((talk,)), _logged(tiny_target, log, plain=list, changed=_change), TASK)
    messages: list[dict[str, str]] = [{"role": "user", "content": "Hello there."}]
    expected = []
    for followup in (*talk.followups, None):
        expected.append(tiny_target.encode(messages))
        answer = tiny_target.decode(greedy_tokens(tiny_target, expected[-1], max_new_tokens=12))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": followup or ""}]
    for name in ("plain", "changed"):
        assert [prompt for asked, prompt, _ in log[2:] if asked == name] == expected
        assert (row[name].tokens, row[name].lossless.compared) == (36, 3)
    assert row["plain"].lossless.verdict == "exact"
    assert row["changed"].lossless.to_dict()["different"] == 3


@pytest.mark.parametrize(
    ("config", "learns"),
    [
        (SpeculativeConfig("token_recycling", 3, min_token_prob=0.0), True),
        (SpeculativeConfig("layer_skip", 3, mask="layers:1", stop=StopRule("adaptive", 0.6)), True),
        (SpeculativeConfig("layer_skip", 3, mask="layers:1", stop=StopRule("threshold", 0.6)), False),
        (SpeculativeConfig("cascade", members=(SpeculativeConfig("prompt_lookup", 3), CONFIGS[1])), True),
    ],
    ids=str,
)
def test_earlier_prompts_restore_the_state_of_a_drafter(
    tiny_target: Target, config: SpeculativeConfig, learns: bool
) -> None:
    decoded: list[str] = []

    class Watched(Decoder):
        def __call__(self, prompt: Sequence[int], task: Task, on_prefill: Callable[[int], None]) -> DecodeResult:
            decoded.append(tiny_target.decode(list(prompt)))
            return super().__call__(prompt, task, on_prefill)

    def contenders() -> dict[str, Contender]:
        return {"plain": Decoder.of(tiny_target, SpeculativeConfig()), "ours": Watched.of(tiny_target, config)}

    found = contenders()["ours"]
    assert isinstance(found, Decoder)
    assert found.drafter.keeps_state == learns
    prompts = PromptSet((*PROMPTS.take(2), *PROMPTS.take(2)))  # a drafter that keeps state knows the second two
    early, late = PromptSet(prompts.items[:2]), PromptSet(prompts.items[2:])
    rows = list(interleave(tiny_target, prompts, contenders(), TASK))
    decoded.clear()
    again = list(interleave(tiny_target, late, contenders(), TASK, before=early))
    assert [row["ours"].stats for row in again] == [row["ours"].stats for row in rows[2:]]
    assert len(decoded) == 1 + len(late) + (len(early) if learns else 0)  # the first one warms up


def test_a_sampled_conversation_is_compared_once(tiny_target: Target) -> None:
    prompts = PromptSet((PromptItem("talk", "chat", "Hello.", ("And then?", "And then?")), *PROMPTS.items[:2]))
    contenders = {"plain": Decoder.of(tiny_target, CONFIGS[0]), "skip": Decoder.of(tiny_target, CONFIGS[1])}
    rows = list(interleave(tiny_target, prompts, contenders, Task(SAMPLED, 12)))
    assert [row["skip"].lossless.compared for row in rows] == [1, 0, 0]
    assert rows[0]["skip"].lossless.verdict == "exact"
    assert "greedy" in rows[0]["skip"].lossless.basis


@pytest.fixture
def ending(tiny_folder: Path) -> Target:
    """A target that ends its outputs of the prompts 0, 2 and 4 with their first token."""
    target = load_target(str(tiny_folder), dtype="float32", device=DEVICE)
    first = [generate(target, item.messages(), max_new_tokens=1).tokens[0] for item in PROMPTS]
    target.model.generation_config.eos_token_id = [1, *first[::2]]
    lengths = [len(generate(target, item.messages(), max_new_tokens=12).tokens) for item in PROMPTS]
    assert [length == 1 for length in lengths] == [True, False] * 3, lengths
    return target


def test_outputs_that_end_at_once_are_counted_but_neither_compared_nor_timed(ending: Target) -> None:
    measured = measure(ending, PROMPTS, CONFIGS[1], max_new_tokens=12)
    assert [sample.lossless.compared for sample in measured.candidate] == [0, 1] * 3
    figures = measured.to_dict()
    assert (figures["prompts"], figures["empty_prompts"], figures["losslessness"]["verdict"]) == (6, 3, "exact")
    others = Measurement(measured.baseline[1::2], measured.candidate[1::2])
    assert (measured.speedup, measured.interval()) == (others.speedup, others.interval())
    contenders = _logged(ending, plain=list, changed=lambda tokens: [tokens[0], *tokens[2:]])
    sampled = list(interleave(ending, PROMPTS, contenders, Task(SAMPLED, 12)))
    assert _verdicts(sampled) == {"plain": {"exact"}, "changed": {"different"}}  # on the first that does not end at once


def test_an_output_that_only_one_side_ends_at_once_is_different(ending: Target) -> None:
    contenders = _logged(ending, plain=list, longer=lambda tokens: [*tokens, 70], other=lambda _: [70])
    (row,) = interleave(ending, PromptSet(PROMPTS.items[:1]), contenders, TASK)
    assert [row[name].lossless.verdict for name in ("plain", "longer", "other")] == ["unchecked", "different", "different"]


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_a_measurement_of_nothing_is_refused(tiny_folder: Path, sampling: Sampling | None) -> None:
    target = load_target(str(tiny_folder), dtype="float32", device=DEVICE)
    target.model.generation_config.eos_token_id = list(range(VOCABULARY))
    with pytest.raises(PromptError, match="^prompts: every output ends with its first token"):
        measure(target, PROMPTS.take(2), CONFIGS[2], sampling=sampling)
    target.model.generation_config.eos_token_id = None
    with pytest.raises(PromptError, match="^prompts: every output ends with its first token"):
        measure(target, PROMPTS.take(2), CONFIGS[2], max_new_tokens=1, sampling=sampling)
    with pytest.raises(PromptError, match="^prompts: are empty"):
        measure(target, [], CONFIGS[2], sampling=sampling)


@dataclass
class Timed:
    """A contender that takes a known time, and has ``known`` tokens when prefill ends."""

    clock: mock.Mock
    prefill: float
    decode: float
    known: int

    def __call__(self, prompt: Sequence[int], task: Task, on_prefill: Callable[[int], None]) -> DecodeResult:
        self.clock.return_value += self.prefill
        on_prefill(self.known)
        self.clock.return_value += self.decode
        return DecodeResult([7] * 9, DecodeStats((Round(2, 1, 2),)), "length")


@dataclass(eq=False)
class Slow(NoDraft):
    """A drafter that takes a second."""

    clock: mock.Mock

    def draft(self, context: Context, limit: int) -> Draft:
        self.clock.return_value += 1.0
        return super().draft(context, limit)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """A clock that only the contenders move."""
    clock = mock.Mock(return_value=100.0)
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


def test_tokens_from_prefill_are_not_credited_to_decoding(tiny_target: Target, clock: mock.Mock) -> None:
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


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU, events time the drafts")
def test_drafting_time_is_part_of_decoding_time(tiny_target: Target, clock: mock.Mock) -> None:
    contenders = {"baseline": Decoder(tiny_target, NoDraft()), "candidate": Decoder(tiny_target, Slow(clock))}
    measurement = Measurement.of(interleave(tiny_target, PROMPTS.take(2), contenders, TASK), "baseline", "candidate")
    for sample in measurement.candidate:
        # The last token is never drafted for: a round adds one of the target's own.
        assert sample.draft_seconds == sample.decode_seconds == sample.decoded_tokens - 1
    assert measurement.draft_share == 1.0
