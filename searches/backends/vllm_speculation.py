"""vLLM's ``--speculative-config`` for a configuration, with the names of vLLM 0.32, ``vllm/config/speculative.py``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerskip import SpeculativeConfig, StopRule
from layerskip.config import kinds
from searches.space.search_space import SearchSpace

_METHODS = {
    "prompt_lookup": "ngram",
    "retrieval": "suffix",
    "draft_model": "draft_model",
    "eagle": "eagle",
    "medusa": "medusa",
}
_REASONS = {
    "layer_skip": "skips no layers; save the kept ones with layerskip.save_draft_checkpoint as one of space.drafts",
    "cross_tokenizer": "needs a draft model with the target's tokenizer",
}


class NotServed(ValueError):
    """A configuration that vLLM has no counterpart of; one line says why."""


def refusal(kind: str) -> str | None:
    """Return None if vLLM drafts with a kind of drafter, else the reason in one line."""
    if kind == "none" or kind in _METHODS:
        return None
    return f"vLLM {_REASONS.get(kind, f'has no counterpart of {kind}')}"


def vllm_config(config: SpeculativeConfig, folder: Callable[[str], str] = str) -> dict[str, Any] | None:
    """Return the speculative configuration of vLLM; None for plain decoding.

    ``retrieval`` becomes suffix decoding (arXiv 2411.04975). The depth of vLLM's tree limits the sum of match and draft. Its
    factor limits the draft to a multiple of the match, and is chosen so that the longest match drafts ``tree_tokens``.

    Args:
        config: the configuration.
        folder: returns a name of a draft model that vLLM can load, for one that ``load_target`` can load.

    Raises:
        NotServed: vLLM cannot do it.
    """
    if config.kind == "none":
        return None
    reason = refusal(config.kind)
    if reason is not None:
        raise NotServed(f"kind: {reason}")
    if not config.lossless:
        raise NotServed("accept: vLLM has no acceptance rule but the exact one")
    if config.stop != StopRule():
        raise NotServed("stop: vLLM has no stop rules")
    found: dict[str, Any] = {"method": _METHODS[config.kind], "num_speculative_tokens": config.draft_length}
    if config.kind == "prompt_lookup":
        return found | {"prompt_lookup_min": config.ngram_min, "prompt_lookup_max": config.ngram_max}
    if config.kind == "retrieval":
        if config.datastore:
            raise NotServed("datastore: vLLM's suffix decoding drafts from requests alone")
        return found | {
            "suffix_decoding_max_tree_depth": config.ngram_max + config.draft_length,
            "suffix_decoding_max_spec_factor": config.tree_tokens / config.ngram_max,
            "suffix_decoding_min_token_prob": config.least_probability,
        }
    if config.kind == "draft_model":
        if config.draft_head:
            raise NotServed("draft_head: vLLM's draft models choose from the whole vocabulary")
        return found | {"model": folder(config.draft)}
    return found | {"model": config.head, "method": _head_method(config)}


def vllm_space(space: SearchSpace) -> SearchSpace:
    """Return the space without choices that vLLM does not have: stop rules, matches, datastores and lossy rules.

    Its n-grams are copied from their first match. Heads draft chains: trees are left out unless a kind drafts nothing else.
    """
    trees = any(kinds()[kind].trees_only for kind in space.available_kinds)
    found = replace(space, stops=("length",), matches=("first",), datastores=(), allow_lossy=False)
    return found if trees else replace(found, trees=False)


def _head_method(config: SpeculativeConfig) -> str:
    """Return vLLM's method for a trained head, by the configuration in its folder."""
    try:
        described = json.loads((Path(config.head) / "config.json").read_text(encoding="utf-8"))
        architectures = " ".join(map(str, described.get("architectures") or ()))
    except (OSError, ValueError, AttributeError, TypeError):
        raise NotServed(f"head: {config.head} has no config.json in a layout that vLLM loads") from None
    if config.kind == "medusa":
        return "medusa"
    named = str(described.get("speculators_model_type", "")).lower()
    return "eagle3" if named == "eagle3" or "eagle3" in architectures.lower() else "eagle"
