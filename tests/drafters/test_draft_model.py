"""Drafting with another model: the contract, padded vocabularies, its own cache, and its configuration."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from layerskip.config import ConfigError, SpeculativeConfig, StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter, NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.registry import build_drafter
from layerskip.models.architecture import UnsupportedModel
from layerskip.models.draft_head import DraftHead
from layerskip.models.loading import load_target
from layerskip.models.skip_view import shared_copy
from layerskip.models.target import Target, TargetError
from tests.accelerator import DEVICE
from tests.drafters.bridges import max_tokens
from tests.drafters.contract import FAMILIES, GREEDY, LENGTH, PROMPTS, SAMPLINGS, contract, target_of
from tests.families import build


def noisy_copy(target: Target, noise: float = 0.06) -> PreTrainedModel:
    """Returns a model that often, but not always, agrees with the target: its weights with noise."""
    model = copy.deepcopy(target.model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model


def _resized(model: PreTrainedModel, vocabulary: int) -> PreTrainedModel:
    """Returns the same model with its vocabulary padded or cut to another width."""
    old = model.config.vocab_size
    fields = model.config.to_diff_dict() | {"vocab_size": vocabulary}
    other = type(model)(type(model.config)(**fields)).eval().to(DEVICE)
    weights = model.state_dict()
    for name, ours in other.state_dict().items():
        shared = min(old, vocabulary) if ours.shape != weights[name].shape else ours.shape[0]
        ours[:shared] = weights[name][:shared]
    return other


TestNoisyTarget = contract(lambda target: DraftModel(noisy_copy(target), target.layers, 3, StopRule()), samplings=SAMPLINGS)


def _few_tokens(target: Target) -> Drafter:
    model = noisy_copy(target)
    head = DraftHead(model, torch.tensor(max_tokens(target)), target.vocabulary)
    view = shared_copy(model)
    head.restrict(view)
    return DraftModel(view, target.layers, 3, StopRule(), head)


TestNoisyTargetOfFewTokens = contract(_few_tokens, samplings=SAMPLINGS[1:2])


def _padded(target: Target) -> Drafter:
    """A wider output, whose extra tokens are likely ones for the draft and unknown to the target."""
    torch.manual_seed(2)
    model = _resized(noisy_copy(target), target.vocabulary + 6)
    # It falls as soon as anything was accepted, so that no run of prompts leaves drafts of one token only.
    return DraftModel(model, target.layers, 4, StopRule("adaptive", 0.3, 0.0, step=0.5, threshold_decay=0.5))


TestPaddedVocabulary = contract(_padded, keeps_state=True, samplings=SAMPLINGS[1:2])
# Without the target's last token, which the target outputs and the draft model cannot read.
TestNarrowVocabulary = contract(
    lambda target: DraftModel(_resized(noisy_copy(target), target.vocabulary - 1), target.layers, 3, StopRule()),
    samplings=SAMPLINGS[:1],
)


@FAMILIES
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(0.8, repetition_penalty=1.3)], ids=str)
def test_the_target_as_its_own_draft_model_is_always_accepted(family: str, sampling: Sampling) -> None:
    """After full acceptance the model's cache lacks a token; a mistake there would make some draft be rejected."""
    target = target_of(family)
    drafter = DraftModel(target.model, target.layers, 3, StopRule())
    for prompt in PROMPTS:
        result = decode(target, drafter, prompt, sampling, LENGTH, seed=0)
        assert [round.accepted for round in result.stats.rounds] == [3, 3, 3, 3, 3, 2]
        assert result.stats.acceptance_rate == 1.0


def test_a_limited_number_of_positions_ends_drafting_but_not_decoding() -> None:
    """The positions end within one prompt's output, and before another prompt does."""
    target = Target(build("gpt2", vocab_size=12))
    fields = target.model.config.to_diff_dict() | {"n_positions": 20}
    short = type(target.model)(type(target.model.config)(**fields)).eval().to(DEVICE)
    weights = target.model.state_dict()
    with torch.no_grad():
        for name, ours in short.state_dict().items():
            ours.copy_(weights[name][: len(ours)])
    drafter = DraftModel(short, target.layers, 3, StopRule())
    for prompt in (PROMPTS[0][:5], [*PROMPTS[0][:5]] * 5):
        expected = decode(target, NoDraft(), prompt, GREEDY, LENGTH)
        result = decode(target, drafter, prompt, GREEDY, LENGTH)
        assert result.tokens == expected.tokens
        reached, drafted = len(prompt) + 1, []
        for found in result.stats.rounds:
            drafted.append((reached, found.drafted))
            reached += found.committed
        assert all(count == 0 for length, count in drafted if length > 20)
        assert any(count > 0 for length, count in drafted) == (len(prompt) < 20)


def _saved(folder: Path, family: str, words: int, **changes: int) -> str:
    """Returns the folder of a tiny model and a tokenizer with that many words."""
    model = build(family, vocab_size=16, **changes)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(words)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return str(folder)


def _config(draft: str) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict({"method": "draft_model", "draft_model": draft, "num_speculative_tokens": 2})


def test_a_configured_draft_model_is_loaded_once(tmp_path: Path) -> None:
    target = load_target(_saved(tmp_path / "target", "llama", 14), dtype="float32", device=DEVICE)
    draft = _saved(tmp_path / "draft", "gpt2", 14, num_hidden_layers=2)
    prompt = [3, 5, 7]
    ids = torch.tensor([prompt], device=DEVICE)
    expected = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    drafters = [build_drafter(_config(draft), target) for _ in range(2)]
    assert drafters[0].model is drafters[1].model
    result = decode(target, drafters[0], prompt, GREEDY, 12)
    assert prompt + result.tokens == expected[0].tolist()
    assert result.stats.rounds[0].drafted == 2


def test_a_draft_model_that_cannot_draft_is_refused(tmp_path: Path) -> None:
    target = load_target(_saved(tmp_path / "target", "llama", 14), dtype="float32", device=DEVICE)
    with pytest.raises(TargetError, match="^draft_model: .*tokenizer"):
        build_drafter(_config(_saved(tmp_path / "other", "llama", 13)), target)
    with pytest.raises(UnsupportedModel, match="^draft_model: MambaForCausalLM: .*rewind"):
        build_drafter(_config(_saved(tmp_path / "recurrent", "mamba", 14)), target)
    with pytest.raises(TargetError, match="^draft_model: .*no folder"):
        build_drafter(_config(str(tmp_path / "nothing")), target)
    with pytest.raises(ConfigError, match="^draft_model: "):
        SpeculativeConfig(method="draft_model")
