"""Choice of a self-draft by a trial: skipped sub-layers, draft length, siblings, bridges and draft head.

A mask is one ``suggest_int`` of 0 or 1 per sub-layer outside the protected first and last layers. Optuna's TPE does not
learn from the same bits as categorical parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import optuna

from layerskip import SkipMask, SpeculativeConfig, StopRule
from searches.app.checks import InputError
from searches.space.bridge_spec import RANKED, BridgeSpec
from searches.space.choices import LEAST_PROBABILITY, Choices, Params, clip
from searches.space.registry import SearchedKind, register
from searches.space.shared_parameters import stop_params, suggest_stop


def suggest_skip(choices: Choices, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
    """Return a trial's self-draft. Its bridges are fitted now unless they exist."""
    attention = {i for i in choices.skippable if trial.suggest_int(f"attention_{i}", 0, 1)}
    mlp = {i for i in choices.skippable if trial.suggest_int(f"mlp_{i}", 0, 1)}
    mask = SkipMask.of(choices.layers, attention, mlp)
    length = trial.suggest_int("skip_length", *choices.skip_length)
    stop = suggest_stop(trial, "skip", choices.stops)
    skip = SpeculativeConfig("layer_skip", length, mask=mask.format(), stop=stop)
    siblings = trial.suggest_int("siblings", 0, choices.siblings) if choices.siblings else 0
    if siblings:
        probability = trial.suggest_float("sibling_probability", *LEAST_PROBABILITY, log=True)
        skip = replace(skip, siblings=siblings, least_probability=probability)
    if choices.bridge_store is None:
        return skip
    bridge = str(trial.suggest_categorical("bridge", tuple(choices.bridges)))
    rank = int(trial.suggest_categorical("bridge_rank", tuple(choices.ranks))) if bridge in RANKED else 0
    width = int(trial.suggest_categorical("bridge_width", tuple(choices.widths))) if bridge == "mlp" else 0
    tokens = int(trial.suggest_categorical("draft_head", tuple(choices.draft_heads)))
    store = choices.bridge_store
    return replace(skip, bridge=store.bridge(mask, BridgeSpec(bridge, rank, tokens, width)), draft_head=store.head(tokens))


def skip_params(choices: Choices, config: SpeculativeConfig) -> Params:
    """Return the choices that lead to a self-draft."""
    mask = SkipMask.parse(config.mask, choices.layers)
    found: Params = {f"attention_{i}": int(mask.attention[i]) for i in choices.skippable}
    found |= {f"mlp_{i}": int(mask.mlp[i]) for i in choices.skippable}
    found |= {"skip_length": config.draft_length} | stop_params(config.stop, "skip")
    if choices.siblings:
        found["siblings"] = config.siblings
    if config.siblings:
        found["sibling_probability"] = config.least_probability
    if choices.bridge_store is not None:
        bridge_spec = choices.bridge_store.bridge_spec(config)
        found |= {"bridge": bridge_spec.bridge, "draft_head": bridge_spec.tokens}
        if bridge_spec.bridge in RANKED:
            found["bridge_rank"] = bridge_spec.rank
        if bridge_spec.bridge == "mlp":
            found["bridge_width"] = bridge_spec.width
    return found


def skip_starts(choices: Choices, masks: Iterable[str]) -> list[SpeculativeConfig]:
    """Return self-drafts of some masks, with a draft length and a stop rule that suit most models."""
    stop = StopRule("adaptive", 0.6) if "adaptive" in choices.stops else StopRule(choices.stops[0])
    (length,) = clip((4, choices.skip_length))
    return [SpeculativeConfig("layer_skip", length, mask=mask, stop=stop) for mask in masks]


def structured_masks(choices: Choices) -> Iterable[str]:
    """Yield early single skips, early contiguous runs, and masks of every third or fourth sub-layer."""
    bits, count = choices.skippable, len(choices.skippable)
    early = bits[count // 6]
    yield f"attention:{early}"
    yield f"mlp:{bits[count // 4]}"
    for length in sorted({max(1, round(choices.layers * share)) for share in (0.1, 0.25, 0.4)}):
        yield f"layers:{early}-{min(early + length, bits[-1] + 1) - 1}"
    yield "attention:" + ",".join(map(str, bits[1::3] or bits[:1]))
    yield "layers:" + ",".join(map(str, bits[2::4] or bits[:1]))


def _available(choices: Choices) -> bool:
    if not choices.skippable:
        raise InputError(f"space.protect_first, space.protect_last: leave none of {choices.layers} layers to skip")
    return True


register(SearchedKind("layer_skip", suggest_skip, skip_params, available=_available))
