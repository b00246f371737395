"""vLLM's engine on a CPU."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import uuid
from collections.abc import Callable, Mapping
from typing import Any

LOADS = "folder"


def command(settings: Mapping[str, Any]) -> str:
    """Return the command of a server that decodes so."""
    words = ["vllm", "serve", settings["model"], "--dtype", settings["dtype"], "--generation-config", "vllm"]
    drafting = settings["speculative_config"]
    return shlex.join([*words, *(["--speculative-config", json.dumps(drafting)] if drafting else [])])


class Engine:
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

    def decode(self, request: dict[str, Any], on_round: Callable[[int], None]) -> list[int]:
        return self._loop.run_until_complete(self._decode(request, on_round))

    async def _decode(self, request: dict[str, Any], on_round: Callable[[int], None]) -> list[int]:
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
