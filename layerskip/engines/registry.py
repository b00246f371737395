"""The engines that exports name, and the ``engines`` of an export: how each starts with its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from layerskip.engines.calls import launch_openvino_genai, launch_tensorrt_llm, launch_transformers
from layerskip.engines.deployment import Deployment, Launch, Unsupported
from layerskip.engines.servers import launch_llama_cpp, launch_sglang, launch_vllm

ENGINES: dict[str, tuple[str, Callable[[Deployment], Launch]]] = {
    "vllm": ("0.32", launch_vllm),
    "sglang": ("0.5.23", launch_sglang),
    "tensorrt_llm": ("1.3", launch_tensorrt_llm),
    "llama_cpp": ("2026-10", launch_llama_cpp),
    "openvino_genai": ("2026.4", launch_openvino_genai),
    "transformers": ("5.23", launch_transformers),
}
"""For each engine, the version of the documentation that was followed, and what describes its start."""


def describe_engines(deployment: Deployment) -> dict[str, Launch]:
    """Return, for each engine, the ``version`` of its documentation, and how it is started or a ``reason`` why it is not."""
    described = {}
    for name, (version, launch) in ENGINES.items():
        own = replace(deployment, prepare=[])
        try:
            found = launch(own) | {"prepare": own.prepare}
        except Unsupported as reason:
            found = {"reason": str(reason)}
        described[name] = {"version": version} | {field: value for field, value in found.items() if value}
    return described
