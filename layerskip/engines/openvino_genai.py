"""OpenVINO GenAI, as of version 2026.4: ``LLMPipeline`` with ``prompt_lookup`` or ``draft_model``.

Its prompt lookup copies from the first match of the longest n-gram. Its EAGLE is EAGLE-3's. Models are converted by
``optimum-cli export openvino`` of optimum-intel.
"""

from __future__ import annotations

from typing import Any

from layerskip.engines.deployment import Commands, Deployment, Launch, Unsupported, left_out, way_of_drafting

VERSION = "2026.4"
_FORMATS = {"float32": "fp32", "bfloat16": "fp32", "float16": "fp16"}
"""Formats of the stored weights; there is none for bfloat16, which float32 contains."""
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def launch(deployment: Deployment) -> Launch:
    """Return the call that loads the pipeline and generates.

    Raises:
        Unsupported: OpenVINO GenAI has no such drafter.
    """
    way, config = way_of_drafting(deployment), deployment.config
    if way not in ("none", "prompt_lookup", "draft_model"):
        raise Unsupported(f"config.method: {config.method}: OpenVINO GenAI has no such drafter")
    prepare, differs = list[list[str]](), left_out(config, stops=True)
    model = _convert(deployment, deployment.model(prepare), "model", prepare, deployment.revision)
    # The attention cache would otherwise have 8 bits, which changes the output.
    precision = ", ".join(
        f'{name}="{_PRECISIONS[deployment.dtype]}"' for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
    )
    drafter, values = "", dict[str, Any]()
    if way == "prompt_lookup":
        drafter = ", prompt_lookup=True"
        values = {"num_assistant_tokens": config.num_speculative_tokens, "max_ngram_size": config.prompt_lookup_max}
        differs += ["config.match: drafts are copied from the first match"] if config.match == "last" else []
        differs += [f"config.prompt_lookup_min: matches of fewer than {config.prompt_lookup_min} tokens count, too"] * (
            config.prompt_lookup_min > 1
        )
    elif way == "draft_model":
        draft = _convert(deployment, deployment.draft(prepare, "openvino_genai"), "draft", prepare)
        drafter = f', draft_model=openvino_genai.draft_model({draft!r}, "CPU", {precision})'
        stops = config.stop.method == "threshold"  # the engine takes the one or the other
        values = {"assistant_confidence_threshold": config.stop.threshold} if stops else {}
        values |= {} if stops else {"num_assistant_tokens": config.num_speculative_tokens}
        differs += ["config.num_speculative_tokens: drafts end at the confidence alone"] if stops else []
    sampling = deployment.sampling
    request: dict[str, Any] = {"do_sample": not sampling.greedy, "repetition_penalty": sampling.repetition_penalty}
    if not sampling.greedy:
        request |= {"temperature": sampling.temperature, "top_k": int(sampling.top_k) or 2**31 - 1, "top_p": sampling.top_p}
        differs += ["sampling.min_p: is left out"] if sampling.min_p else []
    options = ", ".join(f"{name}={value!r}" for name, value in (request | values).items())
    call = "\n".join(
        [
            "import openvino_genai",
            f'pipeline = openvino_genai.LLMPipeline({model!r}, "CPU", {precision}{drafter})',
            f"print(pipeline.generate(prompt, openvino_genai.GenerationConfig(max_new_tokens=64, {options})))",
        ]
    )
    return Launch(way, call=call, arguments=values, prepare=prepare, request=request, differs=differs)


def _convert(deployment: Deployment, model: str, part: str, prepare: Commands, revision: list[str] | None = None) -> str:
    """Return the folder of a converted model, and add the command that converts it."""
    folder = deployment.beside(f"{part}-openvino")
    command = ["optimum-cli", "export", "openvino", "--model", model, *(revision or [])]
    command += ["--task", "text-generation-with-past", "--weight-format", _FORMATS[deployment.dtype], folder]
    prepare.append(command)
    return folder
