"""Whether speculative decoding helps on a running server with OpenAI's interface, and what to change.

Usage: ``python -m searches.doctor http://127.0.0.1:8000 [plain=URL] [concurrency=4] [prompts=jsonl prompts.path=FILE]``

Drafts are counted by vLLM's or llama.cpp's counters under ``/metrics``, or by what llama.cpp states with each answer.
Requests of others at the same time count, too. A server that gives log-probabilities of a prompt, as vLLM does, judges
outputs: it reads each answer in one pass, without drafts. Neither engine lets a request switch drafts off, so speed is
compared with a second server of the same model, which ``plain`` names. The exit code is 1 if speculation loses or changes
the output.
"""

from __future__ import annotations

import functools
import json
import random
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from layerskip import Measurement, PromptSet, SpeculativeConfig
from layerskip.decoding.stats import DecodeStats
from layerskip.engines.deployment import Deployment
from layerskip.engines.registry import ENGINES
from layerskip.measure.measure import Task
from layerskip.measure.measurement import MIN_RESAMPLED
from layerskip.prompts import PromptItem
from searches.app.application import run
from searches.app.checks import InputError, check_number, check_whole
from searches.app.targets import command_line
from searches.backends.client import Client, Completion, RequestFailed
from searches.backends.running_engine import Answer, Counters
from searches.progress import say

_DRAFTING, _PLAIN, _AGAIN = "drafting", "plain", "plain again"
_ROUNDED = 0.5  # the share of prompts on which rounding may change the output
_MARGIN = 0.5  # of log-probabilities: twice the largest that bfloat16 gave in 1,536 places (SmolLM2, vLLM 0.32, CPU)
_RARE = 0.01  # the share of places in which rounding may exceed it
_USELESS = 0.01  # of the drafted tokens; if fewer are accepted, drafts can only cost
_WARMUP_TOKENS = 8
_SHOWN = 8  # positions
_SGLANG = re.compile(r"^sglang:spec_accept_length(?:\{.*\})? ([\d.e+-]+)", re.MULTILINE)
_PREFIXES = {"vllm:": "vllm", "llamacpp:": "llama_cpp", "sglang:": "sglang"}
"""What the names of an engine's metrics begin with."""
_LOSSY = {
    "vllm": "rejection_sample_method synthetic",
    "llama_cpp": "--spec-synth-rates and --spec-synth-len",
    "sglang": "--speculative-accept-threshold-single and --speculative-accept-threshold-acc below 1",
}
_LENGTH = {"llama_cpp": "a draft length (--spec-draft-n-max, or --spec-ngram-simple-size-m)"}
_ANY = {"name": "any", "dtype": "float32", "layers": 1}
"""A target in the fields of an export, for options that do not depend on it."""
_SCHEDULE = " With fewer requests they may pay: python -m searches.schedule finds the draft length for each number of them."
_OFF = "Drafts cost more than they save at this load: leave speculation off, or try a drafter that is accepted more."


@dataclass(frozen=True)
class Metrics:
    """What a server publishes of its drafts.

    ``engine`` is a name of :data:`ENGINES` or empty. ``counters`` are None and ``drafting`` is None if it does not say.
    ``accept_length`` are the tokens per round that SGLang states of its last rounds.
    """

    engine: str = ""
    counters: Counters | None = None
    drafting: bool | None = None
    accept_length: float | None = None

    @classmethod
    def read(cls, client: Client) -> Metrics:
        """Ask a server under ``/metrics``, and llama.cpp also under ``/slots``, as it has counters without drafts, too."""
        try:
            page = client.get("/metrics")
        except RequestFailed:
            page = ""
        engine = next((name for prefix, name in _PREFIXES.items() if f"\n{prefix}" in f"\n{page}"), "")
        counters, stated = Counters.parse(page), _SGLANG.search(page)
        if engine == "vllm":  # without drafts, it has no such counters
            return cls(engine, counters or Counters(), counters is not None)
        if engine == "sglang":  # without drafts, it states 0
            length = float(stated[1]) if stated else None
            return cls(engine, None, None if length is None else length > 0, length)
        try:
            slots = json.loads(client.get("/slots"))
            return cls("llama_cpp", counters, any(slot["speculative"] for slot in slots))
        except (RequestFailed, ValueError, LookupError, TypeError):
            return cls(engine, counters)


