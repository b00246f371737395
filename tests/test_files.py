"""Full disks: one error that names the file, no partial files, and earlier files unchanged."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from layerskip import DraftPlan, Target, save_draft_checkpoint
from layerskip.drafters.retrieval import Datastore
from layerskip.files import atomic_write, read_json, short_name, write_json
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.feature_store import FeatureStore
from layerskip.heads.folders import load_eagle
from layerskip.models.trained_module import save_trained
from layerskip.texts.training_texts import TrainingText
from tests.resources import fill

NUMBERS = torch.zeros(500_000)  # 2 MB
WRITERS: dict[str, Callable[[Path], object]] = {
    "torch": lambda file: torch.save({"a": NUMBERS}, file),
    "safetensors": lambda file: save_file({"a": NUMBERS}, file),
    "numpy": lambda file: np.save(file.open("wb"), NUMBERS.numpy()),
    "python": lambda file: file.write_bytes(bytes(2_000_000)),
}


@pytest.mark.parametrize(("writer", "leave"), [("torch", 0), ("safetensors", 100_000), ("numpy", 0), ("python", 1_000_000)])
def test_a_file_that_does_not_fit_leaves_the_earlier_one(small_disk: Path, writer: str, leave: int) -> None:
    file = small_disk / "folder" / "file"
    with atomic_write(file) as partial:
        partial.write_text("before")
    fill(small_disk, leave)
    with pytest.raises(OSError, match="No space left on device") as refusal, atomic_write(file) as partial:
        WRITERS[writer](partial)
    assert (refusal.value.errno, refusal.value.filename) == (errno.ENOSPC, str(file))
    assert [path.name for path in file.parent.iterdir()] == ["file"]
    assert file.read_text() == "before"


@pytest.mark.parametrize("text", ["", '{"half": '])
def test_a_damaged_file_counts_as_missing(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_json(tmp_path / "file") is None
    (tmp_path / "file").write_text(text, encoding="utf-8")
    assert read_json(tmp_path / "file") is None
    assert f"{tmp_path}/file is damaged" in caplog.text
    write_json(tmp_path / "file", [1])
    assert read_json(tmp_path / "file") == [1]


def test_other_errors_are_not_converted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"), atomic_write(tmp_path / "file"):
        (tmp_path / "nothing").read_text()
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "file", float("nan"))
    assert not list(tmp_path.iterdir())


def test_a_head_that_does_not_fit_leaves_the_earlier_one(small_disk: Path, tiny_target: Target) -> None:
    head, folder = EagleHead(EagleShape.of(tiny_target)), small_disk / "head"
    for leave in (0, 10_000):
        save_trained(folder, head.shape.to_dict(), head.weights(), tiny_target, {})
        fill(small_disk, leave)
        with pytest.raises(OSError, match="No space left on device"):
            save_trained(folder, head.shape.to_dict(), head.weights(), tiny_target, {})
        assert sorted(path.name for path in folder.iterdir()) == ["head.json", "head.safetensors"]
        (small_disk / "ballast").unlink()
        assert load_eagle(folder, tiny_target).shape == head.shape


def test_a_datastore_or_checkpoint_that_does_not_fit_is_removed(small_disk: Path, tiny_target: Target) -> None:
    store = Datastore.build([[7] * 100_000], tiny_target)
    fill(small_disk, 100_000)
    with pytest.raises(OSError, match="No space left on device") as refusal:
        store.save(small_disk / "store")
    assert refusal.value.filename == str(small_disk / "store")
    with pytest.raises(OSError, match="No space left on device"):
        save_draft_checkpoint(tiny_target, DraftPlan.parse("layers:1", 3), small_disk / "draft")
    assert os.listdir(small_disk) == ["ballast"]


def test_hidden_states_that_do_not_fit_lose_only_the_present_text(small_disk: Path, tiny_target: Target) -> None:
    texts = [TrainingText((7,) * size, 1) for size in (5, 2000)]
    store = FeatureStore(small_disk / "store", tiny_target)
    store.fill(texts[:1], 10**6)
    fill(small_disk, 20_000)
    with pytest.raises(OSError, match="No space left on device") as refusal:
        store.fill(texts, 10**6)
    assert refusal.value.filename == str(small_disk / "store" / "000001.safetensors")
    (small_disk / "ballast").unlink()
    assert [path.name for path in (small_disk / "store").iterdir()] == ["000000.safetensors"]
    store.fill(texts, 10**6)
    assert store.texts == texts


def test_a_short_name_has_room_for_more_and_a_long_one_is_written(tmp_path: Path) -> None:
    assert short_name("model") == "model"
    names = [short_name(start + end) for start in ("x" * 250, "ö" * 125, "🗎" * 60) for end in "ab"]
    assert len(set(names)) == 6
    assert max(len(name.encode()) for name in names) <= 200
    long = ["x" * 250, "ö" * 125]
    for name in long:
        write_json(tmp_path / name, 1)
    assert sorted(os.listdir(tmp_path)) == sorted(long)
