"""A profile recovers the costs of all parts by a clock that counts them, adds up to its formula, and times drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from torch import Tensor, nn

from layerskip import DraftPlan, Sampling, SpeculativeConfig, StopRule, Target
from layerskip.costs import profile as profiling
from layerskip.costs import timing
from layerskip.costs.cost_model import CostProfile, in_steps
from layerskip.costs.profile import profile_costs
from layerskip.costs.timing import time_drafting, time_verification
from layerskip.decoding.decode import Stops, decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context
from layerskip.drafters import layer_skip
from layerskip.drafters.layer_skip import LayerSkip
from layerskip.models import skip_view as skip_views
from layerskip.models.architecture import architecture
from layerskip.models.skip_view import skip_view
from layerskip.scan.replay import Counts, count
from tests.drafters.members import Member
from tests.families import build

LONGEST = 4
WINDOWS = ("sliding_attention", "sliding_attention", "full_attention")
VOCABULARY = 100  # no layer but the output layer is as wide
PASS, TOKEN, ROW = 7.0, 0.02, 0.5  # of the output layer: fixed, per token of the vocabulary, per row
BLOCK, ROUND, CONFIDENCE = 1.0, 4.0, 0.25
FULL, KEYS = ("full_attention",), 0.5


class Clock:
    """A clock that advances by the costs of the parts that run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self.seconds = monkeypatch, 0.0
        monkeypatch.setattr(timing, "now", lambda device: self.seconds)

    def charge(self, holder: Any, name: str, price: Callable[..., float]) -> None:
        """Make every call of a function advance the clock by ``price`` of its arguments."""
        original = getattr(holder, name)

        def charged(*args: Any, **kwargs: Any) -> Any:
            self.seconds += price(*args)
            return original(*args, **kwargs)

        self._monkeypatch.setattr(holder, name, charged)


def _priced(clock: Clock, family: str, attention: tuple[float, ...], mlp: tuple[float, ...], **changes: Any) -> Target:
    """Return a target whose parts have known costs.

    A view copies a sub-layer with its price, and uses the charged forward of its class. A skipped sub-layer has another
    forward, which is not charged.
    """
    model = build(family, vocab_size=VOCABULARY, **changes)
    found = architecture(model)
    classes = set()
    for index, block in enumerate(found.blocks):
        layer = model.get_submodule(f"{found.path}.{index}")
        parts = layer, layer.get_submodule(block.attention[0]), layer.get_submodule(block.mlp[0])
        for module, price in zip(parts, (BLOCK, attention[index], mlp[index]), strict=True):
            module.price = price
            classes.add(type(module))
    for each in classes:
        clock.charge(each, "forward", lambda module, *_: getattr(module, "price", 0.0) * getattr(module, "share", 1.0))
    share = lambda layer: getattr(layer, "share", 1.0)  # noqa: E731
    clock.charge(nn.Linear, "forward", lambda layer, rows: share(layer) * _output_price(layer.out_features, rows))
    for module in (profiling, layer_skip):
        clock.charge(module, "draft_chain", lambda *_: ROUND)
    clock.charge(profiling, "confidence", lambda _: CONFIDENCE)
    return Target(model, pack_weights=False)  # packed layers would bypass the charged forward


def _output_price(width: int, rows: Tensor) -> float:
    return PASS + TOKEN * width + ROW * rows.shape[-2] if width == VOCABULARY else 0.0


