"""SGLang, as of version 0.5.23: ``sglang.launch_server`` with ``--speculative-algorithm``.

A window of verification counts the last token of the text with the drafted ones. Its n-gram drafter keeps a trie of all
requests, so that drafts may come from other prompts, too.
"""

from __future__ import annotations

from typing import Any

from layerskip.engines.deployment import Deployment, Launch, Unsupported, left_out, openai_request, way_of_drafting

VERSION = "0.5.23"
_ALGORITHMS = {"prompt_lookup": "NGRAM", "draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}


def launch(deployment: Deployment) -> Launch:
    """Return the command that starts an OpenAI-compatible server.

    Raises:
        Unsupported: SGLang has no such drafter.
    """
    way, config = way_of_drafting(deployment), deployment.config
    if way != "none" and way not in _ALGORITHMS:
        raise Unsupported(f"config.method: {config.method}: SGLang has no such drafter")
    prepare, differs = list[list[str]](), left_out(config, trees=True)
    command = ["python", "-m", "sglang.launch_server", "--model-path", deployment.model(prepare), *deployment.revision]
    command += ["--dtype", deployment.dtype, "--sampling-defaults", "openai"]
    values: dict[str, Any] = {}
    if way == "prompt_lookup":
        values = {"num-draft-tokens": config.num_speculative_tokens + 1, "ngram-max-bfs-breadth": 1}
        values["ngram-max-trie-depth"] = config.prompt_lookup_max + config.num_speculative_tokens
        differs.append("config.prompt_lookup_min: matches of any length are found, in all requests")
    elif way != "none":
        tree = config.method == "eagle" and config.top_k > 1
        values = {
            "draft-model-path": deployment.draft(prepare, "sglang"),
            "num-steps": config.num_speculative_tokens,
            "eagle-topk": config.top_k if tree else 1,
            "num-draft-tokens": 1 + (config.tree_tokens if tree else config.num_speculative_tokens),
        }
        differs += ["config.min_token_prob: branches do not end early"] if tree else []
    if way != "none":
        values = {"algorithm": _ALGORITHMS[way]} | values
        command += [word for name, value in values.items() for word in (f"--speculative-{name}", str(value))]
    request = openai_request(deployment.sampling, unlimited_k=-1)
    return Launch(_ALGORITHMS.get(way, "none"), command, arguments=values, prepare=prepare, request=request, differs=differs)
