"""What back ends share whose engine is a server: pairing over HTTP, engines that take turns, and the check of outputs.

Plain decoding and the configurations decode the same prompts on engines that run side by side, prompt by prompt and in
random order. Where fewer engines may run than there are configurations, groups of these take turns beside the plain one.
Under load, all prompts are sent to one engine after the other, with so many requests in flight.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from layerskip import ConfigError, PromptSet, SpeculativeConfig, Target
from layerskip.config import methods
from layerskip.engines.deployment import Unsupported
from layerskip.measure.losslessness import Losslessness, find_divergence
from layerskip.measure.measure import Task, greedy_checks
from layerskip.measure.measurement import Sample
from layerskip.models.environment import machine
from layerskip.prompts import PromptItem
from searches.app.checks import InputError, check_list, check_number, check_whole
from searches.backends.backend import BASELINE, CANDIDATE, Backend, BackendError, Comparison
from searches.backends.client import Client
from searches.backends.engine_process import EngineProcess, free_port
from searches.backends.running_engine import Answer, RunningEngine
from searches.space.search_space import SearchSpace
from searches.tracking.names import STARTUP_SECONDS

_PLAIN = SpeculativeConfig()
_WARMUP_TOKENS = 16
_Answers = dict[str, list[Answer]]  # of each name, turn by turn


@dataclass(eq=False)
class ServedBackend(Backend):
    """A back end that measures through servers.

    Args:
        target: the model that they serve; it encodes prompts and judges differences.
        engines: the most engines that run at the same time.
        limit_seconds: the most seconds for one request.
        start_seconds: the most seconds that an engine may take to start.
        schedule: draft lengths by number of requests in flight, as ``[[first, last, length], ...]``; all drafters of
            engines that take one follow it. See :mod:`searches.schedule`.
    """

    exact: ClassVar[bool] = False
    target: Target = field(metadata={"runtime": True})
    engines: int = 2
    limit_seconds: float = 300.0
    start_seconds: float = 600.0
    schedule: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        check_whole("backend.engines", self.engines)
        check_number("backend.limit_seconds", self.limit_seconds)
        check_number("backend.start_seconds", self.start_seconds)
        self._check_schedule()
        self._running: dict[SpeculativeConfig, RunningEngine] = {}
        self._warm: dict[SpeculativeConfig, int] = {}  # requests in flight that an engine has served
        # Of the last comparison: the seconds in which each name's engine started, and the source of the order.
        self._startup_seconds: dict[str, float] = {}
        self._order = random.Random()

    def _check_schedule(self) -> None:
        check_list("backend.schedule", self.schedule)
        after = 0
        for entry in self.schedule:
            check_list("backend.schedule", entry)
            if len(entry) != 3:
                raise InputError(f"backend.schedule: {list(entry)!r} is not [first, last, length]")
            first, last, length = entry
            check_whole("backend.schedule", first, after + 1)
            check_whole("backend.schedule", last, first)
            check_whole("backend.schedule", length, 0)
            after = last
        if self.schedule and self.schedule[0][0] != 1:
            raise InputError("backend.schedule: does not begin with 1 request")

    @property
    def takes_schedules(self) -> bool:
        """Whether the engine can change its draft length with the number of requests."""
        return True

    def arguments(self, config: SpeculativeConfig, port: int) -> list[str]:
        """Return the command that starts a server with a configuration, or raise :class:`Unsupported` or ``ConfigError``.

        A back end without servers overrides :meth:`_start`.
        """
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Return the variables that servers get beside this program's own."""
        return {}

    def _start(self, config: SpeculativeConfig) -> RunningEngine:
        """Return a new engine that drafts with a configuration; raise :class:`BackendError` if it does not start."""
        port = free_port()
        try:
            command = self.arguments(config, port)
        except (ConfigError, Unsupported) as error:
            raise BackendError(f"{self.name}: {error}") from None
        process = EngineProcess(command, os.environ | self.environment(), self.name)
        client = Client(f"http://127.0.0.1:{port}", self.limit_seconds)
        return RunningEngine(process, client, process.wait_until(client.ready, self.start_seconds))

    def describe(self) -> dict[str, Any]:
        model = {"target": self.target.digest, "dtype": self.target.dtype, "machine": machine(self.target)}
        schedule = {"schedule": [list(entry) for entry in self.schedule]} if self.schedule else {}
        return {"engines": self.engines} | schedule | model

    def restrict(self, space: SearchSpace) -> SearchSpace:
        """Return the space without choices that servers do not have: stop rules, matches, datastores and windows.

        Their n-grams are copied from the first match. Heads draft chains: a method keeps its trees only if it has no chains.
        """
        trees = any(methods()[method].trees_only for method in space.available_methods)
        found = space.narrowed(stop=("length",), match=("first",), datastore=(), draft_window=(0,))
        return found if trees else replace(found, trees=False)

    def metrics(self) -> dict[str, float]:
        seconds = self._startup_seconds
        return {STARTUP_SECONDS if name == CANDIDATE else f"{name}_{STARTUP_SECONDS}": seconds[name] for name in seconds}

    def close(self) -> None:
        for config in list(self._running):
            self._forget(config)

    def compare(self, asked: Comparison) -> Iterator[dict[str, Sample]]:
        """See :meth:`Backend.compare`.

        If configurations take turns, their times are stated at the speed that plain decoding had beside the first ones.
        """
        task = asked.task

        def decode_opening(item: PromptItem, greedy: Task) -> dict[str, Sample]:
            return next(self.compare(Comparison(asked.configs, PromptSet((replace(item, followups=()),)), greedy)))

        checks = None if task.sampling.greedy else greedy_checks(asked.prompts, task, decode_opening)
        asked = replace(asked, configs={BASELINE: _PLAIN, **asked.configs})
        self._startup_seconds, self._order = {}, random.Random(task.seed)
        for repeat in range(asked.repeats):
            seeded = replace(asked, task=replace(task, seed=task.seed + 1000 * repeat))
            for item, answers in zip(asked.prompts, self._rows(seeded), strict=True):
                yield {name: self._sample(item, name, answers, task, checks) for name in asked.configs if name in answers}
                checks = checks and dict.fromkeys(checks, Losslessness(0))  # the comparison counts once

    def _rows(self, asked: Comparison) -> Iterator[_Answers]:
        """Yield the answers to each prompt: at once, or at the end under load or if engines take turns."""
        names = [name for name in asked.configs if name not in asked.without]
        if len({asked.configs[name] for name in names}) <= self.engines:
            yield from self._group_rows(asked, names, {})
            return
        size = max(1, self.engines - 1)
        groups = [names[begin : begin + size] for begin in range(1, len(names), size)]
        groups = [[BASELINE], *groups] if self.engines == 1 else [[BASELINE, *group] for group in groups]
        joined: list[_Answers] = [{} for _ in asked.prompts]
        for group in groups:
            first = {item.id: row[BASELINE] for item, row in zip(asked.prompts, joined, strict=True) if row}
            for item, row, answers in zip(asked.prompts, joined, self._group_rows(asked, group, first), strict=True):
                pace = 1.0
                if item.id in first and BASELINE in answers:
                    before, now = _seconds_per_token(first[item.id]), _seconds_per_token(answers[BASELINE])
                    pace = before / now if before and now else 1.0
                row |= {name: [each.at_pace(pace) for each in answers[name]] for name in answers if name not in row}
        yield from joined

    def _group_rows(
        self, asked: Comparison, group: Sequence[str], reference: Mapping[str, Sequence[Answer]]
    ) -> Iterator[_Answers]:
        """Yield the answers of names whose engines run together; ``reference`` has earlier ones of plain decoding."""
        configs, prompts = {name: asked.configs[name] for name in group}, asked.prompts
        learning = {name: config for name, config in configs.items() if config.method == "retrieval"}
        for config in learning.values():
            self._forget(config)  # it must not have decoded a prompt before, as it would not have in use
        warmup = [self.target.encode(item.messages(), item.field) for item in prompts.items[: asked.workload.concurrency]]
        backwards = [list(reversed(prompt)) for prompt in warmup]  # a drafter that learns gains nothing from them
        for name, config in configs.items():
            with self._ending(name, config):
                engine = self._engine(config, configs.values(), backwards if name in learning else warmup)
            self._startup_seconds[name] = engine.startup_seconds
        if learning and asked.before is not None and len(asked.before):
            self._batch(replace(asked, configs=learning), asked.before.items, 0, {})
        size = 1 if asked.workload.concurrency == 1 else len(prompts)
        for begin in range(0, len(prompts), size):
            left = {name: config for name, config in configs.items() if name not in asked.without}
            yield from self._batch(replace(asked, configs=left), prompts.items[begin : begin + size], begin, reference)

    def _batch(
        self, asked: Comparison, items: Sequence[PromptItem], begin: int, reference: Mapping[str, Sequence[Answer]]
    ) -> list[_Answers]:
        """Decode prompts turn by turn; all continue from the answers of plain decoding, or of the first name without it.

        ``begin`` is the place of the first prompt, which its seed depends on.
        """
        rows: list[_Answers] = [{name: [] for name in asked.configs} for _ in items]
        messages = [item.messages() for item in items]
        for turn in range(max(len(item.followups) for item in items) + 1):
            places = [place for place, item in enumerate(items) if turn <= len(item.followups)]
            prompts = [self.target.encode(messages[place], items[place].field) for place in places]
            tasks = [replace(asked.task, seed=asked.task.seed + begin + place) for place in places]
            for name in self._order.sample(list(asked.configs), len(asked.configs)):
                config = asked.configs[name]
                with self._ending(name, config):
                    answers = self._running[config].answer(prompts, tasks, asked.workload.concurrency, config)
                for place, answer in zip(places, answers, strict=True):
                    rows[place][name].append(answer)
            for place in places:
                first = reference.get(items[place].id) or rows[place][next(iter(asked.configs))]
                messages[place].append({"role": "assistant", "content": first[turn].completion.text})
                messages[place] += [{"role": "user", "content": text} for text in items[place].followups[turn : turn + 1]]
        return rows

    def _engine(
        self, config: SpeculativeConfig, kept: Collection[SpeculativeConfig], warmup: Sequence[Sequence[int]]
    ) -> RunningEngine:
        """Return the engine of a configuration, started and warm; others that may not run beside it are stopped."""
        if config in self._running and not self._running[config].process.running:
            self._forget(config)
        if config not in self._running:
            # Plain decoding is stopped last, as it takes part in every comparison.
            spare = sorted((other for other in self._running if other not in kept), key=lambda other: other == _PLAIN)
            for other in spare[: max(0, len(self._running) + 1 - self.engines)]:
                self._forget(other)
            self._running[config] = self._start(config)
            self._warm[config] = 0
        if self._warm[config] < len(warmup):  # what an engine compiles depends on the number of requests
            tasks = [Task(max_new_tokens=_WARMUP_TOKENS)] * len(warmup)
            self._running[config].answer(warmup, tasks, len(warmup), config)
            self._warm[config] = len(warmup)
        self._running[config] = self._running.pop(config)  # the most recently used one last
        return self._running[config]

    @contextlib.contextmanager
    def _ending(self, name: str, config: SpeculativeConfig) -> Iterator[None]:
        """Stop the engine that fails in a block, and name its configuration in the error."""
        try:
            yield
        except BackendError as error:
            self._forget(config)
            error.name = "" if name == BASELINE else name
            raise

    def _forget(self, config: SpeculativeConfig) -> None:
        """Stop the engine of a configuration if it runs."""
        if config in self._running:
            self._running.pop(config).process.stop()

    def _sample(
        self, item: PromptItem, name: str, answers: _Answers, task: Task, checks: Mapping[str, Losslessness] | None
    ) -> Sample:
        sample = Sample.join([answer.sample(item) for answer in answers[name]])
        if checks is not None:
            return replace(sample, lossless=checks[name])
        pairs = zip(answers[BASELINE], answers[name], strict=True)
        return replace(sample, lossless=Losslessness.join(self._compared(item.id, *pair, task) for pair in pairs))

    def _compared(self, prompt_id: str, expected: Answer, actual: Answer, task: Task) -> Losslessness:
        """Compare two outputs, as tokens if the server reports them, else as texts; the target judges a difference."""
        one, other = expected.completion, actual.completion
        if one.tokens is not None and other.tokens is not None:
            first, second = one.tokens, other.tokens
        elif one.text == other.text:
            first = second = ()
        elif self.target.tokenizer is None:
            raise BackendError("server: reports no token ids, and the target has no tokenizer for its texts")
        else:
            words = self.target.tokenizer
            first, second = (words(each.text, add_special_tokens=False)["input_ids"] for each in (one, other))
        divergence = find_divergence(self.target, prompt_id, expected.prompt, first, second, task.sampling)
        if divergence is None and one.count == other.count == 1 < task.max_new_tokens:
            return Losslessness(0)  # both ended with the first token, which no drafter could change
        return Losslessness(1, (divergence,) if divergence else ())


def _seconds_per_token(answers: Sequence[Answer]) -> float:
    """Return the seconds of a token after the first piece; 0.0 if there is none."""
    tokens = sum(each.completion.decoded for each in answers)
    return sum(each.completion.decode_seconds for each in answers) / tokens if tokens else 0.0
