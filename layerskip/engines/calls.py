"""Engines that a Python call starts: TensorRT-LLM, OpenVINO GenAI and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerskip.engines.deployment import (
    Deployment,
    Launch,
    Unsupported,
    hugging_face_fields,
    keywords,
    left_out,
    no_drafter,
    request_fields,
    way_of_drafting,
)
from layerskip.models.target import described_precision

_TENSORRT_CONFIGS = {
    "none": "none",
    "prompt_lookup": "NGramDecodingConfig",
    "draft_model": "DraftTargetDecodingConfig",
    "eagle3": "Eagle3DecodingConfig",
}


def launch_tensorrt_llm(deployment: Deployment) -> Launch:
    """Return the start of TensorRT-LLM, as of the documentation of its PyTorch backend of version 1.3: the Python class
    ``LLM``.

    Its EAGLE is EAGLE-3's; heads of EAGLE-1 and Medusa are not loaded. A server takes the same fields from a file, as
    ``trtllm-serve MODEL --config FILE``.
    """
    way, config = way_of_drafting(deployment), deployment.config
    if way not in _TENSORRT_CONFIGS:
        raise no_drafter(deployment, "TensorRT-LLM")
    loading: dict[str, Any] = {"model": deployment.model(), "dtype": deployment.dtype}
    if deployment.revision:
        loading["revision"] = deployment.revision[1]
    lines, given, values = ["from tensorrt_llm import LLM, SamplingParams"], keywords(loading), dict[str, Any]()
    if way != "none":
        values = {"max_draft_len": config.num_speculative_tokens}
        if way == "prompt_lookup":
            values |= {"max_matching_ngram_size": config.prompt_lookup_max, "is_keep_all": True}
            values |= {"is_use_oldest": config.match == "first", "is_public_pool": False}
        else:
            values["speculative_model"] = deployment.draft("tensorrt_llm")
        lines.append(f"from tensorrt_llm.llmapi import {_TENSORRT_CONFIGS[way]}")
        given += f", speculative_config={_TENSORRT_CONFIGS[way]}({keywords(values)})"
    # The overlap scheduler is for drafters that run on the device within the target's step.
    given += ", disable_overlap_scheduler=True" if way in ("prompt_lookup", "draft_model") else ""
    request = request_fields(deployment.sampling)
    lines += [
        f"engine = LLM({given})",
        f"print(engine.generate(prompt, SamplingParams({keywords(request)})).outputs[0].text)",
    ]
    return {
        "method": _TENSORRT_CONFIGS[way],
        "call": "\n".join(lines),
        "arguments": values,
        "request": request,
        "differs": left_out(config, any_size=True),
    }


_OPENVINO_FORMATS = {"float32": "fp32", "bfloat16": "fp32", "float16": "fp16"}
"""Formats of the stored weights; there is none for bfloat16, which float32 contains."""
_OPENVINO_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def launch_openvino_genai(deployment: Deployment) -> Launch:
    """Return the start of OpenVINO GenAI, as of version 2026.4: ``LLMPipeline`` with ``prompt_lookup`` or ``draft_model``.

    Its prompt lookup copies from the first match of the longest n-gram. Its EAGLE is EAGLE-3's. Models are converted by
    ``optimum-cli export openvino`` of optimum-intel.
    """
    way, config, sampling = way_of_drafting(deployment), deployment.config, deployment.sampling
    if way not in ("none", "prompt_lookup", "draft_model"):
        raise no_drafter(deployment, "OpenVINO GenAI")
    differs = left_out(config, stops=True, match="first", any_size=True)
    model = _convert(deployment, deployment.model(), "model", deployment.revision)
    # The attention cache would otherwise have 8 bits, which changes the output.
    precision = ", ".join(
        f'{name}="{_OPENVINO_PRECISIONS[deployment.dtype]}"' for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
    )
    drafter, values = "", dict[str, Any]()
    if way == "prompt_lookup":
        drafter = ", prompt_lookup=True"
        values = {"num_assistant_tokens": config.num_speculative_tokens, "max_ngram_size": config.prompt_lookup_max}
    elif way == "draft_model":
        draft = _convert(deployment, deployment.draft("openvino_genai"), "draft")
        drafter = f', draft_model=openvino_genai.draft_model({draft!r}, "CPU", {precision})'
        if config.stop.method == "threshold":  # the engine takes the one or the other
            values = {"assistant_confidence_threshold": config.stop.threshold}
            differs.append("config.num_speculative_tokens: drafts end at the confidence alone")
        else:
            values = {"num_assistant_tokens": config.num_speculative_tokens}
    request = hugging_face_fields(sampling)
    if request.pop("min_p", 0):
        differs.append("sampling.min_p: is left out")
    if not sampling.greedy:
        request["top_k"] = request["top_k"] or 2**31 - 1
    lines = [
        "import openvino_genai",
        f'pipeline = openvino_genai.LLMPipeline({model!r}, "CPU", {precision}{drafter})',
        f"config = openvino_genai.GenerationConfig(max_new_tokens=64, {keywords(request | values)})",
        "print(pipeline.generate(prompt, config))",
    ]
    return {
        "method": way,
        "call": "\n".join(lines),
        "arguments": values,
        "request": request,
        "differs": differs,
    }


def _convert(deployment: Deployment, model: str, part: str, revision: Sequence[str] = ()) -> str:
    """Return the folder of a converted model, and add the command that converts it."""
    folder = deployment.beside(f"{part}-openvino")
    command = ["optimum-cli", "export", "openvino", "--model", model, *revision]
    command += ["--task", "text-generation-with-past", "--weight-format", _OPENVINO_FORMATS[deployment.dtype], folder]
    deployment.prepare.append(command)
    return folder


def launch_transformers(deployment: Deployment) -> Launch:
    """Return the start of transformers, as of version 5.23: ``generate`` with its own drafters, or with this library's as
    ``custom_generate``.

    Its prompt lookup copies from the first match. A confidence threshold and the schedule of draft lengths are fields of
    the assistant's generation configuration. What it cannot draft, ``custom_generate`` does, exactly as it was measured.
    """
    try:
        way = way_of_drafting(deployment)
    except Unsupported:
        return _custom(deployment)
    if way in ("eagle", "eagle3", "medusa") or deployment.config.method == "layer_skip":
        return _custom(deployment)
    return _own(deployment, way)


def _own(deployment: Deployment, way: str) -> Launch:
    """Return a call of transformers' own drafters, which need no package but transformers."""
    config, method, further = deployment.config, way, ""
    values, assistant = dict[str, Any](), dict[str, Any]()
    revision = deployment.target.get("revision")
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    lines += _load("model", "tokenizer", deployment.model(), deployment.dtype, revision)
    if way == "prompt_lookup":
        method = "prompt_lookup_num_tokens"
        values = {method: config.num_speculative_tokens, "max_matching_ngram_size": config.prompt_lookup_max}
    elif way != "none":
        method = "assistant_model"
        threshold = config.stop.threshold if config.stop.method == "threshold" else 0.0
        assistant = {"num_assistant_tokens": config.num_speculative_tokens, "num_assistant_tokens_schedule": "constant"}
        assistant |= {"assistant_confidence_threshold": threshold}
        lines += _load("assistant", "assistant_tokenizer", deployment.draft("transformers"), deployment.dtype)
        lines += [f"assistant.generation_config.{name} = {value!r}" for name, value in assistant.items()]
        further = ", assistant_model=assistant"
        further += ", tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer" if way == "cross_tokenizer" else ""
    request = hugging_face_fields(deployment.sampling)
    return {
        "method": method,
        "call": "\n".join([*lines, *_generate("", "model", request | values, further)]),
        "arguments": values | assistant,
        "request": request,
        "differs": left_out(config, stops=True, match="first", any_size=True),
    }


