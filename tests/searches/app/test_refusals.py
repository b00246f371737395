"""Parts that do not fit a target end studies and benchmarks with one line, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from layerskip import load_target
from layerskip.drafters.datastore import Datastore
from layerskip.heads.eagle import KIND, EagleHead, EagleShape
from layerskip.models.trained_module import save_trained
from tests.accelerator import DEVICE
from tests.drafters.test_cross_tokenizer import _spelling
from tests.searches.conftest import Launch
from tests.searches.programs import QUICK
from tests.tiny import save_tiny, without_tokenizer


def _foreign_head(folder: Path) -> Path:
    other = load_target(str(save_tiny(folder / "other", seed=5)), dtype="float32", device=DEVICE)
    head = EagleHead(EagleShape.of(other))
    save_trained(folder / "head", KIND, head.shape.to_dict(), head.weights(), other, {})
    return folder / "head"


def _damaged_store(folder: Path) -> Path:
    target = load_target(str(save_tiny(folder / "target")), dtype="float32", device=DEVICE)
    Datastore.build([[5, 6, 7, 8]], target).save(folder / "store")
    tokens = folder / "store" / "tokens.npy"
    tokens.write_bytes(tokens.read_bytes()[:-4])
    return folder / "store"


def _empty_store(folder: Path) -> Path:
    (folder / "store").mkdir()
    return folder / "store"


def _bare_draft(folder: Path) -> Path:
    return without_tokenizer(save_tiny(folder / "draft"))


def _greek_draft(folder: Path) -> Path:
    draft = save_tiny(folder / "draft", seed=3)
    _spelling("αβγδ").save_pretrained(draft)
    return draft


@pytest.mark.parametrize(
    ("make", "kind", "field", "message"),
    [
        (_foreign_head, "eagle", "head", "made for another target"),
        (_damaged_store, "retrieval", "datastore", "cannot read"),
        (_empty_store, "retrieval", "datastore", "cannot read"),
        (_bare_draft, "cross_tokenizer", "draft", "has no tokenizer"),
        (_greek_draft, "cross_tokenizer", "draft", "share no token"),
    ],
)
@pytest.mark.parametrize("program", ["layerskip", "benchmark"])
def test_a_part_that_does_not_fit_the_target_is_refused_in_one_line(
    program: str,
    make: Callable[[Path], Path],
    kind: str,
    field: str,
    message: str,
    tiny_folder: Path,
    tmp_path: Path,
    launch: Launch,
) -> None:
    part = make(tmp_path)
    lists = {"eagle": "eagle_heads", "retrieval": "datastores", "cross_tokenizer": "cross_drafts"}
    common = [f"target.path={tiny_folder}", f"outputs={tmp_path / 'outputs'}"]
    if program == "layerskip":
        overrides = [*QUICK, *common, f"space.kinds=[none,{kind}]", f"space.{lists[kind]}=[{part}]"]
    else:
        no_draft = ["contenders.draft_model=null", "peers.transformers_assistant=null"]
        overrides = [*QUICK[:3], *common, "measure.prompts=2", *no_draft, f"contenders.{kind}.{field}={part}"]
    done = launch(program, *overrides, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {field}: ")
    assert message in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("contenders.layer_skip=false", "contenders.layer_skip: False is not a configuration; null leaves the row out"),
        ("+peers.transformers_prompt_lookup.ngram_min=2", "peers.transformers_prompt_lookup.ngram_min: is not one of "),
    ],
)
def test_impossible_rows_of_a_benchmark_are_refused_in_one_line(
    override: str, message: str, tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    done = launch("benchmark", "target=local", f"target.path={tiny_folder}", override, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")
