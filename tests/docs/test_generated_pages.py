"""The pages of configuration and results, and the tables of the front page, are what fields and records make."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from layerskip import Export
from searches.app.composition import compose_config

REPOSITORY = Path(__file__).parents[2]
CONF = REPOSITORY / "conf"
PAGE = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
ROWS = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
FIELDS = {name.strip("`"): meaning for name, _, meaning in ROWS}
GROUPS = [name for name, meaning in FIELDS.items() if meaning.startswith("group")]
CHOICES = [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """The names of all values of a configuration; lists are values."""
    for name in map(str, node):
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing() and len(child):
            yield from _leaves(child, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}"


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["build_configuration.py", "--check"])
    monkeypatch.syspath_prepend(REPOSITORY / "docs")  # as for every script that Python runs
    return str(REPOSITORY / "docs" / "build_configuration.py")


def test_the_page_is_up_to_date(builder: str) -> None:
    runpy.run_path(builder, run_name="__main__")  # exits if it is not


@pytest.mark.parametrize("choice", CHOICES)
def test_every_field_of_every_choice_has_a_row(choice: str) -> None:
    assert [leaf for leaf in _leaves(compose_config("layerskip", [choice])) if leaf not in FIELDS] == []
    assert len(FIELDS) > 80


def test_every_program_is_on_the_page() -> None:
    assert [path.name for path in CONF.glob("*.yaml") if f"(../conf/{path.name})" not in PAGE] == ["layerskip.yaml"]


def test_the_files_of_commands_say_what_their_fields_mean(builder: str) -> None:
    module = runpy.run_path(builder)
    for program in module["PROGRAMS"]:
        commented = module["commented_fields"](CONF / f"{program}.yaml")
        known = {*FIELDS, *(name for name, (_, meaning) in commented.items() if meaning)}
        named_by_users = ("drafter.", "contenders.", "peers.")
        leaves = [leaf for leaf in _leaves(compose_config(program)) if not leaf.startswith(named_by_users)]
        assert [leaf for leaf in leaves if leaf not in known] == [], program


RECORDS = REPOSITORY / "notebooks" / "records"
RESULTS = REPOSITORY / "docs" / "results.md"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
RANGE = ("speedup", "speedup_low", "speedup_high")
TABLES = {"CPU, SmolLM2-135M": "benchmark-engines-smollm2-2-cores.json", "GPU, SmolLM2-135M": "benchmark-h100-smollm2.json"}
DRAFTERS = {
    "plain": "plain",
    "prompt lookup": "prompt_lookup",
    "token recycling": "token_recycling",
    "prompt lookup, then token recycling": "cascade",
    "quantized draft, 4 bits": "quantized",
    "prompt lookup, then quantized draft": "lookup_then_quantized",
    "EAGLE head": "eagle",
}


def _record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / name).read_text(encoding="utf-8"))
    return record


def test_the_page_is_what_the_records_make(tmp_path: Path) -> None:
    """A stale page is reported in one line."""
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    (tmp_path / "notebooks").symlink_to(REPOSITORY / "notebooks")
    for expected in (0, 1):
        command = [sys.executable, str(tmp_path / "docs" / "build_results.py"), "--check"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("stale"), done.stderr.count("\n")) == (expected, expected, expected)
        page = tmp_path / "docs" / "results.md"
        page.write_text(page.read_text(encoding="utf-8").replace("*Conditions:*", "*Condition:*", 1), encoding="utf-8")


def test_the_records_are_few_and_all_of_them_are_on_the_page() -> None:
    page = RESULTS.read_text(encoding="utf-8")
    assert [path.name for path in RECORDS.iterdir() if path.name not in page] == []
    assert len(list(RECORDS.iterdir())) <= 25


def test_the_doctored_copy_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", RESULTS.read_text(encoding="utf-8"), re.S | re.M)
    (tmp_path / "notebooks").symlink_to(REPOSITORY / "notebooks")
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    claimed = _record("verify-doctored-packed-smollm2-2-cores.json")["claimed"]
    evidence = Export.load(tmp_path / "outputs" / "doctored.json").evidence
    assert [evidence[name] for name in RANGE] == pytest.approx([*claimed.values()])


def _front_page(title: str) -> tuple[str, list[list[str]]]:
    """The conditions above a table of the front page, and its rows."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^\*\*{re.escape(title)}\.\*\*(.*?)\n\n((?:\|[^\n]*\n)+)", readme, re.S | re.M)
    assert found is not None, title
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[2].splitlines()]
    return " ".join(found[1].split()), rows


