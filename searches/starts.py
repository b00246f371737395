"""What does a study try first? What is cheap, what has structure, and what was foretold.

Random masks skip half of all layers and never recover; structure is where a search can start from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from layerskip import SpeculativeConfig, StopRule

from .space import Range, SearchSpace


def starting_points(space: SearchSpace, proposed: Sequence[SpeculativeConfig] = ()) -> list[SpeculativeConfig]:
    """No drafting, one of each cheap drafter, what is proposed, else single skips, contiguous runs and sparse masks.

    A cascade puts its lookup before recycled trees, before what is tried first of each kind of heads and before the mask
    foretold to be best, else before what is tried first.
    """
    arms = space.arms
    points = [SpeculativeConfig()]
    if "prompt_lookup" in arms:
        points += [_lookup(space, 8, 3), _lookup(space, 4, 2)]
    if "retrieval" in arms:
        length, size, longest = _clip((16, space.lookup_length), (24, space.tree_tokens), (4, space.ngram))
        retrieval = SpeculativeConfig("retrieval", length, ngram_min=space.ngram[0], ngram_max=longest, tree_tokens=size)
        points += [replace(retrieval, datastore=name) for name in ("", *space.datastores)]
    if "token_recycling" in arms:
        length, size, kept = _clip((6, space.tree_length), (8, space.tree_tokens), (4, space.candidates))
        recycling = SpeculativeConfig("token_recycling", length, tree_tokens=size, candidates=kept)
        points += [recycling, *_behind_lookup(space, [recycling])]
    if "lookahead" in arms:
        length, window, kept = _clip((2, space.lookahead_length), (4, space.window), (4, space.candidates))
        points.append(SpeculativeConfig("lookahead", length, window=window, candidates=kept))
    for kind, heads in space.heads.items():
        points += _headed(space, kind, heads) if kind in arms else []
    for kind, drafts in space.models.items():
        (length,) = _clip((4, space.model_length))
        points += [SpeculativeConfig(kind, length, draft=draft) for draft in drafts if kind in arms]
    foretold = [config for config in proposed if config.kind == "layer_skip"]  # the best comes first
    points += [*proposed, *_behind_lookup(space, foretold)]
    if "layer_skip" in arms:
        stop = StopRule("adaptive", 0.6) if "adaptive" in space.stops else StopRule(space.stops[0])
        (length,) = _clip((4, space.skip_length))
        # Where masks were foretold, those that merely have structure were asked about, too.
        masks = (*space.masks, *(() if foretold else _structured_masks(space)))
        points += [SpeculativeConfig("layer_skip", length, mask=mask, stop=stop) for mask in masks]
    if not any(config.kind == "cascade" and not config.members[1].head for config in points):
        points += _behind_lookup(space, [config for config in points if config.kind in space.seconds])
    return list(dict.fromkeys(points))


def _headed(space: SearchSpace, kind: str, heads: Sequence[str]) -> list[SpeculativeConfig]:
    """What trained heads draft by themselves, and the first of that behind a lookup."""
    depth, most = (3, 8) if kind == "eagle" else (2, 6)
    length, width, size = _clip((depth, space.model_length), (4, space.candidates), (most, space.tree_tokens))
    width = max(2, width)
    alone = [SpeculativeConfig(kind, length, head=head, candidates=width, tree_tokens=size) for head in heads if space.trees]
    if kind == "eagle":
        # What a head drafts behind a token that it was unsure of is seldom accepted.
        stop = StopRule("threshold", 0.5) if "threshold" in space.stops else StopRule(space.stops[0])
        (length,) = _clip((5, space.model_length))
        alone += [SpeculativeConfig(kind, length, candidates=1, head=head, stop=stop) for head in heads]
    return [*alone[:1], *_behind_lookup(space, alone), *alone[1:]]


def _lookup(space: SearchSpace, length: int, longest: int) -> SpeculativeConfig:
    length, longest = _clip((length, space.lookup_length), (longest, space.ngram))
    return SpeculativeConfig("prompt_lookup", length, ngram_min=space.ngram[0], ngram_max=longest)


def _behind_lookup(space: SearchSpace, seconds: Iterable[SpeculativeConfig]) -> list[SpeculativeConfig]:
    """The first of some drafters behind a lookup; nothing where the space has no cascades."""
    if "cascade" not in space.arms:
        return []
    (shortest,) = _clip((2, space.ngram))
    lookup = replace(_lookup(space, 8, 4), ngram_min=shortest)
    first = itertools.islice(seconds, 1)
    return [space.cascade(lookup, second) for second in first]


def _structured_masks(space: SearchSpace) -> Iterable[str]:
    """Early single skips, early contiguous runs, and every third or fourth sub-layer."""
    bits, count = space.skippable, len(space.skippable)
    early = bits[count // 6]
    yield f"attention:{early}"
    yield f"mlp:{bits[count // 4]}"
    for length in sorted({max(1, round(space.layers * share)) for share in (0.1, 0.25, 0.4)}):
        yield f"layers:{early}-{min(early + length, bits[-1] + 1) - 1}"
    yield "attention:" + ",".join(map(str, bits[1::3] or bits[:1]))
    yield "layers:" + ",".join(map(str, bits[2::4] or bits[:1]))


def _clip(*wanted: tuple[int, Range]) -> list[int]:
    """Each value, or the end of its range that is next to it."""
    return [min(max(value, low), high) for value, (low, high) in wanted]
