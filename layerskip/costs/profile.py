"""Measurement of a cost profile: whole rounds are timed, and a least squares problem is solved for the costs of their parts.

Every timed draft is followed by its verification, as in decoding. What drafting leaves in the machine's caches affects the
time of verification and is part of the cost of a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from layerskip.config import StopRule
from layerskip.costs.cost_model import CostProfile
from layerskip.costs.timing import VerifyPass, median_seconds
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stopping import Stopper, confidence
from layerskip.draft_plan import BITS, DraftPlan
from layerskip.drafters.chain import draft_chain
from layerskip.models.architecture import architecture
from layerskip.models.skip_view import skip_view
from layerskip.models.target import Target

_DRAFTED = (1, 4)  # tokens of timed drafts
_Job = tuple[str, DraftPlan | None, int]
"""A timed job: its kind, the mask of its draft, and the number of drafted tokens."""
_Parts = dict[DraftPlan, list[float]]
"""What a pass of each timed draft runs: 1 head, then the numbers of blocks and of sub-layers of each kind."""


@torch.inference_mode()
def profile_costs(
    target: Target,
    context: int,
    longest: int = 8,
    sampling: Sampling = Sampling(),
    repeats: int = 12,
    on_repeat: Callable[[], object] = lambda: None,
    is_over: Callable[[], bool] = lambda: False,
    formats: Sequence[str] = (),
) -> CostProfile:
    """Measure a profile, also of drafts in some formats of :data:`layerskip.draft_plan.BITS`.

    ``repeats``, ``on_repeat`` and ``is_over`` are those of :func:`~layerskip.costs.timing.median_seconds`.
    """
    longest = max(longest, 2)  # one length would not separate the fixed cost of a round from that of its tokens
    drafts = _timed_drafts(target)
    passes = VerifyPass(target, context, longest, sampling)
    context, cache, tokens, chooser = passes.context, passes.cache, passes.tokens, passes.chooser
    lengths = sorted({min(count, longest) for count in _DRAFTED})

    def decode_round(view: nn.Module, count: int) -> None:
        draft = draft_chain(view, cache, tokens[-1:], count, chooser, Stopper(StopRule()))
        cache.length = context
        passes.check(draft)

    jobs: dict[_Job, Callable[[], object]] = {}
    for mask in drafts:
        view = skip_view(target.model, mask)
        jobs |= {("round", mask, count): partial(decode_round, view, count) for count in lengths}
    reading = {name: _drafts_in(BITS[name], target.layers) for name in formats}
    for plan in itertools.chain(*reading.values()):
        jobs["format", plan, lengths[-1]] = partial(decode_round, skip_view(target.model, plan), lengths[-1])
    jobs |= {("verify", None, count): partial(passes.chain, count) for count in range(longest + 1)}
    jobs["confidence", None, 0] = lambda: float(confidence(passes.logits))
    # Verifications twice: each is a single pass, yet part of every prediction.
    twice = [*jobs.items(), *((name, job) for name, job in jobs.items() if name[0] == "verify")]
    median = median_seconds(target.device, twice, repeats, on_repeat=on_repeat, is_over=is_over)
    profile = _solve(target, context, drafts, median)
    in_format = {plan: seconds for (name, plan, _), seconds in median.items() if name == "format"}
    shares = {
        name: _shares(profile, [in_format[plan] for plan in plans], lengths[-1], BITS[name] / 32)
        for name, plans in reading.items()
    }
    return replace(profile, shares=shares)


def _drafts_in(bits: int, layers: int) -> list[DraftPlan]:
    """Return the drafts that read the output layer at some bits, then also all attention, then also all MLPs."""
    nothing, everything = (False,) * layers, (True,) * layers
    skips = (everything, everything), (nothing, everything), (nothing, nothing)
    return [DraftPlan(*each, *((bits,) * layers,) * 2, head_bits=bits) for each in skips]


def _shares(profile: CostProfile, seconds: Sequence[float], count: int, least: float) -> tuple[float, float, float]:
    """Return the shares of the time of head, attention and MLP, from rounds of ``count`` tokens with :func:`_drafts_in`.

    Differences of noisy medians may be near zero or negative; no share is below ``least``.
    """
    head, attention, mlp = ((each - profile.round_seconds - profile.verify_seconds[count]) / count for each in seconds)
    attention, mlp = attention - head - len(profile.mlp_seconds) * profile.block_seconds, mlp - attention
    stored = profile.head_seconds, sum(profile.attention_seconds), sum(profile.mlp_seconds)
    pairs = zip((head, attention, mlp), stored, strict=True)
    first, second, third = (max(least, own / whole) if whole else 1.0 for own, whole in pairs)
    return first, second, third


def _solve(target: Target, context: int, drafts: _Parts, median: Mapping[_Job, float]) -> CostProfile:
    """Solve for the costs of the parts. Every round is its verification, a fixed cost and the parts of its draft passes."""
    verifying = [seconds for name, seconds in median.items() if name[0] == "verify"]
    rounds = {(mask, count): seconds for (name, mask, count), seconds in median.items() if name == "round" and mask}
    rows = np.array([[1.0, *(count * part for part in drafts[mask])] for mask, count in rounds])
    drafting = np.array([seconds - verifying[count] for (_, count), seconds in rounds.items()])
    weights = 1 / np.array(list(rounds.values()))  # relative errors of short and long rounds count the same
    solved = np.linalg.lstsq(rows * weights[:, None], drafting * weights, rcond=None)[0]
    head, block, *sublayers = np.maximum(solved[1:], 0.0).tolist()
    layer_kinds = [_layer_kinds(target, name) for name in ("attention", "mlp")]
    costs = dict(zip(dict.fromkeys(kind for kinds in layer_kinds for kind in kinds), sublayers, strict=True))
    attention, mlp = (tuple(costs[kind] for kind in kinds) for kinds in layer_kinds)
    return CostProfile(
        context=context,
        head_seconds=head,
        block_seconds=block,
        attention_seconds=attention,
        mlp_seconds=mlp,
        confidence_seconds=median["confidence", None, 0],
        round_seconds=float(solved[0]),  # negative if drafting warms up what verification needs
        verify_seconds=tuple(verifying),
    )


def _layer_kinds(target: Target, name: str) -> list[tuple[Any, ...]]:
    """Return the kind of every layer's attention or MLP; sub-layers of one kind have the same cost."""
    blocks = architecture(target.model)
    types = getattr(target.model.config.get_text_config(decoder=True), "layer_types", None)
    kinds: list[tuple[Any, ...]] = []
    for index, block in enumerate(blocks.blocks):
        layer = target.model.get_submodule(f"{blocks.path}.{index}")
        children = [layer.get_submodule(child) for child in getattr(block, name)]
        sizes = tuple((type(child).__name__, sum(p.numel() for p in child.parameters())) for child in children)
        kinds.append((name, sizes, types[index] if types and name == "attention" else ""))
    return kinds


def _timed_drafts(target: Target) -> _Parts:
    """Return drafts from whose times all costs can be solved."""
    attention, mlp = _layer_kinds(target, "attention"), _layer_kinds(target, "mlp")
    kinds = list(dict.fromkeys([*attention, *mlp]))
    nothing, everything = (False,) * target.layers, (True,) * target.layers
    masks = [DraftPlan(nothing, nothing), DraftPlan(everything, everything)]
    masks += [DraftPlan(*(tuple(kind == other for other in each) for each in (attention, mlp))) for kind in kinds]
    # All attentions and all MLPs, which separate the cost of a block from that of its sub-layers.
    masks += [DraftPlan(everything, nothing), DraftPlan(nothing, everything)]
    timed: _Parts = {}
    for mask in masks:
        kept = [kind for skipped, kind in zip((*mask.attention, *mask.mlp), (*attention, *mlp), strict=True) if not skipped]
        blocks = sum(not (a and m) for a, m in zip(mask.attention, mask.mlp, strict=True))
        timed[mask] = [1.0, float(blocks), *(float(kept.count(kind)) for kind in kinds)]
    return timed
