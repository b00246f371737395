"""Tests the store of hidden states: its contents, recovery after a kill, and its budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layerskip import UnsupportedModel
from layerskip.config import ConfigError
from layerskip.heads import feature_store
from layerskip.heads.feature_store import FeatureStore, check_readout, read_features
from layerskip.models.target import Target
from layerskip.texts.training_texts import TrainingText
from tests.drafters.contract import target_of
from tests.families import build

TARGET = target_of("llama")
TEXTS = [TrainingText((3, 4, 5, 6, 7), 2), TrainingText((5, 4, 3), 1), TrainingText((8, 9, 10, 11), 3)]


def test_stored_features_are_the_models_hidden_states_and_a_damaged_text_is_refused(tmp_path: Path) -> None:
    states = TARGET.model(input_ids=torch.tensor([TEXTS[1].tokens]), output_hidden_states=True).hidden_states
    expected = states[-1][0]
    assert torch.allclose(read_features(TARGET, TEXTS[1].tokens), expected, atol=1e-5)
    (tmp_path / ".000002.safetensors.partial").write_bytes(b"a text that was being written")
    for _ in range(2):  # read, then found
        store = FeatureStore(tmp_path, TARGET)
        store.fill(TEXTS, 10**6)
        assert store.texts == TEXTS
        assert (store[1].tokens.tolist(), store[1].begin) == ([5, 4, 3], 1)
        assert torch.equal(store[1].features, expected.to(torch.bfloat16))
    for content in (b"{", b""):
        (tmp_path / "000001.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=r"^features: .*000001\.safetensors is damaged; delete [^\n]*$"):
            store.fill(TEXTS, 10**6)


def test_a_larger_budget_reads_more_texts_and_a_smaller_one_hides_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, width = [], 32 * 2  # bytes of a token's states
    monkeypatch.setattr(feature_store, "read_features", lambda *given: read.append(given[1]) or read_features(*given))
    for budget, known in ((8 * width, 2), (12 * width - 1, 2), (12 * width, 3), (5 * width, 1), (10**6, 3)):
        store = FeatureStore(tmp_path, TARGET)
        store.fill(TEXTS, budget)
        assert len(store.texts) == known
    assert read == [text.tokens for text in TEXTS]
    with pytest.raises(ConfigError, match=rf"^features: {tmp_path} holds hidden states of other texts"):
        store.fill(TEXTS[1:], 10**6)


def test_a_family_whose_logits_are_not_its_output_layers_is_refused() -> None:
    for family in ("llama", "gemma2", "granite", "qwen2"):
        check_readout(Target(build(family)))
    check_readout(Target(build("hyperclovax")))
    for odd in (build("hyperclovax", logits_scaling=3.0), build("modernbert-decoder")):
        with pytest.raises(UnsupportedModel, match=f"^{type(odd).__name__}: no head can be trained"):
            check_readout(Target(odd))
