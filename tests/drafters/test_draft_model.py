"""Drafting with another model: the contract, padded vocabularies, its own cache, and its configuration."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.registry import build_drafter
from layerskip.models.architecture import UnsupportedModel
from layerskip.models.target import Target, TargetError
from tests.accelerator import DEVICE
from tests.drafters.contract import GREEDY, LENGTH, PROMPTS, contract, generated, target_of
from tests.drafters.members import member_of
from tests.tiny import save_tiny


def noisy_copy(target: Target, noise: float = 0.06) -> PreTrainedModel:
    """Returns a model that often, but not always, agrees with the target: its weights with noise."""
    model = copy.deepcopy(target.model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model


def respelled(model: PreTrainedModel, rows: list[int]) -> PreTrainedModel:
    """Returns the same model over another vocabulary: token i has the weights of token ``rows[i]`` of the old one."""
    torch.manual_seed(3)
    old = model.config.vocab_size
    fields = model.config.to_diff_dict() | {"vocab_size": len(rows), "eos_token_id": None}
    other = type(model)(type(model.config)(**fields)).eval().to(DEVICE)
    weights = model.state_dict()
    with torch.no_grad():
        for name, ours in other.state_dict().items():
            worded = weights[name].shape[:1] == (old,)
            ours.copy_(weights[name][rows] if worded else weights[name])
            if worded:
                ours[old:] += 0.1 * torch.randn_like(ours[old:])  # two tokens of one row would tie
    return other


def _padded(target: Target) -> Drafter:
    """A wider output, whose extra tokens are likely ones for the draft and unknown to the target."""
    model = respelled(noisy_copy(target), [*range(target.vocabulary), *[0, 1, 2] * 2])
    return DraftModel(model, target.layers, 4, StopRule("threshold", 0.3))


TestPaddedVocabulary = contract(_padded)
# Without the target's last token, which the target outputs and the draft model cannot read.
TestNarrowVocabulary = contract(
    lambda target: DraftModel(respelled(noisy_copy(target), [*range(target.vocabulary - 1)]), target.layers, 3, StopRule()),
    samples_by_default=False,
)


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        ("draft_model", GREEDY),
        ("draft_model", Sampling(0.8, top_k=4, repetition_penalty=1.3)),
        ("cross_tokenizer", GREEDY),  # it leaves out penalties and draws nothing
    ],
)
def test_the_target_as_its_own_draft_model_is_always_accepted(method: str, sampling: Sampling) -> None:
    """After full acceptance the model's cache lacks a token; a mistake there would make some draft be rejected."""
    target = target_of("gemma3_text")
    drafter = member_of(method, target)
    for prompt in PROMPTS:
        result = decode(target, drafter, prompt, sampling, LENGTH, seed=0)
        assert [round.accepted for round in result.stats.rounds] == [3, 3, 3, 3, 3, 2]
        assert result.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("method", ["draft_model", "cross_tokenizer"])
def test_a_limited_number_of_positions_ends_drafting_but_not_decoding(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positions end within one prompt's output, and before another prompt does."""
    target, most = target_of("llama"), 20
    monkeypatch.setattr("layerskip.drafters.chain.max_positions", lambda _: most)
    for prompt in (PROMPTS[1], PROMPTS[1] * 2):
        result, length, drafted = decode(target, member_of(method, target), prompt, GREEDY, LENGTH), len(prompt) + 1, 0
        assert result.tokens == generated("llama", prompt, LENGTH)
        for found in result.stats.rounds:
            assert not found.drafted or length <= most
            drafted += found.drafted
            length += found.committed
        assert bool(drafted) == (len(prompt) < most)


def test_a_model_that_cannot_draft_is_refused_by_field(tiny_target: Target, tmp_path: Path) -> None:
    words = save_tiny(tmp_path / "swapped") / "tokenizer.json"  # a tokenizer as large, of other words
    content = json.loads(words.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    words.write_text(json.dumps(content))
    save_tiny(tmp_path / "recurrent", "mamba")
    for name, error, reason in (
        ("swapped", TargetError, ".*tokenizer"),
        ("recurrent", UnsupportedModel, "MambaForCausalLM: .*rewind"),
        ("nothing", TargetError, "there is no folder .*nothing$"),
    ):
        with pytest.raises(error, match=f"^draft_model: {reason}"):
            build_drafter(SpeculativeConfig("draft_model", draft_model=str(tmp_path / name)), tiny_target)