@pytest.mark.parametrize(
    ("family", "attention", "mlp", "changes"),
    [
        ("llama", (3.0,) * 4, (5.0,) * 4, {}),
        ("gemma3_text", (3.0, 3.0, 4.5, 3.0), (5.0,) * 4, {"layer_types": WINDOWS}),
        ("deepseek_v3", (3.0,) * 4, (6.0, 5.0, 5.0, 5.0), {}),  # a dense MLP before mixtures of experts
    ],
    ids=["alike", "two attentions", "two MLPs"],
)
def test_a_profile_recovers_the_cost_of_every_part(
    family: str,
    attention: tuple[float, ...],
    mlp: tuple[float, ...],
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = _priced(Clock(monkeypatch), family, attention, mlp, **changes)
    plain = len(attention) * BLOCK + sum(attention) + sum(mlp) + PASS + TOKEN * VOCABULARY
    expected = CostProfile(
        context=12,
        head_seconds=PASS + TOKEN * VOCABULARY + ROW,
        block_seconds=BLOCK,
        attention_seconds=attention,
        mlp_seconds=mlp,
        confidence_seconds=CONFIDENCE,
        round_seconds=ROUND,
        verify_seconds=tuple(plain + ROW * (1 + drafted) for drafted in range(LONGEST + 1)),
    )
    found = profile_costs(target, expected.context, LONGEST, repeats=1)
    for name, value in asdict(expected).items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-8), name


