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
    words = ["env", *(f"{name}={value}" for name, value in (settings["environment"] | _variables(settings)).items())]
    words += [settings["python"], "-m", "vllm.entrypoints.openai.api_server"]  # the program vllm of its wheel does not start
    for name, value in _arguments(settings).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return shlex.join(words)


def _variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what the engine reads from its environment: gigabytes of its cache, and the cores that decode.

    By itself, vLLM leaves a core to its scheduler: one of two cores would decode.
    """
    cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
    usual = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    return {name: os.environ.get(name, value) for name, value in usual.items()}


def _arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": settings["model"],
        "dtype": settings["dtype"],
        "max_model_len": settings["max_length"],
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "speculative_config": settings["speculative_config"] or None,
    }


class Engine:
    """vLLM's engine for one request at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ.update(_variables(settings))
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**_arguments(settings))

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
