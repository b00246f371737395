"""Tests fitted bridges against transformers' hidden states and real drafts, and the choice of the ridge constant."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerskip.bridges.bridge import Bridge, Bridges, BridgeShape
from layerskip.bridges.fit import Calibration, _regress
from layerskip.bridges.ridge import regress
from layerskip.mask import Gap, SkipMask
from layerskip.models.skip_view import skip_view
from layerskip.models.target import Target
from tests.accelerator import DEVICE
from tests.drafters.bridges import bridge_shape, drawn_continuations
from tests.families import build

FAMILIES = ("llama", "qwen2", "gemma3_text", "phi", "mixtral")


@pytest.mark.parametrize("kind", ["mean", "linear"])
def test_the_first_gap_is_fitted_to_the_targets_own_states(kind: str) -> None:
    """The reference is least squares on the states of transformers' own pass, because no drift precedes the first gap."""
    target = Target(build("llama"))
    continuations = drawn_continuations(target)
    fit = Calibration(target, continuations, 2**24).fit(bridge_shape(target, "layers:1-2", kind))
    before, after = [], []
    for continuation in continuations:
        tokens = torch.tensor([[*continuation.prompt, *continuation.tokens]], device=DEVICE)
        with torch.no_grad():
            states = target.model(input_ids=tokens, output_hidden_states=True).hidden_states
        here = slice(len(continuation.prompt), tokens.shape[1] - 1)
        before.append(states[1][0, here])
        after.append(states[3][0, here])
    # The last fifth of the rows is held out.
    rows = len(torch.cat(before)) - int(0.2 * len(torch.cat(before)))
    before = [torch.cat(before)[:rows]]
    read, wanted = torch.cat(before).double(), torch.cat(after)[:rows].double() - torch.cat(before).double()
    bridge = fit.bridges.of(Gap("layers", 1, 2))
    if kind == "mean":
        assert torch.allclose(bridge.bias.double(), wanted.mean(0), atol=1e-4)
        return
    found = _least_squares(read, wanted, fit.ridges["layers_1_2"])
    with torch.no_grad():
        given = bridge(torch.cat(before)).double()
    assert torch.allclose(given, found, atol=1e-4)


def _least_squares(read: torch.Tensor, wanted: torch.Tensor, ridge: float, learnt: int | None = None) -> torch.Tensor:
    """A ridge regression on the first rows as ordinary least squares, with additional rows of the root of its constant."""
    read, wanted = read.cpu(), wanted.cpu()
    read = read / read.square().mean(-1, keepdim=True).sqrt()
    rows, middle = slice(learnt), wanted[:learnt].mean(0)
    scaled = ((read - read[rows].mean(0)) / read[rows].std(0)).numpy()
    padded = np.concatenate([scaled[rows], np.sqrt(ridge * len(scaled[rows])) * np.eye(scaled.shape[1])])
    padded_wanted = np.concatenate([(wanted[rows] - middle).numpy(), np.zeros((scaled.shape[1], wanted.shape[1]))])
    return (torch.from_numpy(scaled @ np.linalg.lstsq(padded, padded_wanted, rcond=None)[0]) + middle).to(DEVICE)


def _record(model: torch.nn.Module, gap: Gap) -> dict[str, torch.Tensor]:
    """Records the last token's state before a sub-layer of a Llama, what the sub-layer reads, and the state after it."""
    layers, found = model.model.layers, dict[str, torch.Tensor]()
    norms = [layers[gap.first].input_layernorm, layers[gap.first].post_attention_layernorm]
    norms = norms if gap.kind == "attention" else [norms[1], layers[gap.first + 1].input_layernorm]
    norms[0].register_forward_hook(lambda _, given, out: found.update(before=given[0][0, -1], read=out[0, -1]))
    norms[1].register_forward_hook(lambda _, given, out: found.update(after=given[0][0, -1]))
    return found


