"""A server with OpenAI's interface for completions whose tokens, rounds and faults are planted. Run as a script.

``standin.py --port N [--speculative-config JSON] [--fault NAME]``. The new tokens of a prompt depend on the
prompt alone. With a speculative configuration of ``num_speculative_tokens`` k, every draft has k tokens, of which the rounds
accept 0, 1, ..., k, 0, 1, ... The counters under ``/metrics`` say so in vLLM's words, or each answer in those of llama.cpp
(``--fault llama_cpp``, without counters). A schedule by number of requests sets k when a request begins. Log-probabilities
of a prompt are of the planted tokens. Every process writes its id to the folder of ``--folder``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FIRST, SPAN = 40, 60  # ids of the tokens that it writes
FAULTS = (
    *("", "crash_at_start", "hang_at_start", "crash", "hang"),
    *("html", "not_json", "other_form", "no_tokens", "too_many", "wrong", "strict", "plain_text", "other_metrics"),
    *("ends", "ends_uncounted", "no_text"),  # with its first token; with no token of its own; tokens without a text
    *("llama_cpp", "rejected"),  # in the words of another engine; all drafts
    "refused",  # reports an error inside a stream
)

GARBAGE = {
    "html": "<html>an error page</html>",
    "not_json": "data: {nonsense",
    "other_form": 'data: {"choices": 5}',
    "refused": 'data: {"error": {"message": "out of memory"}}',
}


def planted(prompt: list[int], count: int) -> list[int]:
    """Return the continuation of a prompt."""
    begin = sum(prompt) * 31 + len(prompt)
    return [FIRST + (begin + 7 * place * place) % SPAN for place in range(count)]


def planted_rounds(count: int, drafted: int) -> list[int]:
    """Return how many tokens each round accepts until ``count`` tokens after the first one are decoded."""
    accepted: list[int] = []
    while sum(accepted) + len(accepted) < count:
        left = count - sum(accepted) - len(accepted)
        accepted.append(min(len(accepted) % (drafted + 1), left - 1))
    return accepted


def counters(rounds: list[tuple[int, int]], engine: str = "0") -> str:
    """Return what vLLM publishes after rounds of so many drafted and accepted tokens; those without a draft do not count."""
    drafts, labels = [each for each in rounds if each[0]], f'engine="{engine}",model_name="a {{strange}} name"'
    values = {"drafts": len(drafts), "draft_tokens": sum(d for d, _ in drafts), "accepted_tokens": sum(a for _, a in drafts)}
    lines = [f"vllm:spec_decode_num_{name}_total{{{labels}}} {float(value)}" for name, value in values.items()]
    for place in range(max((drafted for drafted, _ in drafts), default=0)):
        count = sum(accepted > place for _, accepted in drafts)
        lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {float(count)}')
    head = "# HELP vllm:spec_decode_num_drafts_total Number of drafts."
    return "\n".join(
        [head, f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09", *lines, "vllm:prompt_tokens_total 3.0"]
    )


def record(folder: str | None, process: int) -> None:
    """Write down a process, so that a test can see whether it still runs."""
    if folder:
        Path(folder, str(process)).touch()


class Standin(BaseHTTPRequestHandler):
    """Answers one connection."""

    options: argparse.Namespace
    drafted = 0
    lock = threading.Lock()
    accepted: list[int]
    seen: list[dict[str, Any]]
    in_flight = max_in_flight = 0

    def do_GET(self) -> None:
        """Answer ``/v1/models``, ``/metrics`` and ``/seen``, which holds the requests so far."""
        if self.options.key and self.headers["Authorization"] != f"Bearer {self.options.key}":
            self.send_error(401)
            return
        pages = {"/v1/models": json.dumps({"data": [{"id": "standin"}]}), "/seen": json.dumps(self.seen)}
        own = counters([(self.drafted, accepted) for accepted in self.accepted])
        pages["/metrics"] = own if self.drafted else "vllm:prompt_tokens_total 3.0"
        if self.options.fault == "other_metrics":
            pages["/metrics"] = "other:requests_total 3.0"
        if self.options.fault == "llama_cpp":
            pages.pop("/metrics")
            pages["/slots"] = json.dumps([{"id": 0, "speculative": bool(self.drafted)}])
        pages["/max_in_flight"] = str(type(self).max_in_flight)
        self._answer(pages.get(self.path))

    def _answer(self, page: str | None) -> None:
        """Send a page, or that there is none."""
        body = (page or "").encode()
        self.send_response(404 if page is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Stream a completion, or fail as planned."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._answer(json.dumps({"tokens": [len(message["content"]) for message in asked["messages"]]}))
            return
        if asked.get("echo"):
            self._answer(json.dumps({"choices": [{"logprobs": self._judged(asked["prompt"])}]}))
            return
        fault = self.options.fault if len(self.seen) >= self.options.after else ""
        if fault == "strict" and "return_token_ids" in asked:
            self.send_error(400, "unknown field return_token_ids")
            return
        self.seen.append(asked)
        method = type(self)
        with self.lock:
            method.in_flight += 1
            method.max_in_flight = max(method.max_in_flight, method.in_flight)
        try:
            self.send_response(200)
            self.end_headers()
            self._send(self._lines(asked, fault))
        finally:
            with self.lock:
                method.in_flight -= 1
        self._send(["data: [DONE]"])  # only now, as the client may send the next request at once

    def _judged(self, text: list[int]) -> dict[str, Any]:
        """Return log-probabilities of a text that begins with a prompt that was asked before."""
        prompt = next(each["prompt"] for each in self.seen if text[: len(each["prompt"])] == each["prompt"])
        own = [*prompt, *planted(prompt, len(text) - len(prompt))]
        read = [None, *(-0.25 if one == other else -7.0 for one, other in zip(text[1:], own[1:], strict=True))]
        return {"token_logprobs": [*read, -0.25], "top_logprobs": [None, *({"likeliest": -0.25} for _ in text)]}

    def _send(self, lines: Iterable[str]) -> None:
        with contextlib.suppress(ConnectionError):
            for line in lines:
                self.wfile.write(line.encode() + b"\n\n")
                self.wfile.flush()

    def _lines(self, asked: dict[str, Any], fault: str) -> Iterator[str]:
        count = int(asked["max_tokens"])
        tokens = planted(asked["prompt"], count + (3 if fault == "too_many" else 0))
        if fault == "wrong" and self.drafted:
            tokens[-1] += 1
        drafted = self._length(self.in_flight)
        accepted = planted_rounds(count - 1, drafted) if fault != "rejected" else [0] * (count - 1)
        sizes = [1 + (3 if fault == "too_many" else 0), *(length + 1 for length in accepted)]
        done = 0
        if fault.startswith("ends"):
            ended = {"index": 0, "text": "", "finish_reason": "stop"}
            yield "data: " + json.dumps({"choices": [ended]})
            yield "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": int(fault == "ends")}})
            return
        for number, size in enumerate(sizes):
            if number == 1 and fault == "crash":
                print("stand-in: a planned crash", file=sys.stderr, flush=True)
                os._exit(3)
            if number == 1 and fault == "hang":
                time.sleep(600)
            if number == 1 and fault in GARBAGE:
                yield GARBAGE[fault]
            if number and drafted:
                with self.lock:
                    self.accepted.append(size - 1)
            new, done = tokens[done : done + size], done + size
            choice: dict[str, Any] = {"index": 0, "text": "".join(f" {token}" for token in new)}
            if fault == "no_text":
                choice["text"] = ""
            elif asked.get("return_token_ids") and fault not in ("plain_text", "strict", "llama_cpp"):
                choice["token_ids"] = new
            if fault != "no_tokens":
                yield "data: " + json.dumps({"choices": [choice]})
            time.sleep(self.options.pause + self.options.crowded * (drafted > 0 and self.in_flight > 1))
        end: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": 0 if fault == "no_tokens" else done}}
        if fault == "llama_cpp":
            end["timings"] = {"draft_n": drafted * len(accepted), "draft_n_accepted": sum(accepted)} if drafted else {}
        yield "data: " + json.dumps(end)

    def _length(self, in_flight: int) -> int:
        """Return the draft length with so many requests, by the schedule if there is one."""
        schedule = (self.options.speculative_config or {}).get("num_speculative_tokens_per_batch_size", ())
        return next((length for first, last, length in schedule if first <= in_flight <= last), self.drafted)

    def log_message(self, *_: object) -> None:
        """Print nothing: the log is for planned messages."""


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speculative-config", type=json.loads, default=None)
    parser.add_argument("--fault", choices=FAULTS, default="")
    parser.add_argument("--after", type=int, default=1, help="number of requests before the fault; the first one warms up")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each piece")
    parser.add_argument(
        "--crowded", type=float, default=0.0, help="more seconds after a drafted piece, among other requests"
    )
    parser.add_argument("--folder", default=None)
    parser.add_argument("--key", default="", help="which requests must have")
    parser.add_argument("--broken-length", type=int, default=0, help="drafts of so many tokens end the server as it starts")
    parser.add_argument("--only-drafting", action="store_true", help="plain decoding has no fault")
    options = parser.parse_args()
    drafted = (options.speculative_config or {}).get("num_speculative_tokens", 0)
    if options.only_drafting and not drafted:
        options.fault = ""
    if options.broken_length and drafted == options.broken_length:
        options.fault = "crash_at_start"
    record(options.folder, os.getpid())
    # An engine's own process, in a session of its own, which no signal to the engine's group reaches.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    record(options.folder, child.pid)
    if options.fault == "crash_at_start":
        sys.exit("stand-in: a planned crash at the start")
    if options.fault == "hang_at_start":
        time.sleep(600)
    Standin.options, Standin.accepted, Standin.seen = options, [], []
    Standin.drafted = drafted
    ThreadingHTTPServer(("127.0.0.1", options.port), Standin).serve_forever()


if __name__ == "__main__":
    main()