@pytest.mark.parametrize("text", ["int4", "int8", "int4;head=keep", "int4;layers:0=skip;attention:2=int8;mlp:3=keep"])
def test_a_profile_recovers_the_costs_of_formats(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format takes its own share of the time of an attention, an MLP and the output layer."""
    target = _priced(Clock(monkeypatch), "llama", (3.0,) * 4, (5.0,) * 4)
    shares = {0: (1.0,) * 3, 8: (0.9, 0.7, 0.6), 4: (0.8, 0.5, 0.3)}

    def read_at(tree: Any, bits: int) -> None:
        for module in tree.modules():  # of a sub-layer, of the output layer, or of the whole model
            part = {3.0: 1, 5.0: 2}.get(getattr(module, "price", 0.0), 0)
            module.share = shares[bits][part] if part or getattr(module, "out_features", 0) == VOCABULARY else 1.0

    monkeypatch.setattr(skip_views, "read_at", read_at)
    monkeypatch.setattr(skip_views, "refuse_quantized", lambda model: "")
    profile = profile_costs(target, 12, LONGEST, repeats=1, formats=("int4", "int8"))
    assert profile == CostProfile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert profile.shares == {"int4": pytest.approx(shares[4]), "int8": pytest.approx(shares[8])}
    plan = DraftPlan.parse(text, 4)
    seconds = shares[plan.head_bits][0] * profile.head_seconds
    for layer in range(4):
        seconds += 0 if plan.attention[layer] and plan.mlp[layer] else BLOCK
        seconds += 0 if plan.attention[layer] else 3.0 * shares[plan.attention_bits[layer]][1]
        seconds += 0 if plan.mlp[layer] else 5.0 * shares[plan.mlp_bits[layer]][2]
    assert profile.draft_seconds(plan) == pytest.approx(seconds)


def test_predicted_seconds_of_counts_equal_the_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts are longer than the timed ones."""
    clock = Clock(monkeypatch)
    target = _priced(clock, "llama", (3.0,) * 4, (5.0,) * 4)
    profile, mask = profile_costs(target, 12, 6, repeats=1), DraftPlan.parse("mlp:1", target.layers)
    drafter = LayerSkip(skip_view(target.model, mask), 6, StopRule())
    began: list[float] = []
    stops = Stops(frozenset())
    found = decode(target, drafter, [5, 6, 7], Sampling(), 40, stops=stops, callback=lambda _: began.append(clock.seconds))
    assert profile.seconds(count(found.stats.rounds), mask, StopRule()) == pytest.approx(clock.seconds - began[0])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_chains_are_timed(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    target = _priced(clock, "llama", (3.0,) * 4, (5.0,) * 4)
    step = 4 * (BLOCK + 3.0 + 5.0) + PASS + TOKEN * VOCABULARY + ROW
    seconds = time_verification(target, 12, 5, sampling, repeats=2)
    assert seconds == pytest.approx([step + ROW * count for count in range(6)])
    assert in_steps(seconds) == pytest.approx([1 + ROW * count / step for count in range(1, 6)], abs=0.005)


LOOKUP = SpeculativeConfig("prompt_lookup")
SKIP = SpeculativeConfig("layer_skip", 3, mask="layers:1")


@pytest.fixture
def passes() -> list[Any]:
    """The passes that the clock counts."""
    return []


@pytest.fixture
def target(passes: list[Any], monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target whose passes, and those of its views, are counted."""
    model = build("llama", 1, vocab_size=VOCABULARY).cpu()  # on a GPU captured passes run without the model
    model.get_input_embeddings().register_forward_pre_hook(lambda *given: passes.append(given))
    monkeypatch.setattr(timing, "now", lambda device: float(len(passes)))
    return Target(model, None, "toy")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_a_token_of_a_chain_costs_one_pass(target: Target, sampling: Sampling) -> None:
    """One pass is also the cost of a step. The draft length has no effect."""
    assert time_drafting(target, LOOKUP, 9) == 0.0
    for length in (1, 3, 20):
        config = SpeculativeConfig("layer_skip", length, mask="layers:1")
        assert time_drafting(target, config, 9, sampling) == 1.0


class _Trees(Member):
    """Drafts a tree of three levels with six passes, and nothing after more tokens than it can read."""

    def __init__(self, passes: list[Any], maximum: int, at_once: bool) -> None:
        super().__init__()
        self._passes, self._most, self.single_pass = passes, maximum, at_once

    def draft(self, context: Context, limit: int) -> Draft:
        if len(context.tokens) > self._most:
            return Draft.empty(context.last.device)
        self._passes += [None] * 6
        return Draft.of_tree([1, 2, 3, 4], [-1, 0, 1, -1], context.last.device)


@pytest.mark.parametrize(("at_once", "cost"), [(False, 2.0), (True, 6.0)])
@pytest.mark.parametrize("maximum", [1000, 100, 0])
def test_the_cost_of_a_tree_is_that_of_a_level(
    at_once: bool, cost: float, maximum: int, target: Target, passes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "build_drafter", lambda config, target: _Trees(passes, maximum, at_once))
    assert time_drafting(target, SKIP, 300) == (cost if maximum else 0.0)


PROFILE = CostProfile(10, 1.0, 0.5, (2.0, 3.0), (4.0, 5.0), 0.25, 0.5, (20.0, 21.0, 24.0))


@pytest.mark.parametrize(
    ("mask", "seconds"),
    [("", 16.0), ("attention:0", 14.0), ("mlp:1", 11.0), ("layers:0", 9.5), ("layers:0-1", 1.0)],
)
def test_a_draft_pass_costs_what_it_keeps(mask: str, seconds: float) -> None:
    assert PROFILE.draft_seconds(DraftPlan.parse(mask, 2)) == seconds


def test_seconds_follow_from_counts() -> None:
    counts = Counts(tokens=7, verified=(1, 1, 2))
    mask = DraftPlan.parse("layers:0", 2)
    assert PROFILE.seconds(counts, mask, StopRule()) == pytest.approx(5 * 9.5 + 3 * 0.5 + 20 + 21 + 2 * 24)
    assert PROFILE.seconds(counts, mask, StopRule("threshold", 0.5)) == pytest.approx(5 * 9.75 + 3 * 0.5 + 20 + 21 + 2 * 24)
    assert PROFILE.speedup(counts, mask, StopRule()) == pytest.approx(7 * 20 / (5 * 9.5 + 1.5 + 89))
    with pytest.raises(ValueError, match="verified"):
        PROFILE.seconds(Counts(1, (0, 0, 0, 1)), mask, StopRule())
    assert PROFILE.lookup_speedup(counts) == pytest.approx(7 * 20 / 89)
    assert CostProfile.from_dict(json.loads(json.dumps(PROFILE.to_dict()))) == PROFILE


def test_a_step_that_was_disturbed_gives_costs_of_at_least_one() -> None:
    assert in_steps([1.4, 0.1, 1.5, 2.8]) == (1.0, 1.07, 2.0)
