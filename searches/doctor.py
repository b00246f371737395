"""Whether speculative decoding helps on a running server with OpenAI's interface, and what to change.

Usage: ``python -m searches.doctor http://127.0.0.1:8000 [plain=URL] [concurrency=4] [prompts=jsonl prompts.path=FILE]``

Counters are those that vLLM publishes under ``/metrics``. Speed and output are compared with a second server of the same
model without speculation, which ``plain`` names, on the same greedy prompts. Requests of others at the same time count, too.
The exit code is 4 if speculation loses or changes the output.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from layerskip import Measurement, PromptSet
from layerskip.decoding.stats import DecodeStats
from layerskip.measure.measure import Task
from layerskip.measure.measurement import MIN_RESAMPLED
from layerskip.prompts import PromptItem
from searches.app.application import NOT_CONFIRMED, run
from searches.app.checks import InputError, check_number, check_whole
from searches.app.targets import command_line
from searches.backends.client import Client, Completion, RequestFailed
from searches.backends.running_engine import Answer, Counters
from searches.progress import say

_DRAFTING, _PLAIN, _AGAIN = "drafting", "plain", "plain again"
_ROUNDED = 0.5  # the share of prompts on which rounding may change the output
_OFF = "Drafts cost more than they save at this load: leave speculation off, or try a drafter that is accepted more."
_LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Findings:
    """What was measured: for each prompt the answers by server, and once more by the plain one.

    ``counters`` are of these prompts; None if the server publishes none.
    """

    prompts: Sequence[PromptItem]
    rows: Sequence[Mapping[str, Completion]]
    concurrency: int
    counters: Counters | None

    @property
    def is_on(self) -> bool | None:
        """Whether the server drafts; None if it does not say."""
        if self.counters is not None:
            return self.counters.drafts > 0
        # A last piece may hold tokens without a text of their own.
        sizes = [size for row in self.rows for size in row[_DRAFTING].piece_sizes[1:-1]]
        return True if any(size > 1 for size in sizes) else None

    @property
    def acceptance(self) -> list[float]:
        """The share of rounds that accepted more than i tokens, for each i; empty if they are not counted."""
        counted = self.counters or Counters()
        return [count / counted.drafts for count in counted.by_position if counted.drafts]

    @functools.cached_property
    def speedup(self) -> tuple[float, float, float] | None:
        """Speed over the plain server with its interval; None without one, or with too few prompts."""
        if _PLAIN not in self.rows[0]:
            return None
        rows = [
            {name: Answer((), found, DecodeStats(()), self.concurrency).sample(item) for name, found in row.items()}
            for item, row in zip(self.prompts, self.rows, strict=True)
        ]
        measured = Measurement.of(rows, _PLAIN, _DRAFTING)
        return (measured.speedup, *measured.interval()) if len(measured.decoded.candidate) > 1 else None

    @property
    def cost(self) -> float | None:
        """How many times as long as a step of the plain server a round takes; None if that is not known."""
        return (1 + sum(self.acceptance)) / self.speedup[0] if self.acceptance and self.speedup else None

    def differing(self, one: str, other: str) -> int:
        """Return on how many prompts two servers, or two answers of one, differ."""
        pairs = [(row[one], row[other]) for row in self.rows]
        return sum((a.tokens or a.text) != (b.tokens or b.text) for a, b in pairs)

    @property
    def is_changed(self) -> bool:
        """Whether outputs differ from the plain server's on far more prompts than its own do from one time to the next.

        In half precision, another number of rows in a pass rounds otherwise, which changes some outputs.
        """
        if _PLAIN not in self.rows[0]:
            return False
        return self.differing(_DRAFTING, _PLAIN) - self.differing(_PLAIN, _AGAIN) > _ROUNDED * len(self.rows)

    @property
    def loses(self) -> bool:
        """Whether speculation changes the output, or is significantly slower than none."""
        return self.is_changed or (self.speedup is not None and self.speedup[2] < 1)


def doctor(config: DictConfig) -> None:
    """Look at a server and print what was found; see ``conf/doctor.yaml``."""
    if OmegaConf.is_missing(config, "url"):
        raise InputError("url: is missing; name the server, as in python -m searches.doctor http://127.0.0.1:8000")
    for name in ("concurrency", "max_prompts", "max_new_tokens"):
        check_whole(name, config[name])
    check_number("max_seconds", config.max_seconds)
    prompts: PromptSet = instantiate(config.prompts)
    servers = {_DRAFTING: _connect("url", str(config.url), config.max_seconds)}
    if config.plain is not None:
        servers[_PLAIN] = _connect("plain", str(config.plain), config.max_seconds)
    task = Task(max_new_tokens=config.max_new_tokens)
    try:
        found = examine(servers, prompts.take(config.max_prompts), task, config.concurrency, config.max_seconds)
    except RequestFailed as error:  # it names the address
        raise InputError(f"url or plain: {error}") from None
    print(report(found, servers[_DRAFTING]))
    if found.loses:
        sys.exit(NOT_CONFIRMED)


def _connect(field: str, url: str, limit_seconds: float) -> Client:
    try:
        client = Client(url, limit_seconds)
    except ValueError as error:
        raise InputError(f"{field}: {error}") from None
    if not client.ready():
        raise InputError(f"{field}: nothing answers at {url}/v1/models")
    return client


def examine(servers: Mapping[str, Client], prompts: PromptSet, task: Task, concurrency: int, max_seconds: float) -> Findings:
    """Send prompts to the servers in turns, as many at once as are to be in flight, until time runs out."""
    start, order = time.monotonic(), random.Random(task.seed)
    clients = {**servers, **({_AGAIN: servers[_PLAIN]} if _PLAIN in servers else {})}
    rows: list[dict[str, Completion]] = []
    encoded = [servers[_DRAFTING].encode(item.messages()) for item in prompts]
    for client in servers.values():
        client.complete(encoded[0], task)  # a warm-up
    before = _counters(servers[_DRAFTING])
    for begin in range(0, len(prompts), concurrency):
        if rows and time.monotonic() - start > max_seconds:
            say(f"{len(rows)} of {len(prompts)} prompts were sent, because time ran out")
            break
        sent = encoded[begin : begin + concurrency]
        rows += [{} for _ in sent]
        for name in order.sample(list(clients), len(clients)):
            found = clients[name].complete_all(sent, [task] * len(sent), concurrency)
            for row, completion in zip(rows[begin:], found, strict=True):
                row[name] = completion
    after = _counters(servers[_DRAFTING])
    return Findings(prompts.items[: len(rows)], rows, concurrency, before and after and after.since(before))


def _counters(client: Client) -> Counters | None:
    """Return the counts of drafts so far; zeros from a vLLM that does not draft, None if the server publishes none."""
    try:
        page = client.get("/metrics")
    except RequestFailed:
        return None
    return Counters.parse(page) or (Counters() if "vllm:" in page else None)


def report(found: Findings, client: Client) -> str:
    """Return a page on a server: what was found, and what to try."""
    drafted, prompts = [row[_DRAFTING] for row in found.rows], len(found.rows)
    per_token = [answer.decode_seconds / answer.decoded for answer in drafted if answer.decoded]
    lines = [
        f"server: {client.model} at {client.url}, {prompts} prompts, {found.concurrency} in flight",
        f"speculation: {'it does not say' if found.is_on is None else 'on' if found.is_on else 'off'}",
    ]
    if found.acceptance and found.counters is not None:
        by_position = ", ".join(f"{share:.2f}" for share in found.acceptance)
        rate = found.counters.accepted / max(1, found.counters.drafted)
        lines.append(f"acceptance: {rate:.2f} of the drafted tokens; by position {by_position}")
        lines.append(f"tokens per round: {1 + sum(found.acceptance):.2f}")
    lines.append(f"speed: {1000 * sum(per_token) / max(1, len(per_token)):.1f} ms a token after the first")
    if found.cost is not None:
        lines.append(f"cost: a round takes {found.cost:.2f} times as long as a step of the plain server")
    if found.speedup is not None:
        lines.append("against the plain server: {:.2f} x ({:.2f} to {:.2f})".format(*found.speedup))
        if prompts < MIN_RESAMPLED:
            lines.append(f"few prompts: {MIN_RESAMPLED} are the least for a conclusion about others")
    if _PLAIN in found.rows[0]:
        changed, noise = found.differing(_DRAFTING, _PLAIN), found.differing(_PLAIN, _AGAIN)
        lines.append(
            f"output: differs from the plain server's on {changed} of {prompts} prompts, and the plain server's from "
            f"itself on {noise}"
        )
    else:
        lines.append("output and speedup: unknown; plain=URL names a server of the same model without speculation")
    return "\n".join([*lines, "", *_advice(found)])


def _advice(found: Findings) -> list[str]:
    """Return what to try, the most urgent first; the names of settings are vLLM's."""
    if found.is_changed:
        return [
            "The output is not that of plain decoding. Leave out lossy rules of acceptance (rejection_sample_method other "
            "than strict, thresholds of typical acceptance), and compare again."
        ]
    if found.is_on is False:
        return [f"No drafts were made. Try --speculative-config '{json.dumps(_LOOKUP)}'."]
    if found.is_on is None:
        return ["The server does not publish vLLM's counters, so whether it drafts is not known."]
    if found.speedup is None:
        return ["Start the same model without speculation and name it by plain=URL to see whether drafts pay."]
    rounding = "Some outputs differ, as rounding in half precision explains. In float32 none should (--dtype float32)."
    differ = found.differing(_DRAFTING, _PLAIN) > found.differing(_PLAIN, _AGAIN)
    return [*([rounding] if differ else []), _length_advice(found)]


def _length_advice(found: Findings) -> str:
    """Return which draft length, of at most the present one, should be fastest.

    The cost of a round is taken to grow evenly with the draft, from one step of plain decoding to what was measured.
    """
    length = len(found.acceptance)
    if found.cost is None:
        return _OFF if found.loses else "Without counters, the best draft length is not known."
    speeds = [(1 + sum(found.acceptance[:k])) / (1 + (found.cost - 1) * k / length) for k in range(length + 1)]
    best = max(range(length + 1), key=lambda k: speeds[k])
    if best == 0:
        return _OFF
    if best == length:
        return f"num_speculative_tokens of {length} is about right for these prompts."
    return f"Try num_speculative_tokens of {best} in place of {length}; longer drafts are rarely accepted."


if __name__ == "__main__":
    sys.argv[1:] = command_line(sys.argv[1:], "url")
    run("doctor", doctor, resumable=False, is_printed=True)
