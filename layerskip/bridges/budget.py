"""How many texts may bridges be fitted to? As many as a budget of memory holds beside what fitting takes."""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.bridges.mlp_regression import learning_bytes
from layerskip.bridges.ridge import solving_bytes
from layerskip.decoding.sampling import Sampling
from layerskip.models.target import Target
from layerskip.scan.row_model import RowModel
from layerskip.scan.text_batch import Texts
from layerskip.scan.text_cache import Memory
from layerskip.texts.continuations import Continuation

_USED = 0.9  # of the budget; the rest is for what allocators round up
_LOGIT = 8  # bytes beside each logit: its float32 and a probability on a card, another pass's and a kernel's own on a CPU
_BESIDE, _REGRESSED = 3, 12  # numbers of the target's dtype, and bytes, that a fit takes for each number of a hidden state


def afford(
    target: Target,
    model: RowModel,
    continuations: Sequence[Continuation],
    most_bytes: int,
    max_rows: int,
    width: int,
    memory: Memory | None = None,
) -> tuple[Continuation, ...]:
    """As many continuations, evenly spread, as the budget holds.

    Args:
        target: the model.
        model: the same, for passes over rows.
        continuations: its own continuations.
        most_bytes: of all that is kept, and of what reading and fitting take beside it, which come one after the other.
        max_rows: rows per pass.
        width: of the widest MLP that is fitted; 0 for none.
        memory: says what is kept of likely tokens.

    Raises:
        ValueError: not even one continuation fits.
    """
    if not continuations:
        raise ValueError(f"most_bytes: {most_bytes} are of no use without a continuation of two tokens to draft")
    size, hidden, vocabulary = target.model.dtype.itemsize, target.hidden, target.vocabulary
    (one,) = Texts(model, vocabulary, continuations[:1], Sampling()).texts
    beside = one.cache.nbytes // one.cache.max_length
    kinds = len({id(window) for window in one.visible})
    masks = kinds * (1 + (size if model.additive else 1))  # ours and the model's own, of what every row sees
    likely = 0 if memory is None else 8 * min(memory.likely, vocabulary)
    lengths = [len(p.prompt) + p.max_new_tokens for p in continuations]
    keys = [
        max_rows + length * (max_rows // continuation.starts + 2)
        for continuation, length in zip(continuations, lengths, strict=True)
    ]
    kept = [
        length * (beside + kinds * length)
        + len(continuation.tokens) * likely
        + continuation.starts * (hidden * (target.layers + 1) * size + masks * seen)
        for continuation, length, seen in zip(continuations, lengths, keys, strict=True)
    ]
    for count in range(len(continuations), 0, -1):
        places = [number * len(continuations) // count for number in range(count)]
        rows = sum(continuations[place].starts for place in places)
        reading = max(max_rows, *(continuations[place].max_new_tokens for place in places)) * vocabulary * (size + _LOGIT)
        fitting = rows * hidden * (_BESIDE * size + _REGRESSED)
        fitting += max(solving_bytes(rows, hidden), learning_bytes(rows, hidden, width))
        shared = beside * max(keys[place] for place in places)
        taken = shared + sum(kept[place] for place in places) + max(reading, fitting)
        if taken <= _USED * most_bytes:
            return tuple(continuations[place] for place in places)
    few = f"{most_bytes} hold not even one of {len(continuations)} continuations"
    raise ValueError(f"most_bytes: {few}, which takes {int(taken / _USED) + 1}")
