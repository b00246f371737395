"""How fast is a configuration, truly?

Contenders decode the same prompts, one after the other in a random order that changes from prompt to prompt, so drift of
the machine falls on all alike. The device is synchronised around every reading, prefill and decoding are timed apart, and
committed tokens are counted in one way for all: decoding starts when prefill has given its tokens and is credited with
those behind them. Each comparison carries its own verdict on losslessness.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from layerskip.config import SpeculativeConfig
from layerskip.decoding.decode import DecodeResult, decode
from layerskip.decoding.drafter import Drafter, Learner
from layerskip.decoding.sampling import Sampling
from layerskip.device.clock import now
from layerskip.device.memory import PeakMemory, held_bytes, table_bytes
from layerskip.drafters.registry import build_drafter
from layerskip.measure.losslessness import Losslessness, find_divergence
from layerskip.measure.measurement import Measurement, Sample
from layerskip.measure.timed_drafter import Clocked
from layerskip.models.graph_capture import seconds_recording
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target
from layerskip.prompts import PromptError, PromptItem, PromptSet
from layerskip.rules import EXACT, AcceptRule

WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Task:
    """What every contender is asked to do with a prompt.

    Args:
        sampling: how tokens are chosen.
        max_new_tokens: at least 1.
        seed: of the draws, where tokens are sampled.
    """

    sampling: Sampling = Sampling()
    max_new_tokens: int = 64
    seed: int = 0


class Contender(Protocol):
    """Anything that continues a prompt: our decoder, or a peer."""

    def __call__(self, prompt: Sequence[int], task: Task, on_prefill: Callable[[int], None]) -> DecodeResult:
        """Continue token ids, and call back once, when prefill is done, with the number of new tokens known by then."""
        ...


class Decoder:
    """Our decoding loop with one drafter, as a contender. The drafter's state carries on from prompt to prompt."""

    def __init__(self, target: Target, drafter: Drafter, accept: AcceptRule = EXACT) -> None:
        self.target, self.drafter, self.accept = target, Clocked(drafter, target.device), accept

    @property
    def learns(self) -> bool:
        """Whether the drafter keeps something from one prompt for the next."""
        drafter = self.drafter.drafter
        return isinstance(drafter, Learner) and drafter.learns

    def forget(self) -> None:
        """Let the drafter forget what it has learnt from earlier prompts."""
        if isinstance(self.drafter.drafter, Learner):
            self.drafter.drafter.forget()

    def held_bytes(self) -> int:
        """What the drafter's weights, caches and tables take beside the target's own, as its last prompt has left them."""
        drafter, given = self.drafter.drafter, self.drafter.given
        tensors = held_bytes(drafter, beside=(self.target.model, decoding_view(self.target.model), *given))
        return tensors + table_bytes(drafter, beside=(self.target, *given))

    @classmethod
    def of(cls, target: Target, config: SpeculativeConfig) -> Decoder:
        """The decoder that a configuration asks for; raises as :func:`build_drafter`."""
        return cls(target, build_drafter(config, target), config.accept)

    def __call__(self, prompt: Sequence[int], task: Task, on_prefill: Callable[[int], None]) -> DecodeResult:
        self.drafter.reset()  # of an output that ends at once, no drafter hears
        return decode(
            self.target,
            self.drafter,
            prompt,
            task.sampling,
            task.max_new_tokens,
            on_prefill=on_prefill,
            seed=task.seed,
            accept=self.accept,
        )


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
        target: the model.
        prompts: at least one; plain texts are taken as user messages.
        config: what to measure.
        sampling: greedy where None.
        max_new_tokens: per prompt and turn.
        repeats: how often every prompt is decoded by both.
        seed: of the order, and of the draws where tokens are sampled.

    Raises:
        ConfigError, UnsupportedModel, TargetError: as :func:`build_drafter`.
        PromptError: there are no prompts.
    """
    contenders = {"baseline": Decoder.of(target, SpeculativeConfig()), "candidate": Decoder.of(target, config)}
    task = Task(sampling or Sampling(), max_new_tokens, seed)
    chosen = prompts if isinstance(prompts, PromptSet) else PromptSet.of(prompts)
    if not len(chosen):
        raise PromptError("prompts: are empty")
    rows = list(interleave(target, chosen, contenders, task, repeats))
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
    """Let contenders decode the same prompts; the first one's outputs are what the others' must equal.

    Yields after every prompt, so that a caller may stop early.

    Args:
        target: the model.
        prompts: at least one.
        contenders: by name.
        task: what each is asked; the seed also fixes their order.
        repeats: how often every prompt is decoded.
        without: those that decode no more, never the first one; it may grow from prompt to prompt.
        before: prompts that whoever learns decodes first, unmeasured, where a comparison goes on.

    Yields:
        One sample per contender, of the same prompt.
    """
    order = random.Random(task.seed)
    checks = _warm_up(target, prompts, contenders, task)
    for repeat in range(repeats):
        # Who learns shall not meet a prompt that it has decoded before, as its users' would not be either.
        for contender in contenders.values():
            if isinstance(contender, Learner):
                contender.forget()
        if before is not None:
            _let_learn(target, before, contenders, task)
        for index, item in enumerate(prompts):
            left = {name: contender for name, contender in contenders.items() if name not in without}
            names = list(left)
            order.shuffle(names)
            asked = Task(task.sampling, task.max_new_tokens, task.seed + 1000 * repeat + index)
            yield _one_prompt(target, item, left, names, asked, checks)
            if checks is not None:
                checks = dict.fromkeys(checks, Losslessness(0))  # one comparison counts once


def _let_learn(target: Target, prompts: PromptSet, contenders: Mapping[str, Contender], task: Task) -> None:
    """Decode prompts with those who learn from them."""
    learners = {name: found for name, found in contenders.items() if isinstance(found, Decoder) and found.learns}
    for index, item in enumerate(prompts if learners else ()):
        asked = Task(task.sampling, task.max_new_tokens, task.seed + index)
        _one_prompt(target, item, learners, list(learners), asked, dict.fromkeys(learners, Losslessness(0)))


def _warm_up(
    target: Target, prompts: PromptSet, contenders: Mapping[str, Contender], task: Task
) -> dict[str, Losslessness] | None:
    """Run everyone once. Where tokens are sampled, outputs cannot be compared: greedy ones are made and compared here."""
    item = next(iter(prompts))
    prompt = target.encode(item.messages())
    length = min(WARMUP_TOKENS, task.max_new_tokens)
    for contender in contenders.values():
        contender(prompt, Task(task.sampling, length, task.seed), lambda _: None)
    if task.sampling.greedy:
        return None
    greedy = Sampling(repetition_penalty=task.sampling.repetition_penalty)
    outputs = {
        name: contender(prompt, Task(greedy, task.max_new_tokens, task.seed), lambda _: None).tokens
        for name, contender in contenders.items()
    }
    expected = outputs[next(iter(contenders))]
    found = {name: find_divergence(target, item.id, prompt, expected, out, greedy) for name, out in outputs.items()}
    basis = "greedy outputs of one prompt, as the measured ones are sampled"
    return {name: Losslessness(1, (part,) if part else (), basis) for name, part in found.items()}


def _one_prompt(
    target: Target,
    item: PromptItem,
    contenders: Mapping[str, Contender],
    order: list[str],
    task: Task,
    checks: dict[str, Losslessness] | None,
) -> dict[str, Sample]:
    """Decode one prompt, or a conversation turn by turn; everyone hears the first contender's answers."""
    reference = next(iter(contenders))
    messages = item.messages()
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for followup in (*item.followups, None):
        prompt = target.encode(messages)
        outputs: dict[str, list[int]] = {}
        for name in order:
            continuation, sample = _timed(target, item, contenders[name], prompt, task)
            outputs[name] = continuation.tokens
            samples[name].append(sample)
        for name in contenders:
            samples[name][-1] = samples[name][-1].judged(
                (checks[name] if len(samples[name]) == 1 else Losslessness(0))  # one comparison counts once
                if checks is not None
                else _judge(target, item.id, prompt, outputs[reference], outputs[name], task.sampling)
            )
        if followup is not None:
            messages.append({"role": "assistant", "content": target.decode(outputs[reference])})
            messages.append({"role": "user", "content": followup})
    return {name: Sample.join(parts) for name, parts in samples.items()}


def _judge(
    target: Target, prompt_id: str, prompt: list[int], expected: list[int], actual: list[int], sampling: Sampling
) -> Losslessness:
    found = find_divergence(target, prompt_id, prompt, expected, actual, sampling)
    return Losslessness(1, (found,) if found else ())


def _timed(
    target: Target, item: PromptItem, contender: Contender, prompt: list[int], task: Task
) -> tuple[DecodeResult, Sample]:
    memory = PeakMemory(target.device)
    known: list[tuple[float, int]] = []

    def clock() -> float:
        return now(target.device) - seconds_recording()

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
        decoding_bytes=memory.grown(),
        stats=continuation.stats,
        draft_seconds=contender.drafter.seconds if isinstance(contender, Decoder) else 0.0,
    )
    return continuation, sample
