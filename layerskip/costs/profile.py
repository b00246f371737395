"""What do the parts of a round take on this machine? Whole rounds are timed, and their parts solved for.

Drafts are timed each followed by its verification, as decoding has them: what drafting leaves in the caches of a machine is
part of what a round takes.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from layerskip.config import ConfigError, StopRule
from layerskip.costs.cost_model import Aids, CostProfile
from layerskip.costs.verify_timing import VerifyPass
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stopping import Stopper, confidence
from layerskip.device.clock import now
from layerskip.drafters.chain import draft_chain
from layerskip.drafters.siblings import Fan
from layerskip.mask import SkipMask
from layerskip.models.architecture import architecture
from layerskip.models.bridge import Bridges, BridgeShape
from layerskip.models.draft_head import DraftHead
from layerskip.models.packing import pack_matrices, packs
from layerskip.models.skip_view import skip_view
from layerskip.models.target import Target

_DRAFTED = (1, 4)  # tokens of timed drafts
_TIMED_NUMBERS = 2**25  # of timed bridges, so that those of a wide model take no memory to speak of
_SIBLINGS = 1  # of a timed tree
_TURNS = 2  # of a chain and a tree, in every repeat, there and back
_NARROW = 4  # a timed draft head has this share of the vocabulary
_SAID = 16  # tokens of a text that join them
_WIDE = 2  # times the hidden width: a timed MLP
_PATIENCE = 4  # times as many repeats as asked for, where the machine is noisy


@torch.inference_mode()
def profile_costs(
    target: Target,
    context: int,
    longest: int = 8,
    sampling: Sampling | None = None,
    repeats: int = 12,
    error: float = math.inf,
    seed: int = 0,
    on_repeat: Callable[[], None] = lambda: None,
    bridged: bool = False,
    branching: bool = False,
) -> CostProfile:
    """Measure a profile: every part in a random order, again and again; each part's time is its median.

    Args:
        target: the model.
        context: positions in the cache, as the prompts of the search have them.
        longest: the most drafted tokens to verify.
        sampling: greedy where None.
        repeats: how often.
        error: it goes on, up to four times as often, while a median's standard error is more than this share of it.
        seed: of the order.
        on_repeat: called after every repeat.
        bridged: whether what bridges and draft heads cost is measured as well.
        branching: whether what siblings cost is.
    """
    longest = max(longest, 1 + _SIBLINGS)  # rounds of one length alone would not tell a round's own cost from its tokens'
    parts = _parts(target, bridged)
    passes = VerifyPass(target, context, longest, sampling, seed)
    context, cache, tokens, chooser = passes.context, passes.cache, passes.tokens, passes.chooser
    lengths = sorted({min(count, longest) for count in _DRAFTED})
    last = skip_view(target.model, parts[1].mask)

    def draft_long(fan: Fan | None = None) -> None:
        draft_chain(last, cache, tokens[-1:], lengths[-1], chooser, Stopper(StopRule()), fan)
        cache.length = context

    def decode_flat(fan: Fan | None = None) -> None:
        """As many verified as a tree has."""
        draft_long(fan)
        passes.chain(1 + _SIBLINGS)

    def decode_fanned() -> None:
        """The same, and siblings are looked for."""
        decode_flat(Fan(_SIBLINGS, 0.0, chooser))

    def decode_tree() -> None:
        """The same, and a tree is verified, whose last node is kept."""
        draft_long(Fan(_SIBLINGS, 0.0, chooser))
        passes.tree((-1,) * (1 + _SIBLINGS), [0, 1 + _SIBLINGS])  # a draft may be too sure of itself to have any

    def decode_round(part: _Part, view: nn.Module, count: int) -> None:
        drafted = None if part.head is None else part.head.tokens
        draft = draft_chain(view, cache, tokens[-1:], count, chooser, Stopper(StopRule()), drafted=drafted)
        cache.length = context
        passes.check(draft)

    jobs: dict[tuple[str, int, int], Callable[[], object]] = {}
    for number, part in enumerate(parts):
        view = skip_view(target.model, part.mask, part.bridges)
        if part.head is not None:
            part.head.narrow(view)
            part.head.follow(_said(part.head))
        jobs |= {("round", number, count): partial(decode_round, part, view, count) for count in lengths}
    jobs |= {("verify", 0, count): partial(passes.chain, count) for count in range(longest + 1)}
    jobs["confidence", 0, 0] = lambda: float(confidence(passes.logits))
    ways = (decode_flat, decode_fanned, decode_tree)
    steps: list[tuple[float, float]] = []  # from each to the next, one right after the other, as they differ by little
    times: dict[tuple[str, int, int], list[float]] = {job: [] for job in jobs}
    order = random.Random(seed)
    for repeat in range(_PATIENCE * repeats + 1):
        if repeat > repeats and _largest_error(times) <= error:
            break
        # Twice what is a single pass and yet in every prediction.
        names = [*jobs, *(name for name in jobs if name[0] == "verify")]
        order.shuffle(names)
        for name in names:
            start = now(target.device)
            jobs[name]()
            if repeat:  # the first one warms up
                times[name].append(now(target.device) - start)
        for turn in range(_TURNS if branching else 0):
            found = [0.0, 0.0, 0.0]
            for way in (2, 1, 0) if turn % 2 else (0, 1, 2):
                start = now(target.device)
                ways[way]()
                found[way] = now(target.device) - start
            if repeat:
                steps.append((found[1] - found[0], found[2] - found[1]))
        on_repeat()
    median = {name: float(np.median(found)) for name, found in times.items()}
    verifying = [median["verify", 0, count] for count in range(longest + 1)]
    rounds = [name for name in jobs if name[0] == "round"]
    rows = np.array([[1.0, *(count * number_of for number_of in parts[number].counts)] for _, number, count in rounds])
    drafting = np.array([median[name] - verifying[name[2]] for name in rounds])
    near = 1 / np.array([median[name] for name in rounds])  # a per cent of a short round is worth one of a long round
    solved = np.linalg.lstsq(rows * near[:, None], drafting * near, rcond=None)[0]
    kinds = _kinds(target)
    costs = dict(zip(kinds, np.maximum(solved[7:], 0.0), strict=True))
    by_layer = {name: tuple(float(costs[kind]) for kind in _of_layers(target, name)) for name in ("attention", "mlp")}
    head = max(0.0, float(solved[1]))
    bridge, a_map, value, token = (max(0.0, float(cost)) for cost in solved[3:7])
    fanned, tree = np.maximum(np.median(steps, axis=0), 0.0) if branching else (0.0, 0.0)
    return CostProfile(
        context,
        head,
        max(0.0, float(solved[2])),
        by_layer["attention"],
        by_layer["mlp"],
        median["confidence", 0, 0],
        float(solved[0]),  # below 0 where drafting warms up what verification needs
        tuple(verifying),
        bridge,
        value,
        min(token, head / target.vocabulary),  # few tokens take at least their share of the head
        float(fanned) / lengths[-1],
        float(tree),
        a_map,
    )


def _largest_error(times: Mapping[tuple[str, int, int], Sequence[float]]) -> float:
    """The largest standard error of the medians of rounds and passes, as a share of the median: 1.25 deviations / sqrt(n).

    A deviation is told from the quartiles, which a stop or two do not move.
    """
    found = [0.0]
    for name, seconds in times.items():
        low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
        if name[0] != "confidence" and middle > 0:
            found.append(float(1.25 * (high - low) / 1.35 / math.sqrt(len(seconds)) / middle))
    return max(found)


def _of_layers(target: Target, name: str) -> list[tuple[Any, ...]]:
    """The kind of every layer's attention or MLP: sub-layers of one kind take the same time."""
    found = architecture(target.model)
    types = getattr(target.model.config.get_text_config(decoder=True), "layer_types", None)
    kinds: list[tuple[Any, ...]] = []
    for index, block in enumerate(found.blocks):
        layer = target.model.get_submodule(f"{found.path}.{index}")
        children = [layer.get_submodule(child) for child in getattr(block, name)]
        sizes = tuple((type(child).__name__, sum(p.numel() for p in child.parameters())) for child in children)
        kinds.append((name, sizes, types[index] if types and name == "attention" else ""))
    return kinds


