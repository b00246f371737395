"""The comparison of two greedy outputs, against margins computed from the model's own logits."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor

from layerskip import Sampling, Target, load_target
from layerskip.measure.losslessness import Divergence, Losslessness, find_divergence
from tests.accelerator import DEVICE
from tests.reference import processed_scores
from tests.tiny import save_tiny

PROMPT = [4, 77, 74, 81, 84, 5]
LENGTH = 12
POSITION = 7
PLAIN = Sampling()
PENALTY = Sampling(repetition_penalty=1.3)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_tiny(tmp_path_factory.mktemp("lossless") / "model")
    return load_target(str(folder), dtype=request.param, device=DEVICE)


@torch.inference_mode()
def _scores(target: Target, tokens: list[int], sampling: Sampling = PLAIN) -> Tensor:
    """Returns ``[V]``: the model's scores after some tokens, without a cache."""
    return processed_scores(tokens, target.model(torch.tensor([tokens], device=DEVICE)).logits[0, -1], sampling)


def _greedy(target: Target, sampling: Sampling = PLAIN) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(LENGTH):
        tokens.append(int(_scores(target, tokens, sampling).argmax()))
    return tokens[len(PROMPT) :]


def _swapped(tokens: list[int], token: int, position: int = POSITION) -> list[int]:
    """Returns the tokens with another one at ``position``, and other ones after it."""
    return [*tokens[:position], token, *(t + 1 for t in tokens[position + 1 :])]


@pytest.mark.parametrize("sampling", [PLAIN, PENALTY], ids=["plain", "penalty"])
@pytest.mark.parametrize("position", [0, POSITION, LENGTH - 1])
def test_the_margin_is_how_far_the_lower_token_lies_below_the_best(
    target: Target, sampling: Sampling, position: int
) -> None:
    expected = _greedy(target, sampling)
    assert find_divergence(target, "p", PROMPT, expected, expected, sampling) is None
    scores = _scores(target, PROMPT + expected[:position], sampling)
    for token in [*scores.topk(3).indices[1:].tolist(), 0]:
        actual = _swapped(expected, token, position)
        found = find_divergence(target, "p", PROMPT, expected, actual, sampling)
        assert found is not None
        assert (found.prompt_id, found.position) == ("p", position)
        slack = 3 * torch.finfo(target.model.dtype).eps * float(scores.abs().max())
        assert found.margin == pytest.approx(float(scores.max() - scores[token]), abs=slack)
        if target.dtype == "float32" or found.margin > 3 * slack:  # rounding explains 4 steps, and slack is 3
            assert not found.near_tie
        assert find_divergence(target, "p", PROMPT, actual, expected, sampling) == found


@pytest.mark.parametrize("steps", [0, 2, 32])
def test_rounding_explains_a_small_margin_in_half_precision_only(target: Target, steps: int) -> None:
    """A token is made to tie with the best one, or to lie some steps of the dtype below it; rounding explains four."""
    best, eps = _greedy(target)[0], torch.finfo(target.model.dtype).eps
    close = Target(copy.deepcopy(target.model))
    head = close.model.get_output_embeddings().weight
    with torch.no_grad():
        head[0] = head[best] * (1 - steps * eps)
    scores = _scores(close, PROMPT)
    found = find_divergence(close, "p", PROMPT, [best, 9, 9], [0, 8], PLAIN)
    assert found is not None
    assert steps / 2 <= found.margin / (eps * float(scores.abs().max())) <= 2 * steps
    near = target.dtype != "float32" and steps < 4
    assert (found.near_tie, Losslessness(1, (found,)).verdict) == (near, "near_tie" if near else "different")


def test_an_output_that_ends_early_is_different(target: Target) -> None:
    for one, other in (([7, 8, 9], [7, 8]), ([7, 8], [7, 8, 9])):
        found = find_divergence(target, "p", PROMPT, one, other, PLAIN)
        assert found is not None
        assert (found.position, Losslessness(1, (found,)).verdict) == (2, "different")
        json.dumps(Losslessness(1, (found,)).to_dict(), allow_nan=False)


NEAR = Divergence("a", 3, 0.05, 0.1)
FAR = Divergence("b", 4, 0.5, 0.1)


def test_results_of_several_measurements_join() -> None:
    joined = Losslessness.join([Losslessness(2, (NEAR,)), Losslessness(0), Losslessness(3, (FAR, NEAR))])
    figures = {"compared": 5, "near_ties": 2, "different": 1, "largest_margin": 0.5, "tolerance": FAR.tolerance}
    assert joined.to_dict() == {"verdict": "different", "basis": "measured outputs"} | figures
    assert (Losslessness.join([]).verdict, Losslessness(3, (NEAR,)).verdict) == ("unchecked", "near_tie")
    assert Losslessness(3, (NEAR, FAR)).verdict == Losslessness(1, (Divergence("c", 0, 0.0, 0.0),)).verdict == "different"
    assert Losslessness(4).verdict == "exact"
    assert Losslessness(4).to_dict()["largest_margin"] == 0.0


def test_a_near_tie_of_another_decoder_is_judged_by_its_own_rounding() -> None:
    tie = Losslessness(2, (Divergence("a", 3, 0.3, 0.0, largest_logit=16.0),))  # four steps of bfloat16 at 16 are 0.5
    verdicts = [tie.judged_in(dtype).verdict for dtype in (torch.bfloat16, torch.float16)]
    assert (tie.verdict, *verdicts) == ("different", "near_tie", "different")
    assert tie.judged_in(torch.bfloat16).to_dict()["tolerance"] == 0.5
    half = Losslessness(1, (Divergence("a", 3, 0.3, 0.4, largest_logit=16.0),))  # this library's own rounding stays
    assert half.judged_in(torch.float32).verdict == "near_tie"