def _custom(deployment: Deployment) -> Launch:
    """Return a call with this library's decoding loop in ``generate``."""
    target, request = deployment.target, hugging_face_fields(deployment.sampling)
    dtype = described_precision(target)
    loading = {"revision": target.get("revision"), "dtype": dtype, "quantization": target.get("quantization")}
    given = "".join(f", {name}={value!r}" for name, value in loading.items() if value is not None)
    lines = [
        "import layerskip",
        f"target = layerskip.load_target({target['name']!r}{given})",
        f"export = layerskip.Export.load({str(deployment.file)!r}, target)",
        "method = export.custom_generate(target.tokenizer)",
        *_generate("target.", "target.model", request, ", custom_generate=method", ".to(target.device)"),
    ]
    return {"method": "custom_generate", "call": "\n".join(lines), "request": request}


def _generate(owner: str, model: str, options: dict[str, Any], further: str, moved: str = "") -> list[str]:
    """Return the statements that generate from ``prompt`` with a model and the tokenizer of its owner."""
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return [
        f'inputs = {owner}tokenizer(prompt, return_tensors="pt"){moved}',
        f"output = {model}.generate(**inputs, max_new_tokens=64{given}{further})",
        f'print({owner}tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]


def _load(model: str, tokenizer: str, name: str, dtype: str, revision: str | None = None) -> list[str]:
    """Return the statements that load a model and its tokenizer."""
    given = "" if revision is None else f", revision={revision!r}"
    return [
        f"{tokenizer} = AutoTokenizer.from_pretrained({name!r}{given})",
        f"{model} = AutoModelForCausalLM.from_pretrained({name!r}{given}, dtype={dtype!r})",
    ]