def _kinds(target: Target) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys([*_of_layers(target, "attention"), *_of_layers(target, "mlp")]))


@dataclass(frozen=True)
class _Part:
    """A draft to time, with how often a pass runs head, blocks, bridges, maps, their numbers, tokens left out, and kinds."""

    mask: SkipMask
    bridges: Bridges | None
    head: DraftHead | None
    counts: list[float]


def _parts(target: Target, bridged: bool) -> list[_Part]:
    """What to time."""
    attention, mlp, kinds = _of_layers(target, "attention"), _of_layers(target, "mlp"), _kinds(target)
    nothing, everything = (False,) * target.layers, (True,) * target.layers
    masks = [SkipMask(nothing, nothing), SkipMask(everything, everything)]
    for kind in kinds:
        flags = tuple(kind == other for other in attention), tuple(kind == other for other in mlp)
        masks.append(SkipMask(*flags))
    # Two of a kind skipped together tell a block's own cost from its sub-layers'.
    masks += [SkipMask(everything, nothing), SkipMask(nothing, everything)]
    drafts: list[tuple[SkipMask, BridgeShape | None, DraftHead | None]] = [
        (mask, None, None) for mask in dict.fromkeys(masks)
    ]
    if bridged:
        # Bridges in place of many attentions, so that they are told from noise.
        many = max(1, min(target.layers, _TIMED_NUMBERS // target.hidden**2))
        attentions = SkipMask.of(target.layers, set(range(many)), set())
        drafts += [(attentions, None, None)] * (many < target.layers)
        drafts += [(attentions, BridgeShape.of(target, attentions, kind), None) for kind in ("mean", "linear")]
        wide = BridgeShape.of(target, SkipMask.of(target.layers, {0}, set()), "mlp", width=_WIDE * target.hidden)
        some = SkipMask.of(target.layers, set(range(max(1, min(target.layers, _TIMED_NUMBERS // wide.numbers)))), set())
        drafts.append((some, replace(wide, mask=some.format()), None))
        with contextlib.suppress(ConfigError):  # an output layer that cannot be cut costs what it does
            common = torch.arange(max(1, target.vocabulary // _NARROW))
            drafts.append((SkipMask(everything, everything), None, DraftHead(target.model, common, target.vocabulary)))
    rows = []
    for mask, shape, head in drafts:
        kept = [kind for skipped, kind in zip((*mask.attention, *mask.mlp), (*attention, *mlp), strict=True) if not skipped]
        blocks = sum(not (a and m) for a, m in zip(mask.attention, mask.mlp, strict=True))
        aids = Aids.of(shape, 0 if head is None else target.vocabulary - head.tokens.numel())
        bridges = None if shape is None else _bridges(shape, target)
        beside = [float(aids.bridges), float(aids.maps), float(aids.numbers), -float(aids.left_out)]
        counts = [1.0, float(blocks), *beside, *(float(kept.count(kind)) for kind in kinds)]
        rows.append(_Part(mask, bridges, head, counts))
    return rows


def _said(head: DraftHead) -> range:
    """Tokens of a text that are not common, as most texts have some: they are multiplied by apart from the common ones."""
    return range(head.tokens.numel(), head.tokens.numel() + _SAID)


@torch.inference_mode(False)  # what is made in it is never laid out
def _bridges(shape: BridgeShape, target: Target) -> Bridges:
    """Bridges as those that decode."""
    bridges = Bridges(shape).to(target.device, target.model.dtype).requires_grad_(False)
    if packs(target.model):
        pack_matrices(bridges)
    return bridges
