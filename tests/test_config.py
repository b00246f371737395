"""Configurations: conversion to and from plain values, and refusals that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from layerskip.config import ConfigError, SpeculativeConfig, StopRule

_LOOKUP = {
    "method": "prompt_lookup",
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
    "match": "first",
    "num_speculative_tokens": 10,
}
CONFIGS: list[dict[str, Any]] = [
    {"method": "none"},
    {"method": "layer_skip", "mask": "attention:6-9;mlp:2", "num_speculative_tokens": 4, "stop": {"method": "length"}},
    {"method": "layer_skip", "mask": "", "num_speculative_tokens": 1, "stop": {"method": "threshold", "threshold": 0.25}},
    {
        "method": "draft_model",
        "draft_model": "some/model",
        "num_speculative_tokens": 8,
        "stop": {
            "method": "adaptive", "threshold": 0.5, "target_acceptance": 0.8, "step": 0.02, "acceptance_decay": 0.4,
            "threshold_decay": 0.7, "carry": False,
        },
    },
    _LOOKUP,
    {"method": "retrieval", "datastore": "d", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 3,
     "tree_tokens": 6, "min_token_prob": 0.1},
    {
        "method": "layer_skip",
        "mask": "mlp:2",
        "num_speculative_tokens": 2,
        "stop": {"method": "length"},
        "siblings": 3,
        "min_token_prob": 0.2,
    },
    {"method": "lookahead", "num_speculative_tokens": 3, "window": 2, "guess_set_size": 2},
    {"method": "token_recycling", "num_speculative_tokens": 3, "tree_tokens": 6, "top_k": 2, "min_token_prob": 0.1},
    {
        "method": "cascade",
        "members": [
            _LOOKUP,
            {"method": "layer_skip", "mask": "mlp:2", "num_speculative_tokens": 4, "stop": {"method": "length"}},
        ],
        "verify_cost": [1.5, 1.75],
        "draft_cost": [0.0, 0.5],
    },
    {
        "method": "cascade",
        "members": [
            _LOOKUP,
            {"method": "layer_skip", "mask": "mlp:3", "num_speculative_tokens": 4, "stop": {"method": "length"}},
        ],
        "verify_cost": [[256, [1.5, 1.75]], [8192, [1.25, 1.5]]],
        "draft_cost": [[256, [0.0, 0.5]], [8192, [0.0, 0.25]]],
    },
]  # fmt: skip

LAYER_SKIP = {"method": "layer_skip"}
LOOKUP = {"method": "prompt_lookup"}
RECYCLING = {"method": "token_recycling"}
DRAFT_MODEL = {"method": "draft_model", "draft_model": "d"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "hydra"}, "method"),
    ({"method": ""}, "method"),
    ({"method": None}, "method"),
    ({"method": ["none"]}, "method"),
    ({"method": {}}, "method"),
    ({"colour": 1}, "colour"),
    (LAYER_SKIP | {"masks": "layers:1"}, "masks"),
    ({"method": "none", "num_speculative_tokens": 4}, "num_speculative_tokens"),
    (LAYER_SKIP | {"prompt_lookup_min": 1}, "prompt_lookup_min"),
    (LAYER_SKIP | {"draft_model": "d"}, "draft_model"),
    (LOOKUP | {"mask": ""}, "mask"),
    (LOOKUP | {"stop": {"method": "length"}}, "stop"),
    (DRAFT_MODEL | {"match": "last"}, "match"),
    (LAYER_SKIP | {"num_speculative_tokens": 0}, "num_speculative_tokens"),
    (LAYER_SKIP | {"num_speculative_tokens": -3}, "num_speculative_tokens"),
    (LAYER_SKIP | {"num_speculative_tokens": 2.0}, "num_speculative_tokens"),
    (LAYER_SKIP | {"num_speculative_tokens": True}, "num_speculative_tokens"),
    (LAYER_SKIP | {"num_speculative_tokens": "4"}, "num_speculative_tokens"),
    (LAYER_SKIP | {"num_speculative_tokens": None}, "num_speculative_tokens"),
    (LAYER_SKIP | {"mask": "heads:3"}, "mask"),
    (LAYER_SKIP | {"mask": 3}, "mask"),
    (LAYER_SKIP | {"mask": None}, "mask"),
    (LAYER_SKIP | {"stop": "never"}, "stop.method"),
    (LAYER_SKIP | {"stop": 0.5}, "stop"),
    (LAYER_SKIP | {"stop": None}, "stop"),
    (LAYER_SKIP | {"stop": {"method": "never"}}, "stop.method"),
    (LAYER_SKIP | {"stop": {"method": ["length"]}}, "stop.method"),
    (LAYER_SKIP | {"stop": {"method": "length", "threshold": 0.6}}, "stop.threshold"),
    (LAYER_SKIP | {"stop": {"method": "threshold", "step": 0.01}}, "stop.step"),
    (LAYER_SKIP | {"stop": {"method": "threshold", "patience": 2}}, "stop.patience"),
    (LAYER_SKIP | {"stop": {"method": "threshold", "threshold": 1.5}}, "stop.threshold"),
    (LAYER_SKIP | {"stop": {"method": "threshold", "threshold": float("nan")}}, "stop.threshold"),
    (LAYER_SKIP | {"stop": {"method": "threshold", "threshold": True}}, "stop.threshold"),
    (LAYER_SKIP | {"stop": {"method": "adaptive", "target_acceptance": -0.1}}, "stop.target_acceptance"),
    (LAYER_SKIP | {"stop": {"method": "adaptive", "step": 2}}, "stop.step"),
    (LAYER_SKIP | {"stop": {"method": "adaptive", "acceptance_decay": "0.5"}}, "stop.acceptance_decay"),
    (LAYER_SKIP | {"stop": {"method": "adaptive", "threshold_decay": 1.01}}, "stop.threshold_decay"),
    (LAYER_SKIP | {"stop": {"method": "adaptive", "carry": 1}}, "stop.carry"),
    (LOOKUP | {"prompt_lookup_min": 0}, "prompt_lookup_min"),
    (LOOKUP | {"prompt_lookup_max": 1.5}, "prompt_lookup_max"),
    (LOOKUP | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_max"),
    (LOOKUP | {"match": "longest"}, "match"),
    ({"method": "draft_model"}, "draft_model"),
    ({"method": "cross_tokenizer"}, "draft_model"),
    ({"method": "eagle"}, "head"),
    ({"method": "medusa"}, "head"),
    ({"method": "medusa", "head": "m", "stop": "length"}, "stop"),
    ({"method": "eagle", "head": "e", "stop": {"method": "threshold", "threshold": 0.5}}, "stop"),
    ({"method": "eagle", "head": "e", "top_k": 1, "tree_tokens": 9}, "tree_tokens"),
    (DRAFT_MODEL | {"draft_model": ""}, "draft_model"),
    (DRAFT_MODEL | {"draft_model": 7}, "draft_model"),
    (RECYCLING | {"tree_tokens": 0}, "tree_tokens"),
    (RECYCLING | {"top_k": 1.0}, "top_k"),
    (RECYCLING | {"min_token_prob": 1.2}, "min_token_prob"),
    (RECYCLING | {"stop": "length"}, "stop"),
    ({"method": "cascade"}, "members"),
    ({"method": "cascade", "members": [LOOKUP]}, "members"),
    ({"method": "cascade", "members": "prompt_lookup"}, "members"),
    ({"method": "cascade", "members": [LOOKUP, {"method": "none"}]}, "members"),
    ({"method": "cascade", "members": [LOOKUP, {"method": "layer_skip", "mask": "heads:3"}]}, "members.1.mask"),
    ({"method": "cascade", "members": [LOOKUP, 3]}, "members.1.config"),
    (LOOKUP | {"members": [LOOKUP, LOOKUP]}, "members"),
    (LOOKUP | {"verify_cost": [1.5]}, "verify_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": 1.5}, "verify_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [1.5, 0.0]}, "verify_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": ["high"]}, "verify_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [[8, [1.5]], [8, [1.5]]]}, "verify_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [[8, [1.5]], [9, [1.5, 2.0]]]}, "verify_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [[8, [1.5]], 1.5]}, "verify_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [[8, 1.5], [9, 1.5]]}, "verify_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [[0.5, [1.5]]]}, "verify_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [[8, [0.0]]]}, "verify_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [1.5], "draft_cost": [[8, [0.5]]]}, "draft_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "draft_cost": [0.0, 0.5]}, "draft_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [1.5], "draft_cost": [0.5]}, "draft_cost"),
    ({"method": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [1.5], "draft_cost": [0.0, -0.5]}, "draft_cost"),
]

FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"method": "none", "num_speculative_tokens": 5}, "num_speculative_tokens"),
    ({"method": "none", "mask": "layers:1"}, "mask"),
    ({"method": "layer_skip", "match": "first"}, "match"),
    ({"method": "layer_skip", "draft_model": "d"}, "draft_model"),
    ({"method": "prompt_lookup", "stop": StopRule(method="threshold")}, "stop"),
    ({"method": "draft_model", "draft_model": "d", "prompt_lookup_max": 4}, "prompt_lookup_max"),
]


@pytest.mark.parametrize("fields", CONFIGS, ids=lambda fields: fields["method"])
def test_plain_values_round_trip_through_json(fields: dict[str, Any]) -> None:
    config = SpeculativeConfig.from_dict(fields)
    assert config.to_dict() == fields
    assert SpeculativeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_missing_fields_have_their_defaults() -> None:
    assert SpeculativeConfig.from_dict({}) == SpeculativeConfig() == SpeculativeConfig(method="none")
    lookup = SpeculativeConfig.from_dict({"method": "prompt_lookup", "prompt_lookup_max": 2})
    assert lookup == SpeculativeConfig(method="prompt_lookup", prompt_lookup_max=2)


def test_configurations_that_decode_alike_are_equal_and_have_equal_hashes() -> None:
    texts = ("layers:1-2;mlp:4", "attention:2,1;mlp:4,1-2", " mlp:4 ;layers:1,2 ")
    assert len({SpeculativeConfig.from_dict({"method": "layer_skip", "mask": text}) for text in texts}) == 1
    others = [SpeculativeConfig.from_dict(fields) for fields in CONFIGS]
    assert len(set(others)) == len(CONFIGS)


def test_a_stop_rule_can_be_given_by_name() -> None:
    named = SpeculativeConfig.from_dict({"method": "layer_skip", "stop": "adaptive"})
    assert named == SpeculativeConfig(method="layer_skip", stop=StopRule(method="adaptive"))


@pytest.mark.parametrize(("fields", "name"), REFUSED, ids=str)
def test_invalid_configurations_are_refused_by_field(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        SpeculativeConfig.from_dict(fields)
    assert str(refusal.value).startswith(f"{name}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("fields", "name"), FOREIGN, ids=str)
def test_the_constructor_refuses_fields_of_another_method(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: .*{fields['method']}"):
        SpeculativeConfig(**fields)


@pytest.mark.parametrize(
    ("rule", "name"), [({"threshold": 0.3}, "threshold"), ({"method": "threshold", "step": 0.5}, "step")], ids=str
)
def test_a_stop_rule_refuses_fields_that_it_does_not_read(rule: dict[str, Any], name: str) -> None:
    """Otherwise two equal rules would differ, and to_dict would lose the difference."""
    with pytest.raises(ConfigError, match=f"^stop.{name}: "):
        StopRule(**rule)


@pytest.mark.parametrize("fields", [None, 3, "none", ["method"]], ids=str)
def test_values_other_than_tables_are_refused(fields: Any) -> None:
    with pytest.raises(ConfigError, match="^config: "):
        SpeculativeConfig.from_dict(fields)


@pytest.mark.parametrize("stop", [{"method": "length"}, 0.5, None])
def test_the_constructor_requires_a_stop_rule(stop: Any) -> None:
    with pytest.raises(ConfigError, match="^stop: "):
        SpeculativeConfig(method="layer_skip", stop=stop)


def test_labels_distinguish_configurations() -> None:
    labels = [SpeculativeConfig.from_dict(fields).label() for fields in CONFIGS]
    assert len(set(labels)) == len(labels)
    assert labels[0] == "no drafting"
    assert all(part in labels[1] for part in ("layer skip", "attention:6-9;mlp:2", "4"))
