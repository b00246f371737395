"""Tests of ``searches.benchmark``: our decoding and transformers', the record, the tables and MLflow."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from layerskip import Export, PromptSet, SpeculativeConfig, load_target
from layerskip.measure.losslessness import Divergence, Losslessness
from searches.app.composition import compose_config
from searches.benchmark.program import table
from tests.searches.conftest import Launch
from tests.searches.programs import runs, sqlite, tracked
from tests.tiny import VOCABULARY, save_tiny, tokenizer

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> dict[str, Any]:
    """Run a benchmark of everything, with an export, on a model whose last two layers have no effect."""
    folder = tmp_path_factory.mktemp("benchmark")
    model = save_tiny(folder / "model", num_hidden_layers=4, idle=(2, 3))
    described = {"name": str(model), "revision": None, "architecture": "LlamaForCausalLM", "layers": 4, "dtype": "float32"}
    Export(described, SpeculativeConfig("layer_skip", 3, mask="layers:2")).save(folder / "best.json")
    other, words = AutoModelForCausalLM.from_pretrained(model), tokenizer()  # the same with one more token
    words.add_tokens("<more>")
    other.resize_token_embeddings(VOCABULARY + 1, mean_resizing=False)
    other.get_output_embeddings().weight.data[VOCABULARY:] = 0.0
    other.save_pretrained(folder / "other")
    words.save_pretrained(folder / "other")
    done = launch(
        "benchmark",
        "target=local",
        f"target.path={model}",
        "target.dtype=float32",
        "target.device=cpu",
        "target.pack_weights=false",  # so that the size of the draft model is that of its file
        "measure.prompts=3",
        "measure.max_new_tokens=32",
        "draft_mask=layers:2-3",
        "+contenders.lookup_then_model={method:cascade,members:[{method:prompt_lookup},"
        "{method:draft_model,draft_model:${draft_folder}}]}",
        f"cross_draft={folder / 'other'}",
        f"config={folder / 'best.json'}",
        f"outputs={tracked(folder / 'outputs')}",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((folder / "outputs" / "benchmark.json").read_text(encoding="utf-8"))
    return {"record": written, "printed": done.stdout, "outputs": folder / "outputs"}


def test_all_contenders_give_the_same_output(record: dict[str, Any]) -> None:
    results = record["record"]["results"]
    assert set(results) == {
        "plain", "prompt_lookup", "retrieval", "token_recycling", "lookahead", "cascade", "layer_skip", "draft_model",
        "cross_tokenizer", "transformers_universal", "lookup_then_model", "export",
        "transformers", "transformers_prompt_lookup", "transformers_early_exit", "transformers_assistant",
    }  # fmt: skip
    assert record["record"]["configs"]["layer_skip"]["mask"] == "layers:2-3"  # the second half of four
    (drafts,) = (record["outputs"] / "drafts").iterdir()
    target = load_target(str(record["outputs"].parent / "model"), dtype="float32", device="cpu")
    assert f"-{target.digest[:8]}-" in drafts.name
    _, held_out = PromptSet.packaged().split()
    assert record["record"]["prompts"]["digest"] == held_out.take(3).digest
    assert {found["losslessness"]["verdict"] for found in results.values()} == {"exact"}
    assert all(name in record["printed"] for name in results)
    assert 0 < results["layer_skip"]["draft_share"] < 1
    assert results["transformers_assistant"]["draft_share"] == 0  # not measured


def test_rounds_are_counted_by_their_tokens(record: dict[str, Any]) -> None:
    """All outputs are the same, so the rounds of our contenders have as many tokens as plain decoding has rounds."""
    results = record["record"]["results"]
    (total,) = results["plain"]["acceptance_length_histogram"].values()
    for found in (results[name] for name in record["record"]["configs"]):
        counts = found["acceptance_length_histogram"]
        assert sum(int(tokens) * rounds for tokens, rounds in counts.items()) == total > 0
        assert total / sum(counts.values()) == pytest.approx(found["mean_acceptance_length"])
    lines = record["printed"].splitlines()
    (head,) = (line for line in lines if line.startswith("| rounds by tokens"))
    row = next(line for line in lines[lines.index(head) :] if line.startswith("| draft_model |"))
    columns = zip(head.strip(" |").split(" | ")[1:], row.strip(" |").split(" | ")[1:], strict=False)  # without empty cells
    assert sum(int(tokens) * int(cell.partition(" (")[0]) for tokens, cell in columns) == total


def test_spec_bench_is_measured_by_its_categories(tmp_path: Path, launch: Launch) -> None:
    model, file = save_tiny(tmp_path / "model"), tmp_path / "question.jsonl"
    kinds = ("writing", "coding", "stem", "rag")
    rows = [{"question_id": n, "category": kind, "turns": [f"Explain {kind}."]} for n, kind in enumerate(kinds)]
    rows[0]["turns"] = ["Describe a bridge.", "Make it shorter."]
    settings = compose_config("benchmark")
    others = [f"contenders.{name}=null" for name in settings.contenders if name != "prompt_lookup"]
    others += [f"peers.{name}=null" for name in settings.peers if name != "transformers_prompt_lookup"]
    command = (
        *("benchmark", "target=local", f"target.path={model}", "target.dtype=float32", "target.device=cpu"),
        *("prompts=spec_bench", f"prompts.path={file}", "measure.prompts=null", "measure.max_new_tokens=12", *others),
        f"outputs={tracked(tmp_path / 'outputs')}",
    )
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    done = launch(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "outputs" / "benchmark.json").read_text(encoding="utf-8"))
    assert (record["prompts"]["name"], record["prompts"]["count"]) == ("spec_bench", 4)
    for found in record["results"].values():
        assert found["prompts_by_category"] == {"mt_bench": 3, "rag": 1}
    lookup = record["results"]["prompt_lookup"]
    low, high = lookup["interval_by_category"]["mt_bench"]  # that of a single prompt is not shown
    several, single = (lookup["speedup_by_category"][kind] for kind in ("mt_bench", "rag"))
    assert "| speedup by category | mt_bench | rag |" in done.stdout
    assert f"| prompt_lookup | {several:.2f} ({low:.2f} to {high:.2f}) | {single:.2f} |" in done.stdout
    lengths = (lookup["mean_acceptance_length_by_category"][kind] for kind in ("mt_bench", "rag"))
    assert f"| prompt_lookup | {' | '.join(f'{length:.2f}' for length in lengths)} |" in done.stdout
    del rows[1]["turns"]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    refused = launch(*command, cwd=tmp_path)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert refused.stderr.startswith(f"error: prompts.path: {file}, line 2: question_id 1: turns: is missing")


def test_costs_are_measured(record: dict[str, Any]) -> None:
    configs = record["record"]["configs"]
    lookup, model = configs["lookup_then_model"]["draft_cost"]
    assert lookup == 0.0 < model
    assert "draft_cost" not in configs["cascade"]  # no member runs a model
    assert configs["cascade"]["verify_cost"] == configs["lookup_then_model"]["verify_cost"]
    assert len(configs["cascade"]["verify_cost"]) == 16


def test_every_contender_has_a_run_in_mlflow(record: dict[str, Any]) -> None:
    contenders = runs(sqlite(record["outputs"]), "contender")
    assert {run.data.tags["contender"] for run in contenders} == set(record["record"]["results"])


def test_our_contenders_are_compared_with_their_rivals(record: dict[str, Any]) -> None:
    results = record["record"]["results"]
    rivals = {name: found["rival"]["name"] for name, found in results.items() if "rival" in found}
    assert rivals == {
        "plain": "transformers",
        "prompt_lookup": "transformers_prompt_lookup",
        "layer_skip": "transformers_early_exit",
        "draft_model": "transformers_assistant",
        "cross_tokenizer": "transformers_universal",
    }
    for name, rival in rivals.items():
        expected = results[name]["tokens_per_second"] / results[rival]["tokens_per_second"]
        assert results[name]["rival"]["speedup"] == pytest.approx(expected)
    # These draft as many tokens as transformers with the same model, so they commit as many per round.
    for name, tolerance in (("draft_model", 0.1), ("cross_tokenizer", 0.15)):
        ours, theirs = (results[each]["mean_acceptance_length"] for each in (name, rivals[name]))
        assert ours > 1.3 and ours / theirs == pytest.approx(1.0, abs=tolerance)
    assert results["export"]["acceptance_rate"] > 0.5


def test_a_cascade_is_compared_with_its_members(record: dict[str, Any]) -> None:
    results = record["record"]["results"]
    members = results["cascade"]["members"]
    assert set(members) == {"prompt_lookup", "token_recycling"}
    for name, against in members.items():
        assert against["low"] <= against["speedup"] <= against["high"]
        whole, alone = (results[each]["tokens_per_second"] for each in ("cascade", name))
        assert against["speedup"] == pytest.approx(whole / alone)
        assert f"| cascade | {name} | " in record["printed"]


def test_near_ties_and_outputs_that_end_at_once_are_stated_with_the_table(record: dict[str, Any]) -> None:
    changed = copy.deepcopy(record["record"])
    assert not any(part in table(changed) for part in ("near-tie: ", "first token"))
    for name, margin in (("cascade", 0.125), ("retrieval", 0.0625)):
        found = Losslessness(3, (Divergence("p", 3, 0.03125, 0.25), Divergence("q", 1, margin, 0.5)))
        changed["results"][name]["losslessness"] = found.to_dict()
    plain, lookup = (changed["results"][name] for name in ("plain", "prompt_lookup"))
    plain["empty_prompts"], lookup["empty_prompts"] = 2, lookup["prompts"]
    assert "at most 0.125 of a logit (cascade); rounding explains 0.5" in table(changed)
    lines = table(changed).splitlines()
    assert "The outputs of 2 of 3 prompts end with their first token. Speedups leave them out." in lines
    (row,) = (line for line in lines if line.startswith("| prompt_lookup |") and "exact" in line)
    assert [cell.strip() for cell in row.split("|")[3:5]] == ["", ""]
