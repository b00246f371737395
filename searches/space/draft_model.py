"""Choice of a draft model by a trial, with the target's tokenizer or another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import optuna

from layerskip import SpeculativeConfig
from searches.space.choices import Choices, Params, clip
from searches.space.registry import SearchedKind, register
from searches.space.shared_parameters import stop_params, suggest_stop

_PREFIXES = {"draft_model": "", "cross_tokenizer": "cross_"}


def _suggest(kind: str, choices: Choices, trial: optuna.trial.BaseTrial) -> SpeculativeConfig:
    prefix = _PREFIXES[kind]
    draft = str(trial.suggest_categorical(f"{prefix}draft", tuple(choices.models[kind])))
    length = trial.suggest_int(f"{prefix}model_length", *choices.model_length)
    stop = suggest_stop(trial, f"{prefix}model", choices.stops)
    found = SpeculativeConfig(kind, length, draft=draft, stop=stop)
    if choices.bridge_store is None:
        return found
    tokens = int(trial.suggest_categorical(f"{prefix}model_draft_head", tuple(choices.draft_heads)))
    store = choices.bridge_store
    return replace(found, draft_head=store.head(tokens) if kind == "draft_model" else store.draft_model_head(draft, tokens))


def _params(kind: str, choices: Choices, config: SpeculativeConfig) -> Params:
    prefix = _PREFIXES[kind]
    found: Params = {f"{prefix}draft": config.draft, f"{prefix}model_length": config.draft_length}
    found |= stop_params(config.stop, f"{prefix}model")
    if choices.bridge_store is not None:
        found[f"{prefix}model_draft_head"] = choices.bridge_store.bridge_spec(config).tokens
    return found


def _starts(kind: str, choices: Choices) -> Sequence[SpeculativeConfig]:
    (length,) = clip((4, choices.model_length))
    return [SpeculativeConfig(kind, length, draft=draft) for draft in choices.models[kind]]


def _available(kind: str, choices: Choices) -> bool:
    return bool(choices.models[kind])


for _kind in _PREFIXES:
    register(
        SearchedKind(
            _kind, partial(_suggest, _kind), partial(_params, _kind), partial(_starts, _kind), partial(_available, _kind)
        )
    )
