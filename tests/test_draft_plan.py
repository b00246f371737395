"""Draft plans: parsing, canonical text form and refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from layerskip.draft_plan import BITS, DraftPlan, PlanError, normalise_formats, normalise_mask

READINGS = [
    ("attention:6,7-9;mlp:2", {6, 7, 8, 9}, {2}, "attention:6-9;mlp:2"),
    ("mlp:5;layers:1-2;attention:5,7", {1, 2, 5, 7}, {1, 2, 5}, "layers:1-2,5;attention:7"),
    ("attention:3;attention:0", {0, 3}, set(), "attention:0,3"),
    ("attention:1-3,2-4", {1, 2, 3, 4}, set(), "attention:1-4"),
    (" mlp : 1 , 3-3 ;; ", set(), {1, 3}, "mlp:1,3"),
    ("mlp:3;attention:3", {3}, {3}, "layers:3"),
    ("", set(), set(), ""),
    (" ; ", set(), set(), ""),
]

PLANS = [  # with the canonical form for any number of layers, and that for three layers
    ("int4", "int4", "int4"),
    (" int8 ; mlp : 1 ", "int8;mlp:1=skip", "int8;mlp:1=skip"),
    ("int4;head=keep", "int4;head=keep", "int4;head=keep"),
    ("mlp:2=int8; layers:0-1=skip", "layers:0-1=skip;mlp:2=int8", "layers:0-1=skip;mlp:2=int8"),
    ("layers:0-2=int4;head=int8", "layers:0-2=int4;head=int8", "int4;head=int8"),
    ("int8;layers:0=int4;attention:0=int8;mlp:1=keep", "int8;mlp:1=keep;mlp:0=int4", "int8;mlp:1=keep;mlp:0=int4"),
    ("keep;attention:0=keep;mlp:1", "mlp:1", "mlp:1"),
]

MALFORMED = [
    "int3", "head", "head=skip", "layers:1;int4", "mlp:1=", "mlp:1=int2", "int4=3", "head:1=int4",
    "attention", "attention 3", "heads:3", "attention:", "attention:x", "attention:-1", "attention:1-", "layers:9-4",
    "layers:1-2-3", "mlp:1.5", "mlp:1,,2", "layers:4-99999999", ":3", "attention:1|mlp:2",
]  # fmt: skip


@pytest.mark.parametrize(("text", "attention", "mlp", "canonical"), READINGS)
def test_a_text_names_sublayers_and_has_one_canonical_form(
    text: str, attention: set[int], mlp: set[int], canonical: str
) -> None:
    mask = DraftPlan.parse(text, 10)
    assert {i for i, skipped in enumerate(mask.attention) if skipped} == attention
    assert {i for i, skipped in enumerate(mask.mlp) if skipped} == mlp
    assert (mask.layers, mask.is_whole_layers) == (10, attention == mlp)
    assert mask.format() == normalise_mask(text) == canonical


def test_text_round_trips_and_distinguishes_masks() -> None:
    flags = [tuple(itertools.product((False, True), repeat=layers)) for layers in (1, 2, 5)]
    masks = {DraftPlan(*pair) for some in flags for pair in itertools.product(some, repeat=2)}
    assert all(DraftPlan.parse(mask.format(), mask.layers) == mask for mask in masks)
    assert len({(mask.layers, mask.format()) for mask in masks}) == len(masks)


@pytest.mark.parametrize(("text", "canonical", "shortest"), PLANS)
def test_formats_are_part_of_a_plan(text: str, canonical: str, shortest: str) -> None:
    plan = DraftPlan.parse(text, 3)
    assert plan.format() == shortest
    assert plan == DraftPlan.parse(canonical, 3) == DraftPlan.parse(shortest, 3)
    accepts, refuses = (normalise_formats, normalise_mask) if plan.formats else (normalise_mask, normalise_formats)
    assert accepts(text) == canonical
    with pytest.raises(PlanError, match="reads fewer bits" if plan.formats else "reads all bits"):
        refuses(text)


def test_every_plan_of_a_small_model_round_trips() -> None:
    treatments, heads = ("skip", "keep", "int8", "int4"), ("keep", "int8", "int4")
    plans = set()
    for head, *names in itertools.product(heads, *[treatments] * 4):
        plan = replace(DraftPlan.none(2), head_bits=BITS[head])
        for (kind, layer), name in zip(itertools.product(("attention", "mlp"), range(2)), names, strict=True):
            plan = plan.changed(kind, layer, name)
            assert plan.treatment(kind, layer) == name
        assert DraftPlan.parse(plan.format(), 2) == plan
        plans.add(plan)
    assert len(plans) == len({plan.format() for plan in plans}) == 3 * 4**4


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="^cannot read|^'.*' in .* is not a range|^there is no"):
        DraftPlan.parse(text, 10)


def test_layers_and_flags_that_fit_no_model_are_refused() -> None:
    for text, named in ("attention:2,10", "attention layer 10"), ("mlp:8-12", "mlp layer 10"):
        with pytest.raises(PlanError, match=f"^{named}.*0 to 9"):
            DraftPlan.parse(text, 10)
    with pytest.raises(PlanError, match="^attention layer -1 is out of range"):
        DraftPlan.of(3, {-1}, set())
    with pytest.raises(PlanError, match="^1 numbers of bits for 2 attention"):
        DraftPlan((True, False), (True, False), (4,))
    with pytest.raises(PlanError, match="^there is no format of 3 bits"):
        replace(DraftPlan.none(2), head_bits=3)
    with pytest.raises(PlanError, match="2 attention flags, but 1 MLP"):
        DraftPlan((True, False), (True,))
