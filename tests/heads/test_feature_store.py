"""Tests the store of hidden states: its contents, recovery after a kill, and its budget."""

from __future__ import annotations

from collections import namedtuple
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
MODULES = ("model.layers.1", "model")


def test_stored_features_are_the_models_hidden_states(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, MODULES)
    store.fill(TARGET, TEXTS, 10**6)
    assert len(store) == 3
    assert store.positions(len(store)) == 3 + 2 + 1
    states = TARGET.model(input_ids=torch.tensor([TEXTS[1].tokens]), output_hidden_states=True).hidden_states
    expected = torch.cat((states[2][0], states[-1][0]), -1)
    assert torch.allclose(read_features(TARGET, TEXTS[1].tokens, MODULES), expected, atol=1e-5)
    for found in (store[1], FeatureStore(tmp_path, MODULES)[1]):
        assert found.tokens.tolist() == [5, 4, 3]
        assert found.begin == 1
        assert torch.equal(found.features, expected.to(torch.bfloat16))


def test_texts_of_an_earlier_run_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FeatureStore(tmp_path, MODULES).fill(TARGET, TEXTS[:2], 10**6)
    (tmp_path / "000002.safetensors.partial").write_bytes(b"a text that was being written")
    store = FeatureStore(tmp_path, MODULES)
    assert len(store) == 2
    read: list[tuple[int, ...]] = []

    def record(target: Target, tokens: tuple[int, ...], modules: tuple[str, ...]) -> torch.Tensor:
        read.append(tokens)
        return read_features(target, tokens, modules)

    monkeypatch.setattr(feature_store, "read_features", record)
    store.fill(TARGET, TEXTS, 10**6)
    assert read == [TEXTS[2].tokens]
    assert torch.equal(FeatureStore(tmp_path, MODULES)[2].features, store[2].features)
    (tmp_path / "000001.safetensors").write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"^features: .*000001\.safetensors is damaged; delete [^\n]*$"):
        FeatureStore(tmp_path, MODULES)


def test_the_store_stops_at_its_budget(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, MODULES)
    store.fill(TARGET, TEXTS, 2 * 64 * 8)
    assert len(store) == 2
    assert store.nbytes == 2 * 64 * 8


def test_a_budget_larger_than_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 9 * 10**8, 10**8))
    store = FeatureStore(tmp_path, MODULES)
    with pytest.raises(ConfigError, match="^feature_bytes: 100,000,000 do not fit"):
        store.fill(TARGET, TEXTS, 10**8)
    assert not len(store)


def test_a_smaller_budget_hides_texts_and_keeps_them_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call with a larger budget does not read them again."""
    FeatureStore(tmp_path, MODULES).fill(TARGET, TEXTS, 10**6)
    whole = FeatureStore(tmp_path, MODULES)
    monkeypatch.setattr(feature_store, "read_features", None)
    few = FeatureStore(tmp_path, MODULES)
    few.fill(TARGET, TEXTS, 5 * 64 * 2)
    assert (len(few), few.positions(1), few.nbytes) == (1, 3, 5 * 64 * 2)
    few.fill(TARGET, TEXTS[:2], 10**6)
    assert (len(few), few.positions(2)) == (2, 3 + 2)
    few.fill(TARGET, TEXTS, 10**6)
    assert len(few) == 3 and few.nbytes == whole.nbytes
    assert torch.equal(few[2].features, whole[2].features)
    with pytest.raises(ConfigError, match=rf"^features: {tmp_path} holds hidden states of other texts"):
        few.fill(TARGET, TEXTS[1:], 10**6)


def test_a_family_whose_logits_are_not_its_output_layers_is_refused() -> None:
    for family in ("llama", "gemma2", "granite", "qwen2"):
        check_readout(Target(build(family)))
    check_readout(Target(build("hyperclovax")))
    for odd in (build("hyperclovax", logits_scaling=3.0), build("modernbert-decoder")):
        with pytest.raises(UnsupportedModel, match=f"^{type(odd).__name__}: no head can be trained"):
            check_readout(Target(odd))
