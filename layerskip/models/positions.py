"""Limits of position encodings: tables of positions end, and some scaled rotary positions change beyond a threshold."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from layerskip.models.architecture import UnsupportedModel

_OFFSET = 2  # rows before the first position in some families, such as OPT

_log = logging.getLogger(__name__)
_tables: weakref.WeakKeyDictionary[PreTrainedModel, int | None] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions in a model's table, learned or computed; None if it can compute any position."""
    if model not in _tables:
        limit, words = _stated(model), model.get_input_embeddings()
        rows = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding) and part is not words]
        rows += [table.shape[0] for table in model.buffers() if table.dim() == 2]  # of sines, as in GPT-J
        _tables[model] = limit if limit is not None and any(limit <= count <= limit + _OFFSET for count in rows) else None
    return _tables[model]


def check_positions(model: PreTrainedModel, prompt: int, length: int) -> None:
    """Refuse a text with too many positions, or on which drafting is not exact; warn once of a prompt beyond stated ones.

    LongRoPE (arXiv 2402.13753) and dynamic NTK scaling choose the factors of a whole pass by its last position. So drafted
    tokens beyond the threshold would change the encoding of earlier ones. ``length`` is the most tokens of prompt and output
    together; the last one needs no position. :class:`UnsupportedModel` refuses the text.
    """
    name, table, stated = type(model).__name__, max_positions(model), _stated(model)
    if table is not None and length - 1 > table:
        after = f"max_new_tokens: {length - prompt} tokens after a prompt of {prompt}"
        given = after if prompt <= table else f"prompt: {prompt} tokens"
        raise UnsupportedModel(f"{given} exceed the {table} positions of {name}")
    for kind, threshold in _thresholds(model):
        # Beyond its threshold, LongRoPE is the same for every pass; dynamic scaling keeps changing.
        if length > threshold and (kind == "dynamic" or prompt <= threshold):
            raise UnsupportedModel(
                f"max_new_tokens: {name} changes its position scaling from {threshold} tokens on ({kind}), "
                f"which {prompt} tokens of prompt and {length - prompt} of output may reach; drafting is not exact there"
            )
    if stated is not None and prompt > stated and model not in _warned:
        _warned.add(model)
        _log.warning("a prompt of %d tokens exceeds the %d positions that %s states", prompt, stated, name)


def scaling_depends_on_length(model: PreTrainedModel, length: int) -> bool:
    """Return whether passes over parts of a text of ``length`` tokens would encode positions unlike one pass over it."""
    return any(length > threshold for _, threshold in _thresholds(model))


def depends_on_positions_alone(model: PreTrainedModel) -> bool:
    """Return whether tokens depend on their own position only, of which there is any, so that further ones may follow."""
    return max_positions(model) is None and not _thresholds(model)


def _stated(model: PreTrainedModel) -> int | None:
    """Return the number of positions in a model's configuration; with scaling, it may be that before scaling."""
    config = model.config.get_text_config(decoder=True)
    if (limit := getattr(config, "max_position_embeddings", None)) is None:
        return None
    scaled = (int((f.get("original_max_position_embeddings") or 0) * (f.get("factor") or 1)) for f in _ropes(config))
    return int(max(limit, *scaled, 0))


def _thresholds(model: PreTrainedModel) -> list[tuple[str, int]]:
    """Return the lengths of a text beyond which its rotary positions are scaled in another way, with the kind of scaling."""
    config, found = model.config.get_text_config(decoder=True), []
    for fields in _ropes(config):
        kind = str(fields.get("rope_type"))
        if kind == "longrope":
            found.append((kind, int(fields.get("original_max_position_embeddings") or config.max_position_embeddings)))
        elif "dynamic" in kind:
            found.append(("dynamic", int(config.max_position_embeddings)))
    return found


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """Return the rotary parameters: one table for all layers, or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters] if "rope_type" in parameters else [part for part in parameters.values() if isinstance(part, Mapping)]
