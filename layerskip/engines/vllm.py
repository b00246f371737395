"""vLLM, as of version 0.32: ``vllm serve`` with ``--speculative-config``.

Its n-gram drafter copies from the first match. Suffix decoding is its counterpart of retrieval from earlier requests. Heads
are read in the layouts of EAGLE-1's authors and of Medusa's; its speculators format has no EAGLE-1.
"""

from __future__ import annotations

import json
from typing import Any

from layerskip.engines.deployment import Deployment, Launch, left_out, openai_request, way_of_drafting

VERSION = "0.32"


def launch(deployment: Deployment) -> Launch:
    """Return the command that starts an OpenAI-compatible server.

    Raises:
        Unsupported: vLLM has no such drafter.
    """
    way, config = way_of_drafting(deployment, suffix=True), deployment.config
    prepare, differs = list[list[str]](), left_out(config)
    # The server would otherwise take sampling parameters from the model's generation configuration.
    command = ["vllm", "serve", deployment.model(prepare), *deployment.revision, "--dtype", deployment.dtype]
    command += ["--generation-config", "vllm"]
    speculative: dict[str, Any] = {}
    if way != "none":
        speculative = {"method": way, "num_speculative_tokens": config.draft_length}
        if way == "prompt_lookup":
            speculative |= {"method": "ngram", "prompt_lookup_min": config.ngram_min, "prompt_lookup_max": config.ngram_max}
            differs += ["config.match: drafts are copied from the first match"] if config.match == "last" else []
        elif way == "suffix":  # arXiv 2411.04975; the tree's depth limits match and draft together
            speculative["suffix_decoding_max_tree_depth"] = config.ngram_max + config.draft_length
            speculative["suffix_decoding_max_spec_factor"] = config.tree_tokens / config.ngram_max
            speculative["suffix_decoding_min_token_prob"] = config.least_probability
            differs.append(
                "config.kind: suffix decoding, which needs arctic-inference, drafts chains from a tree of suffixes"
            )
        else:
            speculative["model"] = deployment.draft(prepare, "vllm")
        if way == "cross_tokenizer":
            speculative |= {"method": "draft_model", "use_heterogeneous_vocab": True}
            differs.append("config.kind: only tokens that both vocabularies contain are drafted")
        command += ["--speculative-config", json.dumps(speculative)]
    method = str(speculative.get("method", "none"))
    request = openai_request(deployment.sampling, unlimited_k=0)
    return Launch(method, command, arguments=speculative, prepare=prepare, request=request, differs=differs)
