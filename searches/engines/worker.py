"""A process that decodes with an inference engine, under the interpreter in which the engine is installed.

It imports nothing of this project, so that the engine's packages and ours need not fit together. Requests and answers are
lines of JSON on its standard input and output: first the settings, answered when the model is loaded. Each further line is a
prompt, answered by a line when its first tokens are known and by another at the end. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

OnRound = Callable[[int], None]
"""A function that is called after every round with the number of new tokens."""


class OpenVinoGenAi:
    """A pipeline of OpenVINO GenAI on the CPU, with its attention cache in the model's precision."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        self._genai, self._openvino = openvino_genai, openvino
        kind = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[settings["dtype"]]
        precision = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}
        options = precision | {"INFERENCE_NUM_THREADS": settings["threads"]}
        schedule = openvino_genai.SchedulerConfig()
        schedule.enable_prefix_caching = False  # every prompt is read whole, as the others read it
        drafting: dict[str, Any] = {"scheduler_config": schedule}
        self._lengths: dict[str, int] = {}
        if speculative := settings["speculative_config"]:
            self._lengths["num_assistant_tokens"] = speculative["num_speculative_tokens"]
            if speculative["method"] == "ngram":
                drafting["prompt_lookup"] = True
                self._lengths["max_ngram_size"] = speculative["prompt_lookup_max"]
            else:
                drafting["draft_model"] = openvino_genai.draft_model(speculative["model"], "CPU", **options)
        self._pipeline = openvino_genai.LLMPipeline(settings["model"], "CPU", **drafting, **options)
        self.version = str(openvino_genai.__version__)
        # The pipeline does not show its model. Without AVX-512, a request for bfloat16 becomes float32.
        model = openvino.Core().compile_model(os.path.join(settings["model"], "openvino_model.xml"), "CPU", options)
        self.precision = {name: str(model.get_property(name)) for name in precision}

    def decode(self, request: dict[str, Any], on_round: OnRound) -> list[int]:
        """Return the continuation of ``tokens``."""
        import numpy

        running = self._genai.StreamingStatus.RUNNING

        class Streamer(self._genai.StreamerBase):  # type: ignore[name-defined, misc]
            def write(self, token: Any) -> Any:
                on_round(len(token) if isinstance(token, (list, tuple)) else 1)
                return running

            def end(self) -> None:
                pass

        config = self._genai.GenerationConfig(max_new_tokens=request["max_new_tokens"], **self._lengths)
        config.do_sample, config.apply_chat_template = False, False
        config.repetition_penalty = request["repetition_penalty"]
        config.stop_token_ids = set(request["eos"])
        tokens = self._openvino.Tensor(numpy.array([request["tokens"]], dtype=numpy.int64))
        return list(self._pipeline.generate(tokens, config, Streamer()).tokens[0])


class Vllm:
    """vLLM's engine for one request at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # gigabytes
        # By itself, vLLM leaves a core to its scheduler: one of two cores would decode.
        cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_length"],
            max_num_seqs=1,
            enable_prefix_caching=False,
            generation_config="vllm",
            speculative_config=settings["speculative_config"] or None,
        )

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        self._loop = asyncio.new_event_loop()
        self._engine = self._loop.run_until_complete(start())
        self.version, configured = str(vllm.__version__), self._engine.vllm_config
        self.precision = {"dtype": str(configured.model_config.dtype), "cache": str(configured.cache_config.cache_dtype)}

    def decode(self, request: dict[str, Any], on_round: OnRound) -> list[int]:
        return self._loop.run_until_complete(self._decode(request, on_round))

    async def _decode(self, request: dict[str, Any], on_round: OnRound) -> list[int]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_new_tokens"],
            repetition_penalty=request["repetition_penalty"],
            stop_token_ids=request["eos"],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = TokensPrompt(prompt_token_ids=request["tokens"])
        output: list[int] = []
        async for part in self._engine.generate(prompt, sampling, uuid.uuid4().hex):
            output += part.outputs[0].token_ids
            on_round(len(part.outputs[0].token_ids))
        return output


class LlamaCpp:
    """The server of llama.cpp on a GGUF file, in this process. It rounds activations where it multiplies by blocks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = settings["model"], settings["max_length"], 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
        if speculative := settings["speculative_config"]:
            types, drafting = xllamacpp.common_speculative_type, params.speculative
            if speculative["method"] == "ngram":
                drafting.types = [types.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
                drafting.ngram_simple.size_n = speculative["prompt_lookup_max"]
                drafting.ngram_simple.size_m = speculative["num_speculative_tokens"]
            else:
                drafting.types = [types.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
                drafting.draft.mparams.path = speculative["model"]
                drafting.draft.n_max = speculative["num_speculative_tokens"]
                drafting.draft.cpuparams.n_threads = drafting.draft.cpuparams_batch.n_threads = settings["threads"]
        self._server = xllamacpp.Server(params)
        self.version = str(xllamacpp.__version__)
        cache = getattr(params.cache_type_k, "name", params.cache_type_k)
        self.precision = {"weights": "blocks of the file", "cache": str(cache), "build": str(xllamacpp.get_system_info())}
        self._length = settings["max_length"]
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def decode(self, request: dict[str, Any], on_round: OnRound) -> list[int]:
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


ENGINES: dict[str, Any] = {"openvino_genai": OpenVinoGenAi, "vllm": Vllm, "xllamacpp": LlamaCpp}


def main() -> None:
    """Load the engine of the first line, and decode the prompts of the others."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # what libraries print goes to the log
        _serve(sys.stdin, answers)


def _serve(requests: Iterable[str], answers: TextIO) -> None:
    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    lines = iter(requests)
    settings = json.loads(next(lines))
    engine = ENGINES[settings["engine"]](settings)
    answer(version=engine.version, precision=engine.precision)
    lengths: list[int] = []  # the number of tokens that are known after each round

    def on_round(count: int) -> None:
        lengths.append(lengths[-1] + count if lengths else count)
        if len(lengths) == 1:
            answer(first=count)

    for line in lines:
        lengths.clear()
        tokens = engine.decode(json.loads(line), on_round)
        if not lengths:  # it showed no token before the end
            on_round(len(tokens))
        answer(tokens=[int(token) for token in tokens], lengths=lengths)


if __name__ == "__main__":
    main()
