"""The engines that exports name, and the ``engines`` of an export: how each starts with its configuration."""

from __future__ import annotations

from typing import Any

from layerskip.engines import llama_cpp, openvino_genai, sglang, tensorrt_llm, transformers_generate, vllm
from layerskip.engines.deployment import Deployment, Unsupported

ENGINES = {
    "vllm": vllm,
    "sglang": sglang,
    "tensorrt_llm": tensorrt_llm,
    "llama_cpp": llama_cpp,
    "openvino_genai": openvino_genai,
    "transformers": transformers_generate,
}
"""A module for each engine, with ``VERSION`` of the documentation it follows and ``launch(deployment)``."""


def describe_engines(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """Return, for each engine, how it is started with an export, or the reason why it cannot run it.

    Each has the ``version`` of the documentation, and either the fields of a
    :class:`~layerskip.engines.deployment.Launch` or a ``reason``.
    """
    described = {}
    for name, module in ENGINES.items():
        try:
            found: dict[str, Any] = module.launch(deployment).to_dict()
        except Unsupported as reason:
            found = {"reason": str(reason)}
        described[name] = {"version": module.VERSION} | found
    return described
