"""Measurement of decoding speed, paired prompt by prompt.

Contenders decode the same prompts one after the other, in a random order that changes from prompt to prompt, so drift of the
machine affects all of them alike. The device is synchronised at every reading, and prefill and decoding are timed apart.
Tokens are counted in the same way for all: decoding starts when prefill has given its tokens, and is credited with the
tokens after those. Each comparison has its own check of losslessness.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerskip.config import SpeculativeConfig
from layerskip.decoding.checkpoint_settings import default_sampling
from layerskip.decoding.decode import DecodeResult, decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, LateRead, VerifyOutput
from layerskip.decoding.sampling import Chooser, Sampling
from layerskip.decoding.verify import Verdict
from layerskip.device.memory import PeakMemory
from layerskip.device.transfer import now
from layerskip.draft_plan import DraftPlan
from layerskip.drafters.registry import build_drafter
from layerskip.measure.losslessness import Losslessness, find_divergence
from layerskip.measure.measurement import Measurement, Sample, check_output
from layerskip.models.cache import KVCache
from layerskip.models.graph_capture import capture_seconds
from layerskip.models.skip_view import copies_bytes
from layerskip.models.target import NotFinite, Target
from layerskip.prompts import PromptError, PromptItem, PromptSet


class TimedDrafter(Drafter):
    """A drafter with a clock for drafting and learning: the device's own if it has one, as waiting would slow it down.

    The time of capturing passes, which happens once, is left out.
    """

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        self.drafter, self.device = drafter, device
        self.tree_tokens, self.reads_features = drafter.tree_tokens, drafter.reads_features
        self.reads_logits = drafter.reads_logits
        self.never_drafts = drafter.never_drafts
        self._readings: list[tuple[Any, Any, float]] = []  # start, end, and seconds of capturing in between

    @property
    def seconds(self) -> float:
        """Seconds spent on drafting and learning; starting a prompt belongs to its prefill."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return sum(max(0.0, float(start.elapsed_time(end)) / 1000 - lost) for start, end, lost in self._readings)
        return sum(float(end - start) - lost for start, end, lost in self._readings)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self.drafter.start(prompt, cache, chooser)

    def draft(self, context: Context, limit: int) -> Draft:
        with self._timed():
            return self.drafter.draft(context, limit)

    def observe_features(self, features: Tensor) -> None:
        self.drafter.observe_features(features)

    def observe(self, verdict: Verdict) -> None:
        self.drafter.observe(verdict)

    def observe_logits(self, output: VerifyOutput) -> Sequence[LateRead]:
        with self._timed():
            return [LateRead(late.values, partial(self._receive, late)) for late in self.drafter.observe_logits(output)]

    def _receive(self, late: LateRead, verdict: Verdict, values: list[Any]) -> None:
        with self._timed():
            late.receive(verdict, values)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start, before = self._read(), capture_seconds()
        yield
        self._readings.append((start, self._read(), capture_seconds() - before))

    def _read(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


_WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Task:
    """The decoding that every contender performs on a prompt."""

    sampling: Sampling = Sampling()
    max_new_tokens: int = 64  # at least 1
    seed: int = 0  # of the draws, if tokens are sampled


Contender = Callable[[Sequence[int], Task, Callable[[int], None]], DecodeResult]
"""A function that continues token ids: the decoder of this library, or a peer.

After prefill, it calls the function that it is given, once, with the number of new tokens known by then.
"""


class Decoder:
    """The decoding loop with one drafter, as a contender. The drafter's state lasts from prompt to prompt."""

    timed: TimedDrafter  # of the last prompt

    def __init__(self, target: Target, drafter: Drafter, plans: Sequence[DraftPlan] = ()) -> None:
        self.target, self.drafter, self._plans = target, drafter, plans

    @classmethod
    def of(cls, target: Target, config: SpeculativeConfig) -> Decoder:
        """Return a configuration's decoder; raises like :func:`build_drafter`."""
        return cls(target, build_drafter(config, target), config.plans(target.layers))

    @property
    def copies_bytes(self) -> int:
        """The bytes of the weights at fewer bits that its drafts read."""
        return sum(copies_bytes(self.target.model, self._plans).values())

    def __call__(self, prompt: Sequence[int], task: Task, on_prefill: Callable[[int], None]) -> DecodeResult:
        self.timed = TimedDrafter(self.drafter, self.target.device)
        waiting = [on_prefill]

        def callback(tokens: list[int]) -> None:
            if waiting:
                waiting.pop()(len(tokens))

        sampling, length = task.sampling, task.max_new_tokens
        return decode(self.target, self.timed, prompt, sampling, length, callback=callback, seed=task.seed)


def measure(
    target: Target,
    prompts: PromptSet | Sequence[str],
    config: SpeculativeConfig,
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = 64,
    repeats: int = 1,
    seed: int = 0,
) -> Measurement:
    """Measure a configuration against plain decoding, prompt by prompt.

    Args:
        prompts: at least one; plain texts are user messages.
        sampling: None for greedy decoding, with the checkpoint's repetition penalty.
        seed: of the order, and of the draws if tokens are sampled.

    Raises:
        ConfigError, UnsupportedModel, TargetError: see :func:`build_drafter`.
        PromptError: there are no prompts, or every output ends with its first token.
    """
    contenders = {"baseline": Decoder.of(target, SpeculativeConfig()), "candidate": Decoder.of(target, config)}
    task = Task(sampling or default_sampling(target), max_new_tokens, seed)
    chosen = prompts if isinstance(prompts, PromptSet) else PromptSet.of(prompts)
    if not len(chosen):
        raise PromptError("prompts: are empty")
    rows = list(interleave(target, chosen, contenders, task, repeats))
    check_output(row["baseline"] for row in rows)
    return Measurement.of(rows, "baseline", "candidate")


def interleave(
    target: Target,
    prompts: PromptSet,
    contenders: Mapping[str, Contender],
    task: Task,
    repeats: int = 1,
    without: Collection[str] = (),
    before: PromptSet | None = None,
) -> Iterator[dict[str, Sample]]:
    """Let contenders decode the same prompts; the outputs of the first are the reference of the others.

    Args:
        prompts: at least one.
        task: of every contender; its seed also determines their order.
        without: names of contenders that decode no more, never the first one; it may grow from prompt to prompt.
        before: prompts of the earlier part of a comparison. Contenders that keep state decode them first, unmeasured.

    Yields:
        After every prompt, one sample per contender; a caller may stop early.
    """
    order = random.Random(task.seed)
    stateful = {name: each for name, each in contenders.items() if isinstance(each, Decoder) and each.drafter.keeps_state}
    checks = _warmup(target, prompts, contenders, task)
    for repeat in range(repeats):
        # A contender that keeps state must not have decoded a prompt before, as it would not have in use.
        for each in stateful.values():
            each.drafter.reset_state()
        for index, item in enumerate(before if before and stateful else ()):
            _one_prompt(target, item, stateful, list(stateful), replace(task, seed=task.seed + index))
        for index, item in enumerate(prompts):
            remaining = {name: contender for name, contender in contenders.items() if name not in without}
            names = list(remaining)
            order.shuffle(names)
            row = _one_prompt(target, item, remaining, names, replace(task, seed=task.seed + 1000 * repeat + index))
            yield {name: replace(sample, lossless=checks.pop(name, sample.lossless)) for name, sample in row.items()}


def _warmup(target: Target, prompts: PromptSet, contenders: Mapping[str, Contender], task: Task) -> dict[str, Losslessness]:
    """Run every contender once. If tokens are sampled, return comparisons of greedy outputs."""

    def decode_opening(item: PromptItem, task: Task) -> dict[str, Sample]:
        return _one_prompt(target, replace(item, followups=()), contenders, list(contenders), task)

    decode_opening(prompts.items[0], replace(task, max_new_tokens=min(_WARMUP_TOKENS, task.max_new_tokens)))
    return {} if task.sampling.greedy else greedy_checks(prompts, task, decode_opening)


def greedy_checks(
    prompts: PromptSet, task: Task, decode_opening: Callable[[PromptItem, Task], Mapping[str, Sample]]
) -> dict[str, Losslessness]:
    """Return comparisons of greedy outputs by contender, as sampled ones differ by chance.

    They are those of the prompts up to the first whose output does not end with its first token. ``decode_opening`` decodes
    the first turn of a prompt with all contenders, of which the first is the reference.
    """
    greedy = replace(task, sampling=Sampling(repetition_penalty=task.sampling.repetition_penalty))
    rows: list[Mapping[str, Sample]] = []
    for item in prompts:
        rows.append(decode_opening(item, greedy))
        if next(iter(rows[-1].values())).lossless.compared:
            break
    basis = "greedy outputs of one prompt, as the measured ones are sampled"
    return {name: replace(Losslessness.join(row[name].lossless for row in rows), basis=basis) for name in rows[0]}


def _one_prompt(
    target: Target,
    item: PromptItem,
    contenders: Mapping[str, Contender],
    order: list[str],
    task: Task,
) -> dict[str, Sample]:
    """Decode one prompt, or a conversation turn by turn; all contenders continue from the first contender's answers."""
    reference = next(iter(contenders))
    messages = item.messages()
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for followup in (*item.followups, None):
        prompt = target.encode(messages, item.field)
        outputs: dict[str, list[int]] = {}
        for name in order:
            try:
                with NotFinite.naming(item.id, name):
                    continuation, sample = _timed(target, item, contenders[name], prompt, task)
            except NotFinite:
                with NotFinite.naming(item.id, reference):  # blames the reference if it fails, too
                    contenders[reference](prompt, task, lambda _: None)
                raise
            outputs[name] = continuation.tokens
            samples[name].append(sample)
        for name in contenders if task.sampling.greedy else ():
            lossless = _compare(target, item.id, prompt, outputs[reference], outputs[name], task)
            samples[name][-1] = replace(samples[name][-1], lossless=lossless)
        if followup is not None:
            messages.append({"role": "assistant", "content": target.decode(outputs[reference])})
            messages.append({"role": "user", "content": followup})
    return {name: Sample.join(parts) for name, parts in samples.items()}


def _compare(
    target: Target, prompt_id: str, prompt: list[int], expected: list[int], actual: list[int], task: Task
) -> Losslessness:
    divergence = find_divergence(target, prompt_id, prompt, expected, actual, task.sampling)
    if divergence is None and len(expected) == 1 < task.max_new_tokens:
        return Losslessness(0)  # both ended with the token of the prefill, which no drafter could change
    return Losslessness(1, (divergence,) if divergence else ())


def _timed(
    target: Target, item: PromptItem, contender: Contender, prompt: list[int], task: Task
) -> tuple[DecodeResult, Sample]:
    memory = PeakMemory(target.device)
    known: list[tuple[float, int]] = []

    def clock() -> float:
        return now(target.device) - capture_seconds()

    start = clock()
    continuation = contender(prompt, task, lambda count: known.append((clock(), count)))
    end = clock()
    prefilled, count = known[0]
    sample = Sample(
        prompt_id=item.id,
        category=item.category,
        tokens=len(continuation.tokens),
        decoded_tokens=len(continuation.tokens) - count,
        prefill_seconds=prefilled - start,
        decode_seconds=end - prefilled,
        peak_memory_bytes=memory.read(),
        stats=continuation.stats,
        copies_bytes=contender.copies_bytes if isinstance(contender, Decoder) else 0,
        draft_seconds=contender.timed.seconds if isinstance(contender, Decoder) else 0.0,
    )
    return continuation, sample
