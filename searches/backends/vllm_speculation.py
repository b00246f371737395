"""What vLLM can decode of a search: its kinds of drafters, its part of a space, and ``--speculative-config``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerskip import Export, SpeculativeConfig, StopRule, Target
from layerskip.config import kinds
from layerskip.engines.deployment import Deployment, Unsupported, way_of_drafting
from layerskip.engines.vllm import speculation
from layerskip.heads.published_eagle import is_published
from searches.space.search_space import SearchSpace

_KINDS = ("none", "prompt_lookup", "retrieval", "draft_model", "cross_tokenizer", "eagle", "medusa")
_KEPT_LAYERS = "skips no layers; save the kept ones with layerskip.save_draft_checkpoint as one of space.drafts"


def refusal(kind: str) -> str | None:
    """Return None if vLLM drafts with a kind of drafter, else the reason in one line."""
    if kind in _KINDS:
        return None
    return f"vLLM {_KEPT_LAYERS if kind == 'layer_skip' else f'has no counterpart of {kind}'}"


def named(config: SpeculativeConfig) -> str:
    """Return the draft model or the published head of a configuration as it is named.

    Raises:
        Unsupported: the head is in no layout that vLLM loads.
    """
    if config.head and not is_published(Path(config.head)):
        raise Unsupported(f"config.head: {config.head} has no layout that vLLM loads; searches.export draft= writes it")
    return config.head or config.draft


def vllm_config(
    target: Target, config: SpeculativeConfig, folder: Callable[[SpeculativeConfig], str] = named
) -> dict[str, Any]:
    """Return the speculative configuration of vLLM; empty for plain decoding.

    Args:
        target: the model that vLLM serves.
        config: the configuration.
        folder: returns its draft model or head as vLLM can load it.

    Raises:
        Unsupported: vLLM cannot do it, or does otherwise.
    """
    if (reason := refusal(config.kind)) is not None:
        raise Unsupported(f"config.kind: {reason}")
    if config.stop != StopRule():
        raise Unsupported("config.stop: vLLM has no stop rules")
    if config.draft_head:
        raise Unsupported("config.draft_head: vLLM's draft models choose from the whole vocabulary")
    way = way_of_drafting(Deployment(Export.describe(target), config), suffix=True)
    return speculation(way, config, lambda: folder(config))


def vllm_space(space: SearchSpace) -> SearchSpace:
    """Return the space without choices that vLLM does not have: stop rules, matches, datastores and lossy rules.

    Its n-grams are copied from their first match. Heads draft chains: trees are left out unless a kind drafts nothing else.
    """
    trees = any(kinds()[kind].trees_only for kind in space.available_kinds)
    found = replace(space, stops=("length",), matches=("first",), datastores=(), allow_lossy=False)
    return found if trees else replace(found, trees=False)
