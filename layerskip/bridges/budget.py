"""Selection of the texts that bridges are fitted to: as many as fit a memory budget with everything that fitting needs."""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.bridges.mlp_regression import mlp_regression_bytes
from layerskip.bridges.ridge import regression_bytes
from layerskip.decoding.sampling import Sampling
from layerskip.models.target import Target
from layerskip.scan.row_model import RowModel
from layerskip.scan.text_batch import TextBatch
from layerskip.scan.text_cache import TextCache
from layerskip.texts.continuations import Continuation

_USED = 0.9  # of the budget; the rest is for the rounding of allocators
_LOGIT_BYTES = 8  # on top of each logit. GPU: its float32 and a probability; CPU: another pass's and a kernel's own copy
_COPIES, _FLOAT_BYTES = 3, 12  # of a fit, for each hidden state element: copies in the target's dtype, and bytes in float32


def select_continuations(
    target: Target,
    model: RowModel,
    continuations: Sequence[Continuation],
    most_bytes: int,
    max_rows: int,
    width: int,
    text_cache: TextCache | None = None,
) -> tuple[Continuation, ...]:
    """Select as many continuations, evenly spread, as the budget holds.

    Args:
        target: the model whose texts are read.
        model: the target as a model of independent rows.
        continuations: the continuations to select from.
        most_bytes: budget for everything that is kept, and for what reading and fitting need in addition. The two
            follow each other, so the larger of the two counts.
        max_rows: rows per pass while bridges are fitted.
        width: width of the widest MLP to fit; 0 for none.
        text_cache: decides how many of the most likely tokens are kept.

    Raises:
        ValueError: not even one continuation fits.
    """
    if not continuations:
        raise ValueError(f"most_bytes: {most_bytes} are of no use without a continuation of two tokens to draft")
    size, hidden, vocabulary = target.model.dtype.itemsize, target.hidden, target.vocabulary
    (one,) = TextBatch(model, vocabulary, continuations[:1], Sampling()).texts
    position_bytes = one.cache.nbytes // one.cache.max_length
    kinds = len({id(window) for window in one.visible})
    mask_bytes = kinds * (1 + (size if model.additive else 1))  # per row and key, of our mask and the model's own
    top_bytes = 0 if text_cache is None else 8 * min(text_cache.top_k, vocabulary)
    lengths = [len(p.prompt) + p.max_new_tokens for p in continuations]
    keys = [
        max_rows + length * (max_rows // continuation.starts + 2)
        for continuation, length in zip(continuations, lengths, strict=True)
    ]
    kept = [
        length * (position_bytes + kinds * length)
        + len(continuation.tokens) * top_bytes
        + continuation.starts * (hidden * (target.layers + 1) * size + mask_bytes * visible)
        for continuation, length, visible in zip(continuations, lengths, keys, strict=True)
    ]
    for count in range(len(continuations), 0, -1):
        places = [number * len(continuations) // count for number in range(count)]
        rows = sum(continuations[place].starts for place in places)
        read_rows = max(max_rows, *(continuations[place].max_new_tokens for place in places))
        reading = read_rows * vocabulary * (size + _LOGIT_BYTES)
        fitting = rows * hidden * (_COPIES * size + _FLOAT_BYTES)
        fitting += max(regression_bytes(rows, hidden), mlp_regression_bytes(rows, hidden, width))
        shared = position_bytes * max(keys[place] for place in places)
        total = shared + sum(kept[place] for place in places) + max(reading, fitting)
        if total <= _USED * most_bytes:
            return tuple(continuations[place] for place in places)
    few = f"{most_bytes} hold not even one of {len(continuations)} continuations"
    raise ValueError(f"most_bytes: {few}, which takes {int(total / _USED) + 1}")