def _shown(texts: str, figures: list[float]) -> None:
    """Every number in the texts is the figure at its place, rounded to as many digits."""
    numbers = NUMBER.findall(texts)
    assert len(numbers) == len(figures), texts
    for number, figure in zip(numbers, figures, strict=True):
        assert number == f"{figure:.{len(number.partition('.')[2])}f}", texts


@pytest.mark.parametrize("title", TABLES)
def test_every_number_of_the_front_page_is_in_its_record(title: str) -> None:
    """The conditions above a table are of the record, too."""
    record = _record(TABLES[title])
    results, (conditions, (head, _, *rows)) = record["results"], _front_page(title)
    versions = record["environment"]["versions"]
    if "Plain decoding reached" in conditions:
        plain = results["plain"]
        sentence = conditions.partition("Plain decoding reached")[2].partition("times")[0]
        _shown(sentence, [plain["tokens_per_second"], *(plain["rival"][name] for name in ("speedup", "low", "high"))])
    work = (f"{record['prompts']['count']} ", f"{record['max_new_tokens']} new tokens", record["target"]["dtype"])
    for text in (*work, record["date"].split()[0], f"transformers {versions['transformers']}"):
        assert text in conditions, text
    assert f"torch {versions['torch'].partition('+')[0]}," in conditions
    assert len(rows) >= 5
    for row in rows:
        label = row[0]
        found = results[DRAFTERS[label]]
        rival = found.get("rival", {})
        for column, cell in zip(head[1:], row[1:], strict=True):
            if column == "tokens/s":
                figures = [found["tokens_per_second"]]
            elif column.startswith("speedup over plain"):
                figures = [1.0] if label == "plain" else [found[name] for name in RANGE]
            else:
                assert column.startswith("same method in transformers")
                figures = [results[rival["name"]][name] for name in RANGE] if rival else []
            _shown(cell, figures)


def test_the_front_page_shows_what_the_recorded_sweep_reported() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```text\n(.*?)^```", readme, re.S | re.M)
    report = (RECORDS / "sweep-smollm2-2-cores.md").read_text(encoding="utf-8")
    words = " ".join(report.split())
    assert block.splitlines()[-1].rstrip(".") in words
    finalists = report.partition("## Finalists")[2].partition("\n\nBy ")[0].splitlines()
    rows = [row.split("|") for row in finalists if row.startswith("| ")]
    recorded = [[NUMBER.findall(row[column]) for column in (3, 4, 6, 5)] for row in rows]
    shown = [line.partition(" | ")[2] for line in block.splitlines() if line.startswith("| ")]
    for line, cells in zip(shown[1:], recorded[1:], strict=False):  # plain decoding and the winner
        _shown(line, [float(number) for cell in cells for number in cell])
    assert len(shown) == 3
    speedup, interval = recorded[2][:2]
    sentence = block.partition("wins: ")[2].partition("output")[0].replace("95 %", "")
    _shown(sentence, [float(number) for number in (*speedup, *interval)])


def test_the_front_page_says_how_fast_llama_cpp_decodes() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    sentence = readme.partition("**Serving a 4-bit file on a CPU.** ")[2].partition("plain decoding here")[0]
    results = _record("benchmark-engines-smollm2-2-cores.json")["results"]
    rates = {name: row["tokens_per_second"] for name, row in results.items()}
    _shown(sentence, [rates["llama_cpp"] / rates["plain"]])
