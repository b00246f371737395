"""How does a trial choose a self-draft that skips sub-layers? Its bits, lengths, siblings, bridges and draft head, and back.

A mask is one ``suggest_int`` of 0 or 1 per sub-layer outside the protected first and last layers; as categories the same
bits taught Optuna's TPE nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import optuna

from layerskip import SkipMask, SpeculativeConfig, StopRule

from .makeup import RANKED, Makeup

if TYPE_CHECKING:
    from .space import SearchSpace

LEAST_PROBABILITY = (0.005, 0.5)
Params = dict[str, int | float | str]


def suggest_skip(space: SearchSpace, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
    """A trial's self-draft; its bridges are fitted now, unless they were."""
    attention = {i for i in space.skippable if trial.suggest_int(f"attention_{i}", 0, 1)}
    mlp = {i for i in space.skippable if trial.suggest_int(f"mlp_{i}", 0, 1)}
    mask = SkipMask.of(space.layers, attention, mlp)
    length = trial.suggest_int("skip_length", *space.skip_length)
    stop = suggest_stop(trial, "skip", space.stops)
    skip = SpeculativeConfig("layer_skip", length, mask=mask.format(), stop=stop)
    siblings = trial.suggest_int("siblings", 0, space.siblings) if space.siblings else 0
    if siblings:
        probability = trial.suggest_float("sibling_probability", *LEAST_PROBABILITY, log=True)
        skip = replace(skip, siblings=siblings, least_probability=probability)
    if space.shelf is None:
        return skip
    bridge = str(trial.suggest_categorical("bridge", tuple(space.bridges)))
    rank = int(trial.suggest_categorical("bridge_rank", tuple(space.ranks))) if bridge in RANKED else 0
    width = int(trial.suggest_categorical("bridge_width", tuple(space.widths))) if bridge == "mlp" else 0
    tokens = int(trial.suggest_categorical("draft_head", tuple(space.draft_heads)))
    return made_up(space, skip, Makeup(bridge, rank, tokens, width))


def made_up(space: SearchSpace, config: SpeculativeConfig, makeup: Makeup) -> SpeculativeConfig:
    """A configuration with the bridges and the draft head of a makeup."""
    assert space.shelf is not None
    mask = SkipMask.parse(config.mask, space.layers)
    return replace(config, bridge=space.shelf.bridge(mask, makeup), draft_head=space.shelf.head(makeup.tokens))


def skip_params(space: SearchSpace, config: SpeculativeConfig) -> Params:
    """The choices that lead to a self-draft."""
    mask = SkipMask.parse(config.mask, space.layers)
    found: Params = {f"attention_{i}": int(mask.attention[i]) for i in space.skippable}
    found |= {f"mlp_{i}": int(mask.mlp[i]) for i in space.skippable}
    found |= {"skip_length": config.draft_length} | stop_params(config.stop, "skip")
    if space.siblings:
        found["siblings"] = config.siblings
    if config.siblings:
        found["sibling_probability"] = config.least_probability
    if space.shelf is not None:
        makeup = space.shelf.makeup(config)
        found |= {"bridge": makeup.bridge, "draft_head": makeup.tokens}
        if makeup.bridge in RANKED:
            found["bridge_rank"] = makeup.rank
        if makeup.bridge == "mlp":
            found["bridge_width"] = makeup.width
    return found


def suggest_stop(trial: optuna.trial.BaseTrial, prefix: str, stops: Sequence[str]) -> StopRule:
    """A trial's stop rule."""
    kind = str(trial.suggest_categorical(f"{prefix}_stop", tuple(stops)))
    if kind == "length":
        return StopRule()
    # Optuna's steps add up to 0.7000000000000001, which is another rule than the 0.7 of scans.
    return StopRule(kind, round(trial.suggest_float(f"{prefix}_threshold", 0.1, 0.9, step=0.05), 9))


def stop_params(stop: StopRule, prefix: str) -> Params:
    """The choices that lead to a stop rule."""
    found: Params = {f"{prefix}_stop": stop.kind}
    if stop.kind != "length":
        found[f"{prefix}_threshold"] = stop.threshold
    return found
