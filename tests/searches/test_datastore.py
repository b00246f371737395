"""The datastore program: a drafter can load its result, and bad input ends with one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from layerskip import PromptSet, SpeculativeConfig, load_target
from layerskip.drafters.registry import build_drafter
from layerskip.prompts import PromptItem
from searches.app.checks import InputError
from searches.training.texts import refuse_answers
from tests.accelerator import DEVICE
from tests.searches.conftest import Launch
from tests.searches.programs import quick
from tests.tiny import without_tokenizer


def _common(folder: Path, outputs: Path) -> list[str]:
    return ["target=local", f"target.path={folder}", "target.dtype=float32", "target.device=cpu", f"outputs={outputs}"]


def test_a_corpus_and_own_outputs_become_a_datastore(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    """Measured prompts are compared with its own by their content: prompts of different files have the same ids."""
    corpus, store = tmp_path / "corpus", tmp_path / "store"
    (corpus / "deep").mkdir(parents=True)
    (corpus / "deep" / "a.txt").write_text("on the mat the cat sat in the rain")
    (corpus / "b.jsonl").write_text(json.dumps({"text": "the cat sat down"}) + "\n\n")
    (corpus / "ignored.bin").write_bytes(b"\xff")
    (tmp_path / "earlier.jsonl").write_text('{"prompt": "the rain", "id": "1"}\n{"prompt": "a cat", "id": "2"}\n')
    own = ["own=true", "prompts=jsonl", f"prompts.path={tmp_path / 'earlier.jsonl'}", "max_new_tokens=6"]
    more = [f"corpus={corpus}", *own, f"output={store}"]
    done = launch("datastore", *_common(tiny_folder, tmp_path), *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    target = load_target(str(tiny_folder), dtype="float32", device=DEVICE)
    config = SpeculativeConfig("retrieval", datastore=str(store))
    assert build_drafter(config, target).tree_tokens == config.tree_tokens
    about = json.loads((store / "datastore.json").read_text())
    assert about["texts"] == 2 + 2
    seen = launch("datastore", *_common(tiny_folder, tmp_path), f"inspect={store}", cwd=tmp_path)
    assert seen.returncode == 0, seen.stderr
    assert f"{about['tokens']:,} tokens of 4 texts from {corpus} and the target's own outputs" in seen.stdout
    others, renamed = (PromptSet((PromptItem(name, "x", text),)) for name, text in (("1", "the sun"), ("7", "the rain")))
    refuse_answers("datastore", str(store), target, others)
    with pytest.raises(InputError, match="own answers to 1 of the measured prompts"):
        refuse_answers("datastore", str(store), target, renamed)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["corpus=empty", "output=store"], "corpus: empty has no .txt, .md, .jsonl files"),
        (["corpus=bad.jsonl", "output=store"], "corpus: bad.jsonl, line 1: is not a JSON object with a text"),
        (["corpus=nothing.txt", "output=store"], "corpus: there is no nothing.txt"),
        (["corpus=blank.txt", "output=store"], "corpus: has no tokens"),
        (["output=store"], "corpus: names neither a file nor a folder, and own is false; there is nothing to build from"),
        (["corpus=blank.txt"], "output: names no folder for the datastore"),
        (["corpus=blank.txt", "output=empty"], "output: empty exists already"),
        (["inspect=empty"], "datastore: cannot read empty: "),
        (["own=true", "output=store", "max_new_tokens=0"], "max_new_tokens: "),
        (["corpus=other.txt", "output=store"], "corpus: cannot read other.txt: 'utf-8' codec can't decode"),
        (["corpus=blank.txt", "output=store", "target.path=bare"], "target: has no tokenizer to read a corpus with"),
    ],
)
def test_bad_input_ends_with_one_line(
    tiny_folder: Path, tmp_path: Path, overrides: list[str], message: str, launch: Launch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    (tmp_path / "blank.txt").write_text("")
    (tmp_path / "other.txt").write_bytes("né".encode("latin-1"))
    without_tokenizer(Path(shutil.copytree(tiny_folder, tmp_path / "bare")))
    done = launch("datastore", *_common(tiny_folder, tmp_path), *overrides, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")
    assert not (tmp_path / "store").exists()
    assert not list(tmp_path.glob(".store*"))


def test_prompts_whose_answers_a_datastore_holds_are_not_measured(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    own = ["own=true", "max_new_tokens=4", f"output={tmp_path / 'store'}"]
    done = launch("datastore", *_common(tiny_folder, tmp_path), *own, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = launch("layerskip", *quick(tiny_folder, tmp_path, "space.ranges.retrieval.datastore=[store]"), cwd=tmp_path)
    message = f"{tmp_path / 'store'} holds the target's own answers to 48 of the measured prompts"
    assert (done.returncode, done.stderr) == (2, f"error: space.ranges.retrieval.datastore: {message}\n")
    cascade = "contenders.cascade.members=[{method:prompt_lookup},{method:retrieval,datastore:store}]"
    few = ("measure.prompts=2", "contenders.draft_model=null", "peers.transformers_assistant=null", cascade)
    done = launch("benchmark", *_common(tiny_folder, tmp_path), *few, cwd=tmp_path)
    assert done.stderr.startswith("error: contenders.cascade.members.1.datastore: store holds")
