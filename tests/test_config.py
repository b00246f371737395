"""Configurations: conversion to and from plain values, and refusals that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from layerskip.config import ConfigError, SpeculativeConfig, StopRule

CONFIGS: list[dict[str, Any]] = [
    {"kind": "none"},
    {"kind": "layer_skip", "mask": "attention:6-9;mlp:2", "draft_length": 4, "stop": {"kind": "length"}},
    {"kind": "layer_skip", "mask": "", "draft_length": 1, "stop": {"kind": "threshold", "threshold": 0.25}},
    {
        "kind": "draft_model",
        "draft": "some/model",
        "draft_length": 8,
        "stop": {
            "kind": "adaptive", "threshold": 0.5, "target_acceptance": 0.8, "step": 0.02, "acceptance_decay": 0.4,
            "threshold_decay": 0.7, "carry": False,
        },
    },
    {"kind": "prompt_lookup", "ngram_min": 2, "ngram_max": 5, "match": "first", "draft_length": 10},
    {"kind": "retrieval", "datastore": "d", "ngram_min": 2, "ngram_max": 4, "draft_length": 3, "tree_tokens": 6,
     "least_probability": 0.1},
    {
        "kind": "layer_skip",
        "mask": "mlp:2",
        "draft_length": 2,
        "stop": {"kind": "length"},
        "siblings": 3,
        "least_probability": 0.2,
    },
    {"kind": "lookahead", "draft_length": 3, "window": 2, "candidates": 2},
    {"kind": "token_recycling", "draft_length": 3, "tree_tokens": 6, "candidates": 2, "least_probability": 0.1},
    {
        "kind": "cascade",
        "members": [
            {"kind": "prompt_lookup", "ngram_min": 2, "ngram_max": 5, "match": "first", "draft_length": 10},
            {"kind": "layer_skip", "mask": "mlp:2", "draft_length": 4, "stop": {"kind": "length"}},
        ],
        "verify_cost": [1.5, 1.75],
        "draft_cost": [0.0, 0.5],
    },
    {
        "kind": "cascade",
        "members": [
            {"kind": "prompt_lookup", "ngram_min": 2, "ngram_max": 5, "match": "first", "draft_length": 10},
            {"kind": "layer_skip", "mask": "mlp:3", "draft_length": 4, "stop": {"kind": "length"}},
        ],
        "verify_cost": [[256, [1.5, 1.75]], [8192, [1.25, 1.5]]],
        "draft_cost": [[256, [0.0, 0.5]], [8192, [0.0, 0.25]]],
    },
]  # fmt: skip

LAYER_SKIP = {"kind": "layer_skip"}
LOOKUP = {"kind": "prompt_lookup"}
RECYCLING = {"kind": "token_recycling"}
DRAFT_MODEL = {"kind": "draft_model", "draft": "d"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "hydra"}, "kind"),
    ({"kind": ""}, "kind"),
    ({"kind": None}, "kind"),
    ({"kind": ["none"]}, "kind"),
    ({"kind": {}}, "kind"),
    ({"colour": 1}, "colour"),
    (LAYER_SKIP | {"masks": "layers:1"}, "masks"),
    ({"kind": "none", "draft_length": 4}, "draft_length"),
    (LAYER_SKIP | {"ngram_min": 1}, "ngram_min"),
    (LAYER_SKIP | {"draft": "d"}, "draft"),
    (LOOKUP | {"mask": ""}, "mask"),
    (LOOKUP | {"stop": {"kind": "length"}}, "stop"),
    (DRAFT_MODEL | {"match": "last"}, "match"),
    (LAYER_SKIP | {"draft_length": 0}, "draft_length"),
    (LAYER_SKIP | {"draft_length": -3}, "draft_length"),
    (LAYER_SKIP | {"draft_length": 2.0}, "draft_length"),
    (LAYER_SKIP | {"draft_length": True}, "draft_length"),
    (LAYER_SKIP | {"draft_length": "4"}, "draft_length"),
    (LAYER_SKIP | {"draft_length": None}, "draft_length"),
    (LAYER_SKIP | {"mask": "heads:3"}, "mask"),
    (LAYER_SKIP | {"mask": 3}, "mask"),
    (LAYER_SKIP | {"mask": None}, "mask"),
    (LAYER_SKIP | {"stop": "never"}, "stop.kind"),
    (LAYER_SKIP | {"stop": 0.5}, "stop"),
    (LAYER_SKIP | {"stop": None}, "stop"),
    (LAYER_SKIP | {"stop": {"kind": "never"}}, "stop.kind"),
    (LAYER_SKIP | {"stop": {"kind": ["length"]}}, "stop.kind"),
    (LAYER_SKIP | {"stop": {"kind": "length", "threshold": 0.6}}, "stop.threshold"),
    (LAYER_SKIP | {"stop": {"kind": "threshold", "step": 0.01}}, "stop.step"),
    (LAYER_SKIP | {"stop": {"kind": "threshold", "patience": 2}}, "stop.patience"),
    (LAYER_SKIP | {"stop": {"kind": "threshold", "threshold": 1.5}}, "stop.threshold"),
    (LAYER_SKIP | {"stop": {"kind": "threshold", "threshold": float("nan")}}, "stop.threshold"),
    (LAYER_SKIP | {"stop": {"kind": "threshold", "threshold": True}}, "stop.threshold"),
    (LAYER_SKIP | {"stop": {"kind": "adaptive", "target_acceptance": -0.1}}, "stop.target_acceptance"),
    (LAYER_SKIP | {"stop": {"kind": "adaptive", "step": 2}}, "stop.step"),
    (LAYER_SKIP | {"stop": {"kind": "adaptive", "acceptance_decay": "0.5"}}, "stop.acceptance_decay"),
    (LAYER_SKIP | {"stop": {"kind": "adaptive", "threshold_decay": 1.01}}, "stop.threshold_decay"),
    (LAYER_SKIP | {"stop": {"kind": "adaptive", "carry": 1}}, "stop.carry"),
    (LOOKUP | {"ngram_min": 0}, "ngram_min"),
    (LOOKUP | {"ngram_max": 1.5}, "ngram_max"),
    (LOOKUP | {"ngram_min": 4, "ngram_max": 3}, "ngram_max"),
    (LOOKUP | {"match": "longest"}, "match"),
    ({"kind": "draft_model"}, "draft"),
    ({"kind": "cross_tokenizer"}, "draft"),
    ({"kind": "eagle"}, "head"),
    ({"kind": "medusa"}, "head"),
    ({"kind": "medusa", "head": "m", "stop": "length"}, "stop"),
    ({"kind": "eagle", "head": "e", "stop": {"kind": "threshold", "threshold": 0.5}}, "stop"),
    ({"kind": "eagle", "head": "e", "candidates": 1, "tree_tokens": 9}, "tree_tokens"),
    (DRAFT_MODEL | {"draft": ""}, "draft"),
    (DRAFT_MODEL | {"draft": 7}, "draft"),
    (RECYCLING | {"tree_tokens": 0}, "tree_tokens"),
    (RECYCLING | {"candidates": 1.0}, "candidates"),
    (RECYCLING | {"least_probability": 1.2}, "least_probability"),
    (RECYCLING | {"stop": "length"}, "stop"),
    ({"kind": "cascade"}, "members"),
    ({"kind": "cascade", "members": [LOOKUP]}, "members"),
    ({"kind": "cascade", "members": "prompt_lookup"}, "members"),
    ({"kind": "cascade", "members": [LOOKUP, {"kind": "none"}]}, "members"),
    ({"kind": "cascade", "members": [LOOKUP, {"kind": "layer_skip", "mask": "heads:3"}]}, "members.1.mask"),
    ({"kind": "cascade", "members": [LOOKUP, 3]}, "members.1.config"),
    (LOOKUP | {"members": [LOOKUP, LOOKUP]}, "members"),
    (LOOKUP | {"verify_cost": [1.5]}, "verify_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": 1.5}, "verify_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [1.5, 0.0]}, "verify_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": ["high"]}, "verify_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [[8, [1.5]], [8, [1.5]]]}, "verify_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [[8, [1.5]], [9, [1.5, 2.0]]]}, "verify_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [[8, [1.5]], 1.5]}, "verify_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [[8, 1.5], [9, 1.5]]}, "verify_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [[0.5, [1.5]]]}, "verify_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [[8, [0.0]]]}, "verify_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [1.5], "draft_cost": [[8, [0.5]]]}, "draft_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "draft_cost": [0.0, 0.5]}, "draft_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [1.5], "draft_cost": [0.5]}, "draft_cost"),
    ({"kind": "cascade", "members": [LOOKUP, RECYCLING], "verify_cost": [1.5], "draft_cost": [0.0, -0.5]}, "draft_cost"),
]

FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"kind": "none", "draft_length": 5}, "draft_length"),
    ({"kind": "none", "mask": "layers:1"}, "mask"),
    ({"kind": "layer_skip", "match": "first"}, "match"),
    ({"kind": "layer_skip", "draft": "d"}, "draft"),
    ({"kind": "prompt_lookup", "stop": StopRule(kind="threshold")}, "stop"),
    ({"kind": "draft_model", "draft": "d", "ngram_max": 4}, "ngram_max"),
]


@pytest.mark.parametrize("fields", CONFIGS, ids=lambda fields: fields["kind"])
def test_plain_values_round_trip_through_json(fields: dict[str, Any]) -> None:
    config = SpeculativeConfig.from_dict(fields)
    assert config.to_dict() == fields
    assert SpeculativeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_missing_fields_have_their_defaults() -> None:
    assert SpeculativeConfig.from_dict({}) == SpeculativeConfig() == SpeculativeConfig(kind="none")
    lookup = SpeculativeConfig.from_dict({"kind": "prompt_lookup", "ngram_max": 2})
    assert lookup == SpeculativeConfig(kind="prompt_lookup", ngram_max=2)


def test_configurations_that_decode_alike_are_equal_and_have_equal_hashes() -> None:
    texts = ("layers:1-2;mlp:4", "attention:2,1;mlp:4,1-2", " mlp:4 ;layers:1,2 ")
    assert len({SpeculativeConfig.from_dict({"kind": "layer_skip", "mask": text}) for text in texts}) == 1
    others = [SpeculativeConfig.from_dict(fields) for fields in CONFIGS]
    assert len(set(others)) == len(CONFIGS)


def test_a_stop_rule_can_be_given_by_name() -> None:
    named = SpeculativeConfig.from_dict({"kind": "layer_skip", "stop": "adaptive"})
    assert named == SpeculativeConfig(kind="layer_skip", stop=StopRule(kind="adaptive"))


@pytest.mark.parametrize(("fields", "name"), REFUSED, ids=str)
def test_invalid_configurations_are_refused_by_field(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        SpeculativeConfig.from_dict(fields)
    assert str(refusal.value).startswith(f"{name}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("fields", "name"), FOREIGN, ids=str)
def test_the_constructor_refuses_fields_of_another_kind(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: .*{fields['kind']}"):
        SpeculativeConfig(**fields)


@pytest.mark.parametrize(
    ("rule", "name"), [({"threshold": 0.3}, "threshold"), ({"kind": "threshold", "step": 0.5}, "step")], ids=str
)
def test_a_stop_rule_refuses_fields_that_it_does_not_read(rule: dict[str, Any], name: str) -> None:
    """Otherwise two equal rules would differ, and to_dict would lose the difference."""
    with pytest.raises(ConfigError, match=f"^stop.{name}: "):
        StopRule(**rule)


@pytest.mark.parametrize("fields", [None, 3, "none", ["kind"]], ids=str)
def test_values_other_than_tables_are_refused(fields: Any) -> None:
    with pytest.raises(ConfigError, match="^config: "):
        SpeculativeConfig.from_dict(fields)


@pytest.mark.parametrize("stop", [{"kind": "length"}, 0.5, None])
def test_the_constructor_requires_a_stop_rule(stop: Any) -> None:
    with pytest.raises(ConfigError, match="^stop: "):
        SpeculativeConfig(kind="layer_skip", stop=stop)


def test_labels_distinguish_configurations() -> None:
    labels = [SpeculativeConfig.from_dict(fields).label() for fields in CONFIGS]
    assert len(set(labels)) == len(labels)
    assert labels[0] == "no drafting"
    assert all(part in labels[1] for part in ("layer skip", "attention:6-9;mlp:2", "4"))
