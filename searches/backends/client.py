"""A streaming client of servers with OpenAI's interface for completions.

Prompts are sent as token ids, so that the server reads exactly what the target would. Servers are asked for token ids and
running counts, as vLLM reports them; the tokens of others are counted by the usage that ends each answer.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import math
import os
import socket
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from layerskip import Sampling
from layerskip.measure.measure import Task

_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_SHOWN = 200  # characters of an unexpected answer in an error
_NEUTRAL, _OPENAI = Sampling().to_dict(), ("temperature", "top_p")
_Drafts = tuple[int, int] | None
"""How many tokens were drafted for an answer and how many of them accepted, if the server states it."""
_Piece = tuple[str, list[int], int | None, bool, _Drafts]
"""The text and token ids of an event, the number of tokens up to it, if stated, whether the text ends, and its drafts."""


class RequestFailed(RuntimeError):
    """A request that the server refuses, or without a usable answer in time; one line says why."""


class _Refused(RequestFailed):
    """A request whose form the server refuses."""


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt; ``tokens`` is None if the server reports no ids.

    Seconds are those to the first piece, and from there to the last one.
    """

    text: str
    tokens: tuple[int, ...] | None
    piece_sizes: tuple[int, ...]
    first_seconds: float
    decode_seconds: float
    drafts: _Drafts = None  # as llama.cpp states them

    @property
    def count(self) -> int:
        """The number of new tokens."""
        return sum(self.piece_sizes)

    @property
    def decoded(self) -> int:
        """The number of tokens after the first piece."""
        return sum(self.piece_sizes[1:])