@dataclass(frozen=True)
class Findings:
    """What was measured: for each prompt the answers by server, and once more by the plain one.

    ``metrics`` are of these prompts. ``margins`` has for each token of the answers by how much the plain server, or else the
    server itself, prefers another, as :meth:`Client.margins` returns it; it is empty if that does not tell.
    """

    prompts: Sequence[PromptItem]
    rows: Sequence[Mapping[str, Completion]]
    concurrency: int
    metrics: Metrics
    margins: Sequence[float] = ()

    @property
    def has_plain(self) -> bool:
        """Whether there is a plain server."""
        return _PLAIN in self.rows[0]

    @property
    def drafts(self) -> tuple[int, int] | None:
        """The number of drafted and of accepted tokens; None if the server does not count them."""
        if self.metrics.counters is not None:
            return self.metrics.counters.drafted, self.metrics.counters.accepted
        stated = [row[_DRAFTING].drafts for row in self.rows]
        counted = [each for each in stated if each is not None]
        return (sum(each[0] for each in counted), sum(each[1] for each in counted)) if counted else None

    @property
    def is_on(self) -> bool | None:
        """Whether the server drafts; None if it does not say."""
        if self.metrics.drafting is not None:
            return self.metrics.drafting
        if self.drafts is not None:
            return self.drafts[0] > 0
        # A last piece may hold tokens without a text of their own.
        sizes = [size for row in self.rows for size in row[_DRAFTING].piece_sizes[1:-1]]
        return True if any(size > 1 for size in sizes) else None

    @property
    def acceptance(self) -> list[float]:
        """The share of drafts of which more than i tokens were accepted, for each i; empty if they are not counted."""
        counted = self.metrics.counters or Counters()
        return [count / counted.drafts for count in counted.by_position if counted.drafts]

    @property
    def rounds(self) -> int | None:
        """The number of rounds after the first token of each answer, those without a draft among them; None if unknown."""
        if not self.drafts:
            return None
        counted = self.metrics.counters or Counters()
        return max(1, counted.drafts, self._decoded - self.drafts[1])

    @property
    def tokens_per_round(self) -> float | None:
        """The mean acceptance length; None if it is not known."""
        return self._decoded / self.rounds if self.rounds else self.metrics.accept_length

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds for each token after the first; None if there are none."""
        seconds = sum(row[_DRAFTING].decode_seconds for row in self.rows)
        return seconds / self._decoded if self._decoded else None

    @property
    def _decoded(self) -> int:
        return sum(row[_DRAFTING].decoded for row in self.rows)

    @functools.cached_property
    def speedup(self) -> tuple[float, float, float] | None:
        """Speed over the plain server with its interval; None without one, or with too few prompts."""
        if not self.has_plain:
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
        return self.tokens_per_round / self.speedup[0] if self.tokens_per_round and self.speedup else None

    def differing(self, one: str, other: str) -> int:
        """Return on how many prompts two servers, or two answers of one, differ."""
        pairs = [(row[one], row[other]) for row in self.rows]
        return sum(a.tokens != b.tokens if a.tokens and b.tokens else a.text != b.text for a, b in pairs)

    @property
    def surprising(self) -> int:
        """The number of tokens in whose place the model prefers another, by more than rounding explains."""
        return sum(margin > _MARGIN for margin in self.margins)

    @property
    def is_changed(self) -> bool | None:
        """Whether speculation changes the output; None if that is not known.

        Without margins, outputs must differ from the plain server's on far more prompts than its own do from one time to the
        next: in half precision, another number of rows in a pass rounds otherwise, which changes some outputs.
        """
        if self.margins:
            return self.surprising > _RARE * len(self.margins)
        if not self.has_plain:
            return None
        return self.differing(_DRAFTING, _PLAIN) - self.differing(_PLAIN, _AGAIN) > _ROUNDED * len(self.rows)

    @property
    def is_useless(self) -> bool:
        """Whether hardly any drafted token is accepted, which no measurement of time has to confirm."""
        return self.drafts is not None and self.drafts[1] < _USELESS * self.drafts[0]

    @property
    def loses(self) -> bool:
        """Whether speculation changes the output, is useless, or is significantly slower than none."""
        is_slower = self.is_on is not False and self.speedup is not None and self.speedup[2] < 1
        return bool(self.is_changed) or self.is_useless or is_slower


def doctor(config: DictConfig) -> None:
    """Look at a server and print what was found; see ``conf/doctor.yaml``."""
    if OmegaConf.is_missing(config, "url"):
        raise InputError("url: is missing; name the server, as in python -m searches.doctor http://127.0.0.1:8000")
    for name in ("concurrency", "max_prompts", "max_new_tokens"):
        check_whole(name, config[name])
    check_number("max_seconds", config.max_seconds)
    deadline = time.monotonic() + config.max_seconds
    prompts: PromptSet = instantiate(config.prompts)
    count = max(config.max_prompts, config.concurrency)
    prompts = prompts.take(count - count % config.concurrency)  # so that as many are in flight to the end
    if len(prompts) < config.concurrency:
        raise InputError(f"concurrency: {config.concurrency} requests need as many prompts; there are {len(prompts)}")
    servers = {_DRAFTING: _connect("url", str(config.url), config.max_seconds, deadline)}
    if config.plain is not None:
        servers[_PLAIN] = _connect("plain", str(config.plain), config.max_seconds, deadline)
    task = Task(max_new_tokens=config.max_new_tokens)
    try:
        found = examine(servers, prompts, task, config.concurrency)
    except RequestFailed as error:  # it names the address
        late = time.monotonic() >= deadline
        raise InputError(f"{'max_seconds: too few for a prompt' if late else 'url or plain'}: {error}") from None
    print(report(found, servers[_DRAFTING]))
    if found.loses:
        sys.exit(1)


def _connect(field: str, url: str, limit_seconds: float, deadline: float) -> Client:
    try:
        client = Client(url, limit_seconds, deadline)
    except ValueError as error:
        raise InputError(f"{field}: {error}") from None
    if not client.ready():
        raise InputError(f"{field}: nothing answers at {url}/v1/models")
    return client


def examine(servers: Mapping[str, Client], prompts: PromptSet, task: Task, concurrency: int) -> Findings:
    """Send prompts to the servers in turns, as many at once as are to be in flight, until the servers' deadline."""
    drafting, judge, order = servers[_DRAFTING], servers.get(_PLAIN, servers[_DRAFTING]), random.Random(task.seed)
    clients = {**servers, **({_AGAIN: servers[_PLAIN]} if _PLAIN in servers else {})}
    rows: list[dict[str, Completion]] = []
    margins: list[float] = []
    tells = True
    for client in servers.values():
        client.complete(client.encode(prompts.items[0].messages()), replace(task, max_new_tokens=_WARMUP_TOKENS))
    before = metrics = Metrics.read(drafting)
    for begin in range(0, len(prompts), concurrency):
        sent = [drafting.encode(item.messages()) for item in prompts.items[begin : begin + concurrency]]
        batch: list[dict[str, Completion]] = [{} for _ in sent]
        try:
            for name in order.sample(list(clients), len(clients)):
                found = clients[name].complete_all(sent, [task] * len(sent), concurrency)
                for row, completion in zip(batch, found, strict=True):
                    row[name] = completion
        except RequestFailed:
            if not rows or time.monotonic() < drafting.deadline:
                raise
            say(f"{len(rows)} of {len(prompts)} prompts were sent, because time ran out")
            break
        rows += batch
        metrics = Metrics.read(drafting)
        for prompt, row in zip(sent, batch, strict=True):
            answer = row[_DRAFTING].tokens
            if tells and answer and not isinstance(prompt, str):
                judged = judge.margins(prompt, answer)
                margins, tells = margins + (judged or []), judged is not None
    counted = metrics.counters and before.counters and metrics.counters.since(before.counters)
    return Findings(prompts.items[: len(rows)], rows, concurrency, replace(metrics, counters=counted), margins)


