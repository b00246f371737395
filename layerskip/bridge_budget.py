"""How many texts may bridges be fitted to? As many as a budget of memory holds beside what fitting takes."""

from __future__ import annotations

from collections.abc import Sequence

from .passages import Passage
from .regression import learning_bytes
from .ridge import solving_bytes
from .rows import RowModel
from .sampling import Sampling
from .target import Target
from .text import Memory
from .texts import Texts

_USED = 0.9  # of the budget; the rest is for what allocators round up
_LOGIT = 8  # bytes beside each logit: its float32 and a probability on a card, another pass's and a kernel's own on a CPU
_BESIDE, _REGRESSED = 3, 12  # numbers of the target's dtype, and bytes, that a fit takes for each number of a hidden state


def afford(
    target: Target,
    model: RowModel,
    passages: Sequence[Passage],
    most_bytes: int,
    max_rows: int,
    width: int,
    memory: Memory | None = None,
) -> tuple[Passage, ...]:
    """As many passages, evenly spread, as the budget holds.

    Args:
        target: the model.
        model: the same, for passes over rows.
        passages: its own continuations.
        most_bytes: of all that is kept, and of what reading and fitting take beside it, which come one after the other.
        max_rows: rows per pass.
        width: of the widest MLP that is fitted; 0 for none.
        memory: says what is kept of likely tokens.

    Raises:
        ValueError: not even one passage fits.
    """
    if not passages:
        raise ValueError(f"most_bytes: {most_bytes} are of no use without a continuation of two tokens to draft")
    size, hidden, vocabulary = target.model.dtype.itemsize, target.hidden, target.vocabulary
    (one,) = Texts(model, vocabulary, passages[:1], Sampling()).texts
    beside = one.cache.nbytes // one.cache.max_length
    kinds = len({id(window) for window in one.visible})
    masks = kinds * (1 + (size if model.additive else 1))  # ours and the model's own, of what every row sees
    likely = 0 if memory is None else 8 * min(memory.likely, vocabulary)
    lengths = [len(p.prompt) + p.max_new_tokens for p in passages]
    keys = [max_rows + length * (max_rows // passage.starts + 2) for passage, length in zip(passages, lengths, strict=True)]
    kept = [
        length * (beside + kinds * length)
        + len(passage.tokens) * likely
        + passage.starts * (hidden * (target.layers + 1) * size + masks * seen)
        for passage, length, seen in zip(passages, lengths, keys, strict=True)
    ]
    for count in range(len(passages), 0, -1):
        places = [number * len(passages) // count for number in range(count)]
        rows = sum(passages[place].starts for place in places)
        reading = max(max_rows, *(passages[place].max_new_tokens for place in places)) * vocabulary * (size + _LOGIT)
        fitting = rows * hidden * (_BESIDE * size + _REGRESSED)
        fitting += max(solving_bytes(rows, hidden), learning_bytes(rows, hidden, width))
        shared = beside * max(keys[place] for place in places)
        taken = shared + sum(kept[place] for place in places) + max(reading, fitting)
        if taken <= _USED * most_bytes:
            return tuple(passages[place] for place in places)
    few = f"{most_bytes} hold not even one of {len(passages)} continuations"
    raise ValueError(f"most_bytes: {few}, which takes {int(taken / _USED) + 1}")