class Client:
    """A client of one server, which sends the API key in ``OPENAI_API_KEY``, if there is one. Threads may share it.

    Args:
        url: such as ``http://127.0.0.1:8000``; a final ``/v1`` is the same. Another form raises ``ValueError``.
        limit_seconds: for a whole request.
        deadline: on the clock of ``time.monotonic``, after which every request fails.
    """

    def __init__(self, url: str, limit_seconds: float = 300.0, deadline: float = math.inf) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:8000")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = functools.partial(kind, parts.hostname, parts.port)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        self.url, self.limit_seconds, self.deadline = url, limit_seconds, deadline
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._extensions = True

    def ready(self) -> bool:
        """Return whether the server answers and names a model."""
        try:
            return bool(self.model)
        except RequestFailed:
            return False

    @functools.cached_property
    def model(self) -> str:
        """The name of the first model that the server lists."""
        try:
            return str(json.loads(self.get("/v1/models", 5.0))["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise RequestFailed(f"{self.url} lists no model under /v1/models") from None

    def get(self, path: str, limit_seconds: float = 10.0) -> str:
        """Return the body of a page; raise :class:`RequestFailed` if there is none."""
        with self._response("GET", path, limit_seconds) as (response, _):
            body = response.read().decode(errors="replace")
        if response.status != 200:
            raise RequestFailed(f"{self.url}{path}: status {response.status}")
        return body

    def encode(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int] | str:
        """Return messages as the server's template writes them: token ids (vLLM), a text (llama.cpp), or their words."""
        for path, key in (("/tokenize", "tokens"), ("/apply-template", "prompt")):
            try:
                asked = {"model": self.model, "messages": list(messages), "add_generation_prompt": True}
                with self._response("POST", path, self.limit_seconds, json.dumps(asked)) as (response, _):
                    found = json.loads(response.read()).get(key) if response.status == 200 else None
            except (RequestFailed, ValueError, AttributeError):
                continue
            if found and isinstance(found, list | str):
                return found
        return "\n".join(message["content"] for message in messages)

    def complete(self, prompt: Sequence[int] | str, task: Task) -> Completion:
        """Return the continuation of token ids, or of a text, or raise :class:`RequestFailed`."""
        chosen, count = task.sampling.to_dict(), task.max_new_tokens
        asked = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": self.model, "prompt": asked, "stream": True, "max_tokens": count, "seed": task.seed}
        if self._extensions:
            try:  # with all parameters, as a server may have defaults of its own for those that are not sent
                return self._stream(body | chosen | {"stream_options": _USAGE, "return_token_ids": True}, count)
            except _Refused:
                self._extensions = False  # a strict server does not accept fields that OpenAI does not know
        known = {name: value for name, value in chosen.items() if name in _OPENAI or value != _NEUTRAL[name]}
        return self._stream(body | known | {"stream_options": {"include_usage": True}}, count)

    def complete_all(
        self, prompts: Sequence[Sequence[int] | str], tasks: Sequence[Task], concurrency: int
    ) -> list[Completion]:
        """Return the continuations of several prompts, with so many requests in flight."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(self.complete, prompts, tasks))  # after a failure, it cancels what was not sent

    def margins(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float] | None:
        """Return how far the log-probability of each token of an answer is below that of the likeliest one.

        The server reads prompt and answer in one pass, which makes no drafts. None if it does not tell.
        """
        body = {"model": self.model, "prompt": [*prompt, *answer], "max_tokens": 1, "temperature": 0.0}
        asked = json.dumps(body | {"echo": True, "logprobs": 1})
        try:
            with self._response("POST", "/v1/completions", self.limit_seconds, asked) as (response, _):
                found = json.loads(response.read())["choices"][0]["logprobs"]
            read = slice(len(prompt), len(prompt) + len(answer))
            pairs = list(zip(found["token_logprobs"][read], found["top_logprobs"][read], strict=True))
            margins = [max(best.values()) - own for own, best in pairs]
        except (RequestFailed, LookupError, TypeError, ValueError, AttributeError):
            return None
        return margins if len(margins) == len(answer) else None

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, limit_seconds: float, body: str | None = None
    ) -> Iterator[tuple[http.client.HTTPResponse, socket.socket]]:
        """Yield the response to a request with its socket; a broken connection becomes a :class:`RequestFailed`."""
        limit_seconds = min(limit_seconds, self.deadline - time.monotonic())
        if limit_seconds <= 0:
            raise RequestFailed(f"{self.url}{path}: no time is left")
        connection = self._connection(timeout=limit_seconds)
        try:
            connection.request(method, self._prefix + path, body, self._headers)
            connected = connection.sock  # which the connection forgets if the response is to close it
            yield connection.getresponse(), connected
        except TimeoutError:
            raise RequestFailed(f"{self.url}{path}: no answer within {limit_seconds:.3g} seconds") from None
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(f"{self.url}{path}: the connection broke ({type(error).__name__}: {error})") from None
        finally:
            connection.close()

    def _stream(self, body: Mapping[str, Any], maximum: int) -> Completion:
        start = time.perf_counter()
        with self._response("POST", "/v1/completions", self.limit_seconds, json.dumps(body)) as (response, connected):
            if response.status != 200:
                answer = " ".join(response.read(4096).decode(errors="replace").split())[:_SHOWN]
                error = _Refused if response.status in (400, 422) else RequestFailed
                raise error(f"status {response.status}: {answer}")
            return _read(self._pieces(response, connected, start), start, maximum)

    def _pieces(self, response: http.client.HTTPResponse, connected: socket.socket, start: float) -> Iterator[_Piece]:
        """Yield the pieces of an answer up to its end. Each may take what is left of the time."""
        while True:
            left = min(start + self.limit_seconds - time.perf_counter(), self.deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError
            connected.settimeout(left)
            if not (line := response.readline()):
                break
            name, _, data = line.strip().partition(b":")
            if data.strip() == b"[DONE]":
                return
            if name in (b"", b"event", b"id", b"retry"):
                continue
            try:
                event: Any = json.loads(data) if name == b"data" else None
                if "error" in event:
                    raise RequestFailed(f"the server reports {json.dumps(event['error'])[:_SHOWN]}")
                piece = _piece(event)
            except (LookupError, TypeError, ValueError, AttributeError):
                shown = line.decode(errors="replace").strip()[:_SHOWN]
                raise RequestFailed(f"not a piece of an answer: {shown!r}") from None
            yield piece
        raise RequestFailed("the stream ended before the answer")


def _read(pieces: Iterator[_Piece], start: float, maximum: int) -> Completion:
    """Return the answer that a stream holds. One that the server ends before any text is a single token."""
    texts, tokens, sizes = list[str](), list[int](), list[int]()
    total, counted, ended, first, last = 0, 0, False, start, start
    drafts: _Drafts = None
    for text, new, usage, stopped, drafted in pieces:
        now, drafts = time.perf_counter(), drafted or drafts
        texts.append(text)
        tokens += new
        counted, ended = max(counted, usage or 0), ended or stopped
        if text or new:
            first, last = now if not sizes else first, now
            size = len(new) or (1 if usage is None else max(0, usage - total))
            sizes.append(size)
            total += size
        elif usage is not None and usage > total and sizes:
            sizes[-1] += usage - total  # tokens without a text of their own, or a count that comes at the end only
            total = usage
    if not total and ended and counted <= 1:  # the end of the sequence is the first token, which not every server counts
        return Completion("", None, (1,), time.perf_counter() - start, 0.0, drafts)
    if not total:
        raise RequestFailed(f"the answer has {f'no text, and {counted}' if counted else 'no'} tokens")
    if total > maximum:
        raise RequestFailed(f"the answer has {total} tokens, and at most {maximum} were asked for")
    ids = tuple(tokens) if len(tokens) == total else None
    return Completion("".join(texts), ids, tuple(sizes), first - start, last - first, drafts)


def _piece(event: dict[str, Any]) -> _Piece:
    usage, choice = event.get("usage"), (event.get("choices") or [{}])[0]
    count = None if usage is None else int(usage["completion_tokens"])
    new, timings = [int(token) for token in choice.get("token_ids") or ()], event.get("timings")
    drafts = None if timings is None else (int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0)))
    return choice.get("text") or "", new, count, choice.get("finish_reason") == "stop", drafts
