"""llama.cpp, by the server in the Python package ``xllamacpp``, on a GGUF file."""

from __future__ import annotations

import json
import shlex
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

LOADS = "gguf"
ROUNDS_TO = "bfloat16"  # activations of 8 bits


def command(settings: Mapping[str, Any]) -> str:
    """Return the command of a server that decodes so; it prints its address."""
    lines = ["import time, xllamacpp", *_statements(settings), "server = xllamacpp.Server(params)"]
    lines += ["print(server.listening_address, flush=True)", "time.sleep(10**9)"]
    return shlex.join([settings["python"], "-c", "; ".join(lines)])


def _statements(settings: Mapping[str, Any]) -> list[str]:
    """Return the statements that make ``params``, by which the engine and the command load the same."""
    found = [
        "params = xllamacpp.CommonParams()",
        f"params.model.path = {settings['model']!r}",
        f"params.n_ctx, params.n_parallel = {settings['max_length']}, 1",
        f"params.cpuparams.n_threads = params.cpuparams_batch.n_threads = {settings['threads']}",
    ]
    if not (speculative := settings["speculative_config"]):
        return found
    kind = "NGRAM_SIMPLE" if speculative["method"] == "ngram" else "DRAFT_SIMPLE"
    length = speculative["num_speculative_tokens"]
    found.append(f"params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_{kind}]")
    if speculative["method"] == "ngram":
        lookup = "params.speculative.ngram_simple"
        return [*found, f"{lookup}.size_n, {lookup}.size_m = {speculative['prompt_lookup_max']}, {length}"]
    draft = "params.speculative.draft"
    found.append(f"{draft}.mparams.path, {draft}.n_max = {speculative['model']!r}, {length}")
    return [*found, f"{draft}.cpuparams.n_threads = {draft}.cpuparams_batch.n_threads = {settings['threads']}"]


class Engine:
    """The server, in this process. It rounds activations where it multiplies by blocks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import xllamacpp

        made: dict[str, Any] = {"xllamacpp": xllamacpp}
        exec("\n".join(_statements(settings)), made)
        params = made["params"]
        self._server = xllamacpp.Server(params)
        self.version = str(xllamacpp.__version__)
        cache = getattr(params.cache_type_k, "name", params.cache_type_k)
        self.precision = {"weights": "blocks of the file", "cache": str(cache), "build": str(xllamacpp.get_system_info())}
        self._length = settings["max_length"]
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def decode(self, request: dict[str, Any], on_round: Callable[[int], None]) -> list[int]:
        output, first, last = list[int](), 0, dict[str, Any]()
        for last in self._parts(request, stream=True):
            output += last["tokens"]
            if output and not first:
                first = len(output)
                on_round(first)
        if len(output) != last["tokens_predicted"]:  # it holds back tokens that end within a character
            (whole,) = self._parts(request, stream=False)
            output = list(whole["tokens"])
        # It sends single tokens, so of the rounds only their number is known.
        after = len(output) - first if first else 0
        rounds = max(min(after, 1), after - int(last["timings"].get("draft_n_accepted", 0)))
        for number in range(rounds):
            on_round(after * (number + 1) // rounds - after * number // rounds)
        return output

    def _parts(self, request: dict[str, Any], stream: bool) -> Iterator[dict[str, Any]]:
        """Yield the parts of the answer to a request."""
        body = {"prompt": request["tokens"], "n_predict": request["max_new_tokens"], "temperature": 0.0}
        body |= {"repeat_penalty": request["repetition_penalty"], "repeat_last_n": self._length}
        body |= {"stream": stream, "return_tokens": True, "cache_prompt": False}
        address = f"{self._server.listening_address}/completion"
        asked = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with self._opener.open(asked) as answer:
            for line in answer:
                if part := line.removeprefix(b"data: ").strip():
                    yield json.loads(part)