def test_gaps_are_fitted_to_the_drafts_own_states() -> None:
    """The reference is recorded in real drafts of one token, in which earlier gaps have their bridges."""
    target = Target(build("llama", num_hidden_layers=6))
    continuations = drawn_continuations(target)
    fit = Calibration(target, continuations, 2**24).fit(bridge_shape(target, "layers:1-2;attention:3;mlp:4"))
    gaps = [Gap("layers", 1, 2), Gap("attention", 3, 3), Gap("mlp", 4, 4)]
    starts = [(continuation, s) for continuation in continuations for s in range(continuation.starts)]
    starts = starts[: len(starts) - int(0.2 * len(starts))]  # the others are held out
    for gap, earlier in ((gaps[1], "layers:1-2"), (gaps[2], "layers:1-2;attention:3")):
        bridges = Bridges(bridge_shape(target, earlier)).to(DEVICE)
        for before, bridge in bridges.items():
            bridge.load_state_dict(fit.bridges.of(before).state_dict())
        view = skip_view(target.model, SkipMask.parse(earlier, target.layers), bridges)
        draft, own = _record(view, gap), _record(target.model, gap)
        reads, wants = [], []
        for continuation, s in starts:
            tokens = torch.tensor([[*continuation.prompt, *continuation.tokens[: s + 1]]], device=DEVICE)
            with torch.no_grad():
                cache = target.model(input_ids=tokens[:, :-1], use_cache=True).past_key_values
                view(input_ids=tokens[:, -1:], past_key_values=cache)
                target.model(input_ids=tokens, use_cache=False)
            reads.append(draft["read"])
            # Makes the draft's state equal the target's after the sub-layer, which also corrects the drift before it.
            wants.append(own["after"] - draft["before"])
        read, wanted = torch.stack(reads), torch.stack(wants)
        found = _least_squares(read.double(), wanted.double(), fit.ridges[gap.name])
        with torch.no_grad():
            assert torch.allclose(fit.bridges.of(gap)(read).double(), found, atol=1e-4), gap


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mask", ["attention:1;mlp:2", "layers:1;attention:3"])
def test_the_agreement_of_a_fit_is_that_of_real_drafts(family: str, mask: str) -> None:
    """The reference is a draft of one token after each held-out prefix."""
    target = Target(build(family))
    continuations = drawn_continuations(target)
    found = Calibration(target, continuations, 2**24, max_rows=11).fit(bridge_shape(target, mask))
    last = [(p, s) for p, continuation in enumerate(continuations) for s in range(continuation.starts)][-18:]
    for bridges, agreement in ((None, found.empty), (found.bridges, found.bridged)):
        view, right = skip_view(target.model, SkipMask.parse(mask, target.layers), bridges), 0
        for p, s in last:
            tokens = torch.tensor([[*continuations[p].prompt, *continuations[p].tokens[: s + 1]]], device=DEVICE)
            with torch.no_grad():
                cache = target.model(input_ids=tokens[:, :-1], use_cache=True).past_key_values
                drafted = view(input_ids=tokens[:, -1:], past_key_values=cache).logits[0, -1].argmax()
            right += int(drafted) == continuations[p].tokens[s + 1]
        assert agreement == right / len(last)


HIDDEN, ROWS = 8, 60
SHAPE = BridgeShape("layers:1-2", 4, HIDDEN, "linear")
CONSTANTS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def _drawn(noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with a root mean square of 1, and outputs of an affine map with noise."""
    source = np.random.default_rng(0)
    read = source.standard_normal((ROWS, HIDDEN))
    read /= np.sqrt((read**2).mean(-1, keepdims=True))
    wanted = read @ source.standard_normal((HIDDEN, HIDDEN)) + 0.5 + noise * source.standard_normal((ROWS, HIDDEN))
    return torch.from_numpy(read).float(), torch.from_numpy(wanted).float()


@pytest.mark.parametrize("noise", [0.0, 1.0, 4.0, 20.0])
def test_the_constant_with_the_smallest_validation_error_is_chosen(noise: float) -> None:
    read, wanted = _drawn(noise)
    with torch.no_grad():
        chosen = regress(Bridge(SHAPE), read, wanted)
    learnt = ROWS - ROWS // 5  # the last fifth of the rows is held out
    fits = {c: _least_squares(read.double(), wanted.double(), c, learnt) for c in CONSTANTS}
    errors = {c: float((fit - wanted)[learnt:].square().mean()) for c, fit in fits.items()}
    assert chosen == min(errors, key=lambda c: errors[c])
    if noise == 0.0:
        assert chosen == CONSTANTS[0]
    if noise == 20.0:
        assert chosen == CONSTANTS[-1]


def test_outliers_are_left_out() -> None:
    read, wanted = _drawn(0.1)
    far = wanted.clone()
    far[7] *= 1000.0
    near = torch.arange(ROWS) != 7
    with torch.no_grad():
        _regress(found := Bridge(SHAPE), [(read[None], far[None])], ROWS)
        regress(expected := Bridge(SHAPE), read[near], wanted[near])
    for name, value in expected.state_dict().items():
        assert torch.allclose(found.state_dict()[name], value, atol=1e-6), name