def report(found: Findings, client: Client) -> str:
    """Return a page on a server: what was found, and what to try."""
    state = {None: "it does not say", True: "on", False: "off"}[found.is_on]
    if found.is_on and found.drafts and not found.drafts[0]:
        state += ", but it made no drafts for these prompts"
    lines = [
        f"server: {client.model} at {client.url}, {len(found.rows)} prompts, {found.concurrency} in flight",
        f"speculation: {state}",
        *_acceptance(found),
        *_cost(found),
        f"output: {_output(found)}",
        f"speed: {_speed(found)}",
    ]
    if found.speedup is not None and len(found.rows) < MIN_RESAMPLED:
        lines.append(f"few prompts: {MIN_RESAMPLED} are the least for a conclusion about others")
    return "\n".join([*lines, "", *_advice(found)])


def _acceptance(found: Findings) -> list[str]:
    lines = []
    if found.drafts and found.drafts[0]:
        shares = ", ".join(f"{share:.2f}" for share in found.acceptance[:_SHOWN])
        places = f"; by position {shares}{', ...' * (len(found.acceptance) > _SHOWN)}" if shares else ""
        lines.append(f"acceptance: {found.drafts[1] / found.drafts[0]:.2f} of the drafted tokens{places}")
    if found.is_on and found.tokens_per_round:
        counters = found.metrics.counters
        share = f"; {counters.drafts / found.rounds:.0%} of the rounds have a draft" if counters and found.rounds else ""
        lines.append(f"tokens per round: {found.tokens_per_round:.2f}{share}")
    return lines


