"""Configurations: conversion to and from plain values, and refusals that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from layerskip.config import ConfigError, SpeculativeConfig, StopRule

LAYER_SKIP = {"method": "layer_skip"}
LOOKUP = {"method": "prompt_lookup"}
RECYCLING = {"method": "token_recycling"}
DRAFT_MODEL = {"method": "draft_model", "draft_model": "d"}
CASCADE = {"method": "cascade", "members": [LOOKUP, RECYCLING]}

_LENGTH = {"num_speculative_tokens": 4, "stop": {"method": "length"}}
_MEMBERS = [
    LOOKUP | {"prompt_lookup_min": 2, "prompt_lookup_max": 5, "match": "first", "num_speculative_tokens": 10},
    LAYER_SKIP | _LENGTH | {"mask": "mlp:2", "draft_window": 256, "siblings": 0},
]
CONFIGS: list[dict[str, Any]] = [
    {"method": "none"},
    LAYER_SKIP | _LENGTH | {"mask": "attention:6-9;mlp:2", "draft_window": 0, "siblings": 2},
    LAYER_SKIP
    | {"mask": "", "num_speculative_tokens": 1, "stop": {"method": "threshold", "threshold": 0.25}, "draft_window": 512}
    | {"siblings": 0},
    {"method": "quantized", "weights": "int4;mlp:3=int8"} | _LENGTH | {"draft_window": 0, "siblings": 1},
    DRAFT_MODEL | {"num_speculative_tokens": 8, "stop": {"method": "adaptive", "threshold": 0.5}},
    *_MEMBERS,
    {"method": "retrieval", "datastore": "d", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 3,
     "tree_tokens": 6, "min_token_prob": 0.1},
    {"method": "lookahead", "num_speculative_tokens": 3, "window": 2, "guess_set_size": 2},
    RECYCLING | {"num_speculative_tokens": 3, "tree_tokens": 6, "top_k": 2, "min_token_prob": 0.1},
    {"method": "cascade", "members": _MEMBERS, "verify_cost": [1.5, 1.75], "draft_cost": [0.0, 0.5]},
]  # fmt: skip

REFUSED: list[tuple[Any, str]] = [
    *(({"method": method}, "method") for method in ("hydra", "", None, ["none"])),
    ({"colour": 1}, "colour"),
    (LAYER_SKIP | {"masks": "layers:1"}, "masks"),
    (LOOKUP | {"mask": ""}, "mask"),
    (LOOKUP | {"stop": {"method": "length"}}, "stop"),
    (LOOKUP | {"members": [LOOKUP, LOOKUP]}, "members"),
    (LOOKUP | {"verify_cost": [1.5]}, "verify_cost"),
    *((LAYER_SKIP | {"num_speculative_tokens": n}, "num_speculative_tokens") for n in (0, 2.0, True, "4", None)),
    *((LAYER_SKIP | {"mask": mask}, "mask") for mask in ("heads:3", 3, None)),
    *((LAYER_SKIP | {"draft_window": size}, "draft_window") for size in (-1, 2.5, None)),
    *((LAYER_SKIP | {"stop": stop}, "stop") for stop in (0.5, None)),
    *((LAYER_SKIP | {"stop": stop}, "stop.method") for stop in ("never", {"method": ["length"]})),
    (LAYER_SKIP | {"stop": {"method": "length", "threshold": 0.6}}, "stop.threshold"),
    (LAYER_SKIP | {"stop": {"method": "threshold", "patience": 2}}, "stop.patience"),
    *(
        (LAYER_SKIP | {"stop": {"method": "threshold", "threshold": value}}, "stop.threshold")
        for value in (1.5, "0.5", float("nan"), True)
    ),
    (LOOKUP | {"prompt_lookup_min": 0}, "prompt_lookup_min"),
    (LOOKUP | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_max"),
    (LOOKUP | {"match": "longest"}, "match"),
    *(({"method": method}, "draft_model") for method in ("draft_model", "cross_tokenizer")),
    *((DRAFT_MODEL | {"draft_model": name}, "draft_model") for name in ("", 7)),
    ({"method": "eagle"}, "head"),
    ({"method": "eagle", "head": "e", "stop": {"method": "threshold", "threshold": 0.5}}, "stop"),
    ({"method": "eagle", "head": "e", "top_k": 1, "tree_tokens": 9}, "tree_tokens"),
    (RECYCLING | {"min_token_prob": 1.2}, "min_token_prob"),
    ({"method": "cascade"}, "members"),
    *((CASCADE | {"members": members}, "members") for members in ([LOOKUP], "prompt_lookup", [LOOKUP, {"method": "none"}])),
    (CASCADE | {"members": [LOOKUP, LAYER_SKIP | {"mask": "heads:3"}]}, "members.1.mask"),
    (CASCADE | {"members": [LOOKUP, 3]}, "members.1.config"),
    *((CASCADE | {"verify_cost": cost}, "verify_cost") for cost in (1.5, [1.5, 0.0], ["high"], [[8, [1.5]]])),
    (CASCADE | {"draft_cost": [0.0, 0.5]}, "draft_cost"),
    *((CASCADE | {"verify_cost": [1.5], "draft_cost": cost}, "draft_cost") for cost in ([0.5], [0.0, -0.5])),
    (LAYER_SKIP | {"accept": {"method": "threshold", "threshold": 0.3}, "lossless": False}, "accept"),
    (CASCADE | {"members": [LOOKUP, LAYER_SKIP | {"accept": "threshold"}]}, "members.1.accept"),
    ([{"method": "none"}], "config"),
]  # fmt: skip

# What a constructor refuses: fields of other methods, which two equal configurations would differ in, and other types.
CONSTRUCTED: list[tuple[type, dict[str, Any], str]] = [
    (SpeculativeConfig, {"method": "none", "num_speculative_tokens": 5}, "num_speculative_tokens: .*none"),
    (SpeculativeConfig, LAYER_SKIP | {"draft_model": "d"}, "draft_model: .*layer_skip"),
    (SpeculativeConfig, LOOKUP | {"stop": StopRule(method="threshold")}, "stop: .*prompt_lookup"),
    (SpeculativeConfig, LAYER_SKIP | {"stop": {"method": "length"}}, "stop: "),
    (StopRule, {"threshold": 0.3}, "stop.threshold: "),
]


@pytest.mark.parametrize("fields", CONFIGS, ids=lambda fields: fields["method"])
def test_plain_values_round_trip_through_json(fields: dict[str, Any]) -> None:
    config = SpeculativeConfig.from_dict(fields)
    assert config.to_dict() == fields
    assert SpeculativeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_missing_fields_have_their_defaults_and_a_stop_rule_may_be_a_name() -> None:
    assert SpeculativeConfig.from_dict({}) == SpeculativeConfig() == SpeculativeConfig(method="none")
    lookup = SpeculativeConfig.from_dict({"method": "prompt_lookup", "prompt_lookup_max": 2})
    assert lookup == SpeculativeConfig(method="prompt_lookup", prompt_lookup_max=2)
    named = SpeculativeConfig.from_dict({"method": "layer_skip", "stop": "adaptive"})
    assert named == SpeculativeConfig(method="layer_skip", stop=StopRule(method="adaptive"))
    for rule in ("exact", {"method": "exact"}):  # of earlier versions
        assert SpeculativeConfig.from_dict(LOOKUP | {"accept": rule}) == SpeculativeConfig.from_dict(LOOKUP)


def test_configurations_that_decode_alike_are_equal_and_others_have_other_hashes_and_labels() -> None:
    texts = ("layers:1-2;mlp:4", "attention:2,1;mlp:4,1-2", " mlp:4 ;layers:1,2 ")
    assert len({SpeculativeConfig.from_dict({"method": "layer_skip", "mask": text}) for text in texts}) == 1
    others = [SpeculativeConfig.from_dict(fields) for fields in CONFIGS]
    labels = [config.label() for config in others]
    assert len(set(others)) == len(set(labels)) == len(CONFIGS)
    assert labels[0] == "no drafting"
    assert all(part in labels[1] for part in ("layer skip", "attention:6-9;mlp:2", "4"))


@pytest.mark.parametrize(("fields", "name"), REFUSED, ids=str)
def test_invalid_configurations_are_refused_by_field(fields: Any, name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        SpeculativeConfig.from_dict(fields)
    assert str(refusal.value).startswith(f"{name}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("made", "fields", "message"), CONSTRUCTED)
def test_a_constructor_refuses_what_it_does_not_read(made: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        made(**fields)
