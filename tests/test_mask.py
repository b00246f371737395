"""Masks: parsing, canonical text form, rescaling and refusals."""

from __future__ import annotations

import itertools

import pytest

from layerskip.mask import MaskError, SkipMask, normalise

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

MALFORMED = [
    "attention", "attention 3", "heads:3", "attention:", "attention:x", "attention:-1", "attention:1-", "layers:9-4",
    "layers:1-2-3", "mlp:1.5", "mlp:1,,2", "layers:4-99999999", ":3", "attention:1|mlp:2",
]  # fmt: skip


@pytest.mark.parametrize(("text", "attention", "mlp", "canonical"), READINGS)
def test_a_text_names_sublayers_and_has_one_canonical_form(
    text: str, attention: set[int], mlp: set[int], canonical: str
) -> None:
    mask = SkipMask.parse(text, 10)
    assert {i for i, skipped in enumerate(mask.attention) if skipped} == attention
    assert {i for i, skipped in enumerate(mask.mlp) if skipped} == mlp
    assert (mask.layers, mask.is_whole_layers) == (10, attention == mlp)
    assert mask.format() == normalise(text) == canonical


def test_text_round_trips_and_distinguishes_masks() -> None:
    flags = [tuple(itertools.product((False, True), repeat=layers)) for layers in (1, 2, 5)]
    masks = {SkipMask(*pair) for some in flags for pair in itertools.product(some, repeat=2)}
    assert all(SkipMask.parse(mask.format(), mask.layers) == mask for mask in masks)
    assert len({(mask.layers, mask.format()) for mask in masks}) == len(masks)


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(MaskError, match="^mask: "):
        SkipMask.parse(text, 10)


def test_layers_and_flags_that_fit_no_model_are_refused() -> None:
    for text, named in ("attention:2,10", "attention layer 10"), ("mlp:8-12", "mlp layer 10"):
        with pytest.raises(MaskError, match=f"^mask: .*{named}.*0 to 9"):
            SkipMask.parse(text, 10)
    with pytest.raises(MaskError, match="^mask: .*out of range"):
        SkipMask.of(3, {-1}, set())
    with pytest.raises(MaskError, match="2 attention flags, but 1 MLP"):
        SkipMask((True, False), (True,))
