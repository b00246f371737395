"""Half precision decodes the tokens of transformers up to near-ties; logits that are not finite end decoding by name."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Sampling, SpeculativeConfig, Target, UnsupportedModel, generate, load_target
from layerskip.config import StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Drafter, NoDraft
from layerskip.decoding.verify import verify
from layerskip.device.trial import nearly_equal
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle import Eagle
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.measure.losslessness import find_divergence
from layerskip.models.architecture import architecture
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import NotFinite
from tests.accelerator import DEVICE, decode_static
from tests.chi_square import assert_follows
from tests.drafters.contract import greedy_tokens
from tests.drafters.members import SECONDS, member_of
from tests.families import build
from tests.tiny import save_tiny

PROMPT = [13, 14, 15, 13, 14, 15, 13]
GREEDY = Sampling()
SAMPLINGS = [GREEDY, Sampling(1.0), Sampling(0.8, 5, 0.9, 0.02, 1.2)]
METHODS = ("none", *SECONDS)
NAN, INF = math.nan, math.inf


def _fill_bias(model: PreTrainedModel, tokens: slice, value: float) -> None:
    with torch.no_grad():
        model.get_output_embeddings().bias[tokens] = value  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_token_that_makes_the_logits_nan_ends_decoding(method: str, static: bool) -> None:
    target = Target(build("llama", 3, eos_token_id=None), name="mine")
    drafter = member_of(method, target)  # its self-checks come before the damage
    plain = decode(target, NoDraft(), PROMPT, GREEDY, 16).tokens
    place = next(i for i, token in enumerate(plain) if i > 1 and token not in PROMPT + plain[:i])
    with torch.no_grad():
        target.model.get_input_embeddings().weight[plain[place]] = NAN  # type: ignore[operator]
    streamed: list[int] = []
    with pytest.raises(NotFinite, match="^target: the largest logit of mine is nan after position") as caught:
        decode_static(target, drafter, PROMPT, GREEDY, 16, callback=streamed.extend, static=static)
    assert streamed == plain[: len(streamed)] and len(streamed) <= place + 1
    if method in ("none", "prompt_lookup"):
        assert f"after position {len(PROMPT) + place};" in str(caught.value)
        assert len(streamed) == place + 1
    for sampling in SAMPLINGS:
        with pytest.raises(NotFinite, match=f"position {len(PROMPT)};"):
            decode_static(target, drafter, [*PROMPT, plain[place]], sampling, 4, static=static)


@pytest.mark.parametrize(("tokens", "value"), [(slice(40, 41), NAN), (slice(40, 41), INF), (slice(None), -INF)], ids=str)
def test_logits_are_named_as_what_they_are(tokens: slice, value: float) -> None:
    target = Target(build("phi", eos_token_id=None))
    _fill_bias(target.model, tokens, value)
    for sampling, static in itertools.product(SAMPLINGS, (False, True)):
        with pytest.raises(NotFinite, match=f"is {value} after position {len(PROMPT) - 1};"):
            decode_static(target, NoDraft(), PROMPT, sampling, 4, static=static)
    with pytest.raises(UnsupportedModel, match=f"^PhiForCausalLM: the largest logit after some tokens is {value}; "):
        architecture(target.model)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_without_a_finite_logit_are_never_chosen(method: str) -> None:
    """As those that fill up a vocabulary. No self-check blames the model for them."""
    target = Target(build("phi", eos_token_id=None))
    free = decode(target, NoDraft(), PROMPT, GREEDY, 12).tokens
    _fill_bias(target.model, slice(free[0], free[0] + 1), -INF)
    _fill_bias(target.model, slice(50, None), -INF)
    expected = greedy_tokens(target, PROMPT, max_new_tokens=12)
    drafter = member_of(method, target)
    assert decode(target, drafter, PROMPT, GREEDY, 12).tokens == expected != free
    for sampling in SAMPLINGS[1:]:
        assert not {free[0], *range(50, 64)} & {*decode(target, drafter, PROMPT, sampling, 12, seed=1).tokens}


def _nan_drafter(method: str, target: Target) -> Drafter:
    if method == "draft_model":
        model = build("llama", 2, num_hidden_layers=2)
        drafter: Drafter = DraftModel(decoding_view(model), 2, 3, StopRule("threshold", 0.5))
        damaged: torch.nn.Module = model
    else:
        damaged = EagleHead(EagleShape.of(target)).to(DEVICE).eval()
        siblings = {"eagle": 1, "eagle_tree": 3}[method]
        drafter = Eagle(damaged, target, 3, StopRule(), siblings)
    with torch.no_grad():
        for weight in damaged.parameters():
            weight.fill_(NAN)
    return drafter


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle_tree"])
def test_nan_in_a_drafter_changes_nothing(method: str) -> None:
    target = Target(build("llama", 3, eos_token_id=None))
    results = [decode(target, _nan_drafter(method, target), PROMPT, sampling, 12, seed=0) for sampling in SAMPLINGS]
    assert [len(result.tokens) for result in results] == [12] * 3
    assert results[0].tokens == decode(target, NoDraft(), PROMPT, GREEDY, 12).tokens


def test_a_draft_from_nan_leaves_the_law_of_the_target() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]] * 3)
    draft = Draft(torch.tensor([0, 0]), probs=torch.full((2, 3), NAN))
    generator = torch.Generator().manual_seed(0)
    found = [verify(draft, p, generator).committed[0] for _ in range(4000)]
    assert_follows(found, dict(enumerate(p[0].tolist())))


def test_infinities_are_equal_in_the_same_places_only() -> None:
    reference = torch.tensor([1.0, -INF, 3.0])
    assert nearly_equal(reference + 1e-5, reference)
    for other in ([1.0, 2.0, -INF], [1.0, INF, 3.0], [1.0, -INF, 4.0], [1.0, NAN, 3.0], [NAN, -INF, 3.0], [1.0, 2.0, 3.0]):
        assert not nearly_equal(torch.tensor(other), reference)
        assert not nearly_equal(reference, torch.tensor(other))
    assert not nearly_equal(torch.tensor([NAN]), torch.tensor([NAN]))


LENGTH = 24
PROMPTS = ([7, 8, 9, 7, 8, 9, 7, 8, 10], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51], [200])
CONFIGS: dict[str, dict[str, Any]] = {
    "none": {},
    "prompt_lookup": {"prompt_lookup_min": 1},
    "layer_skip": {"mask": "attention:1;mlp:2", "num_speculative_tokens": 3},
    "token_recycling": {"min_token_prob": 0.0},
    "retrieval": {"min_token_prob": 0.0},
    "lookahead": {"window": 2, "num_speculative_tokens": 2},
    "cascade": {"members": [{"method": "prompt_lookup"}, {"method": "layer_skip", "mask": "layers:1"}]},
}


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("half") / request.param, request.param, idle=[1])


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def target(request: pytest.FixtureRequest, folder: Path) -> Target:
    return load_target(str(folder), dtype=request.param, device=DEVICE)


@pytest.fixture(scope="module")
def expected(target: Target) -> list[list[int]]:
    """The new tokens of transformers' own greedy ``generate`` after each prompt."""
    return [greedy_tokens(target, prompt, max_new_tokens=LENGTH, eos_token_id=None) for prompt in PROMPTS]


@pytest.mark.parametrize("method", CONFIGS)
def test_outputs_differ_at_near_ties_only(target: Target, expected: list[list[int]], method: str) -> None:
    config = SpeculativeConfig.from_dict({"method": method} | CONFIGS[method])
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        found = generate(target, prompt, config, max_new_tokens=LENGTH)
        divergence = find_divergence(target, "p", prompt, tokens, found.tokens, Sampling())
        assert divergence is None or divergence.near_tie
        assert method not in ("layer_skip", "cascade") or found.stats.mean_acceptance_length > 1
