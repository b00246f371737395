"""TensorRT-LLM, as of the documentation of its PyTorch backend of version 1.3: the Python class ``LLM``.

Its EAGLE is EAGLE-3's; heads of EAGLE-1 and Medusa are not loaded. A server takes the same fields from a file, as
``trtllm-serve MODEL --config FILE``.
"""

from __future__ import annotations

from typing import Any

from layerskip.engines.deployment import Deployment, Launch, Unsupported, left_out, way_of_drafting

VERSION = "1.3"
_CONFIGS = {
    "prompt_lookup": "NGramDecodingConfig",
    "draft_model": "DraftTargetDecodingConfig",
    "eagle3": "Eagle3DecodingConfig",
}


def launch(deployment: Deployment) -> Launch:
    """Return the call that loads the engine and generates.

    Raises:
        Unsupported: TensorRT-LLM has no such drafter.
    """
    way, config = way_of_drafting(deployment), deployment.config
    if way != "none" and way not in _CONFIGS:
        raise Unsupported(f"config.method: {config.method}: TensorRT-LLM has no such drafter")
    prepare, differs = list[list[str]](), left_out(config)
    loading: dict[str, Any] = {"model": deployment.model(prepare), "dtype": deployment.dtype}
    if deployment.revision:
        loading["revision"] = deployment.revision[1]
    values: dict[str, Any] = {}
    if way == "prompt_lookup":
        values = {"max_draft_len": config.num_speculative_tokens, "max_matching_ngram_size": config.prompt_lookup_max}
        values |= {"is_keep_all": True, "is_use_oldest": config.match == "first", "is_public_pool": False}
        differs += [f"config.prompt_lookup_min: matches of fewer than {config.prompt_lookup_min} tokens count, too"] * (
            config.prompt_lookup_min > 1
        )
    elif way != "none":
        values = {
            "max_draft_len": config.num_speculative_tokens,
            "speculative_model": deployment.draft(prepare, "tensorrt_llm"),
        }
    given = "" if way == "none" else f", speculative_config={_CONFIGS[way]}({_keywords(values)})"
    # The overlap scheduler is for drafters that run on the device within the target's step.
    given += ", disable_overlap_scheduler=True" if way in ("prompt_lookup", "draft_model") else ""
    request = _request(deployment)
    lines = ["from tensorrt_llm import LLM, SamplingParams"]
    lines += [] if way == "none" else [f"from tensorrt_llm.llmapi import {_CONFIGS[way]}"]
    lines += [
        f"engine = LLM({_keywords(loading)}{given})",
        f"print(engine.generate(prompt, SamplingParams({_keywords(request)})).outputs[0].text)",
    ]
    return Launch(
        _CONFIGS.get(way, "none"), call="\n".join(lines), arguments=values, prepare=prepare, request=request, differs=differs
    )


def _request(deployment: Deployment) -> dict[str, Any]:
    sampling = deployment.sampling
    fields: dict[str, Any] = {"temperature": sampling.temperature, "repetition_penalty": sampling.repetition_penalty}
    if not sampling.greedy:
        fields |= {"top_k": int(sampling.top_k), "top_p": sampling.top_p, "min_p": sampling.min_p}
    return fields


def _keywords(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
