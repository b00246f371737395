"""How far do positions reach, and where do they change? Learnt ones end; some rotary ones turn otherwise behind an edge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from layerskip.models.architecture import UnsupportedModel

_OFFSET = 2  # rows that some families, OPT's for one, have before that of their first position


def most_positions(model: PreTrainedModel) -> int | None:
    """How many positions a model has learnt embeddings for; None where it computes them, however many there are."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    words = model.get_input_embeddings()
    rows = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding) and part is not words]
    learnt = limit is not None and any(limit <= count <= limit + _OFFSET for count in rows)
    return limit if learnt else None


def check_edges(model: PreTrainedModel, prompt: int, length: int) -> None:
    """Refuse a text in which positions would turn otherwise from some token on, as a block of tokens would not do it there.

    Scaled rotary positions (LongRoPE, arXiv 2402.13753; dynamic NTK scaling) take the factors of a whole pass from its last
    position. Drafted tokens behind the edge would turn the block's tokens before it, which plain decoding does not.

    Args:
        model: a decoder.
        prompt: tokens that are read in one pass.
        length: tokens that there may be in the end.

    Raises:
        UnsupportedModel: the text may come to such an edge.
    """
    for kind, edge in _edges(model):
        # Behind its edge, LongRoPE is the same for every pass; dynamic scaling goes on changing.
        if length > edge and (kind == "dynamic" or prompt <= edge):
            raise UnsupportedModel(
                f"max_new_tokens: {type(model).__name__} turns positions otherwise from {edge} tokens on ({kind}), which "
                f"this text of {prompt} tokens may come to with {length - prompt} more; no draft is exact across that"
            )


def _edges(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    config = model.config.get_text_config(decoder=True)
    for fields in _ropes(getattr(config, "rope_parameters", None) or {}):
        kind = str(fields.get("rope_type"))
        if kind == "longrope":
            edge = fields.get("original_max_position_embeddings") or config.max_position_embeddings
            yield kind, int(edge)
        elif "dynamic" in kind:
            yield "dynamic", int(config.max_position_embeddings)


def _ropes(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """One for all layers, or one for each type of them."""
    return [parameters] if "rope_type" in parameters else [part for part in parameters.values() if isinstance(part, Mapping)]
