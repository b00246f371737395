"""Every command and every example of README and docs works as it stands.

Commands that take less than a minute are run. The overrides of the others are composed by Hydra.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from searches.app.composition import compose_config
from searches.verification.verification import command_line
from tests.searches.programs import fork

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", re.S | re.M)
HERE_DOCUMENT = re.compile(r"^.*<<'END'.*?^END$", re.S | re.M)
LAUNCHES = re.compile(r"^(\w+=\S+ )*(\.venv/bin/)?python -m (searches\.[\w.]+)")


def _blocks(page: Path, language: str) -> list[str]:
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [re.sub(f"^{indent}", "", block, flags=re.M) for indent, kind, block in found if kind == language]


def _commands() -> list[str]:
    blocks = [HERE_DOCUMENT.sub("", block).replace("\\\n", " ") for page in PAGES for block in _blocks(page, "bash")]
    return list(dict.fromkeys(line.strip() for block in blocks for line in block.splitlines() if line.strip()))


COMMANDS = _commands()
PROGRAMS = [line for line in COMMANDS if LAUNCHES.match(line)]
EXAMPLES = [block for page in PAGES for block in _blocks(page, "python")]


@pytest.mark.parametrize("line", PROGRAMS)
def test_a_command_composes(line: str) -> None:
    match = LAUNCHES.match(line)
    assert match is not None
    overrides = shlex.split(line[match.end() :])
    name = match[3].rpartition(".")[2]
    assert (REPOSITORY / Path(*match[3].split("."))).with_suffix(".py").exists()
    if name == "verify":
        overrides = command_line(overrides)
    if overrides[-2:] == ["--cfg", "job"]:
        overrides = overrides[:-2]
    config = compose_config(name, overrides)
    OmegaConf.to_container(config, resolve=True)


def test_all_other_commands_are_known() -> None:
    others = [line for line in COMMANDS if line not in PROGRAMS]
    targets = re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.M)
    for line in others:
        words = [word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word)]
        known = words[0] == "make" and set(words[1:]) <= set(targets)
        assert known or words[0] in ("mkdir", ".venv/bin/mlflow"), line


@pytest.mark.parametrize("block", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_is_valid_python(block: str) -> None:
    ast.parse(block)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with everything that commands read, whose outputs are its own."""
    place = tmp_path_factory.mktemp("newcomer")
    for name in ("docs", "notebooks", "layerskip", "searches", "conf"):
        (place / name).symlink_to(REPOSITORY / name)
    return place


def _run(folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_of_the_front_page_runs(folder: Path) -> None:
    (block,) = _blocks(REPOSITORY / "README.md", "python")
    assert len(_run(folder, sys.executable, "-c", block).splitlines()) >= 3


def test_the_quick_steps_of_the_tutorial_run(folder: Path) -> None:
    """The model, the prompts, the datastore and the printed configuration; searches and trainings are left out."""
    tutorial = REPOSITORY / "docs" / "tutorial.md"
    _run(folder, sys.executable, "-c", _blocks(tutorial, "python")[0])
    prompts = next(block for block in _blocks(tutorial, "bash") if HERE_DOCUMENT.search(block))
    _run(folder, "bash", "-euc", prompts)
    quick = [line for line in PROGRAMS if "outputs/my-store" in line and "searches.datastore" in line]
    quick += [line for line in PROGRAMS if "--cfg job" in line]
    assert len(quick) >= 3
    for line in quick:
        arguments = shlex.split(line)
        done = fork(*arguments[arguments.index("-m") + 1 :], cwd=folder)
        assert done.returncode == 0, done.stderr