def _cost(found: Findings) -> list[str]:
    if not (found.is_on and found.tokens_per_round and found.seconds_per_token):
        return []
    line = f"cost: a round takes {1000 * found.tokens_per_round * found.seconds_per_token:.1f} ms"
    if found.cost is not None:
        return [f"{line}, {found.cost:.2f} times as long as a step of the plain server"]
    return [f"{line}; drafts pay if that is less than {found.tokens_per_round:.2f} steps without them"]


def _output(found: Findings) -> str:
    parts = []
    if found.margins:
        judge = "the plain server" if found.has_plain else "the model itself"
        parts.append(f"{judge} prefers another token in {found.surprising} of {len(found.margins)} places")
    if found.has_plain:
        differ, noise = found.differing(_DRAFTING, _PLAIN), found.differing(_PLAIN, _AGAIN)
        parts.append(
            f"it differs from the plain server's on {differ} of {len(found.rows)} prompts, and the plain server's "
            f"from itself on {noise}"
        )
    if found.is_on is False and not parts:
        return "that of plain decoding, as nothing is drafted"
    return "; ".join(parts) or "unknown; plain=URL names a server of the same model without speculation"


def _speed(found: Findings) -> str:
    seconds = found.seconds_per_token
    line = "unknown" if seconds is None else f"{1000 * seconds:.1f} ms a token after the first"
    if found.speedup is not None:
        return line + "; {:.2f} x the plain server's ({:.2f} to {:.2f})".format(*found.speedup)
    return line if found.has_plain or found.is_on is False else f"{line}; the speedup is unknown without plain=URL"


def _advice(found: Findings) -> list[str]:
    """Return what to try, the most urgent first, in the words of the engine, or of vLLM if it is not known."""
    engine = found.metrics.engine or "vllm"
    if found.is_changed:
        return [f"The output is not that of plain decoding. Leave out what loosens acceptance ({_LOSSY[engine]})."]
    if found.is_on is False:
        return [f"No drafts are made. Try {_lookup(engine)}."]
    if found.is_on is None:
        return ["The server publishes no counts of drafts (llama-server --metrics), so whether it drafts is not known."]
    if found.drafts and not found.drafts[0]:
        return ["These prompts give the drafter nothing to draft from: try another, such as a draft model."]
    if found.is_useless:
        return [_OFF]
    if found.speedup is None and found.has_plain:
        return ["Too few prompts were answered for a speedup: raise max_prompts or max_seconds, or lower max_new_tokens."]
    if found.speedup is None:
        return ["Start the same model without speculation and name it by plain=URL to see whether drafts pay."]
    rounding = "Some outputs differ, as rounding in half precision explains. In float32 none should (--dtype float32)."
    differ = found.differing(_DRAFTING, _PLAIN) > found.differing(_PLAIN, _AGAIN)
    return [*([rounding] if differ else []), _length_advice(found, _LENGTH.get(engine, "num_speculative_tokens"))]


def _lookup(engine: str) -> str:
    """Return the options that start an engine with prompt lookup."""
    config = SpeculativeConfig("prompt_lookup", 4, prompt_lookup_min=2, prompt_lookup_max=4)
    command = ENGINES[engine][1](Deployment(_ANY, config, file=Path("any")))["command"]
    first = next(place for place, word in enumerate(command) if word.startswith("--spec"))
    return shlex.join(command[first:])


def _length_advice(found: Findings, name: str) -> str:
    """Return which draft length, of at most the present one, should be fastest.

    The cost of a round is taken to grow evenly with the draft, from one step of plain decoding to what was measured.
    """
    length, counted = len(found.acceptance), found.metrics.counters
    if found.cost is None or not found.rounds or not (length and counted):
        unknown = "Without counts by position (llama-server --metrics), the best draft length is not known."
        return _OFF if found.loses else unknown
    share = counted.drafts / found.rounds
    speeds = [(1 + share * sum(found.acceptance[:k])) / (1 + (found.cost - 1) * k / length) for k in range(length + 1)]
    best = max(range(length + 1), key=lambda k: speeds[k])
    if best == 0:
        return _OFF + (_SCHEDULE if found.metrics.engine == "vllm" and found.concurrency > 1 else "")
    if best == length:
        return f"{name} of {length} is about right for these prompts."
    return f"Try {name} of {best} in place of {length}; longer drafts are rarely accepted."


if __name__ == "__main__":
    sys.argv[1:] = command_line(sys.argv[1:], "url")
    run("doctor", doctor, resumable=False, is_printed=True)
