"""Every command, example, link and name of a file in README and docs works as it stands.

Commands that take less than a minute are run. The overrides of the others are composed by Hydra.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from searches.app.composition import compose_config
from searches.app.targets import command_line
from tests.searches.programs import fork
from tests.tiny import save_tiny

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.S | re.M)
HERE_DOCUMENT = re.compile(r"^[^\n]*<<'END'.*?^END$", re.S | re.M)
PYTHON = ".venv/bin/python"
KNOWN = ("make", "mkdir", ".venv/bin/mlflow", ".venv/bin/optuna-dashboard", PYTHON)
Command = tuple[str, ...]


def _blocks(page: Path, language: str) -> list[str]:
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [re.sub(f"^{indent}", "", block, flags=re.M) for indent, method, block in found if method == language]


def _split(block: str) -> list[Command]:
    """The commands of a block as bash splits and expands them. Another program than the known ones is an error."""
    printing = "".join(f"function {name} {{ printf '%s\\0' {name} \"$@\" END; }}\n" for name in KNOWN)
    script = printing + HERE_DOCUMENT.sub("", block)
    done = subprocess.run(["/bin/bash", "-euc", script], env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, block + done.stderr
    return [tuple(command.split("\0")) for command in done.stdout.split("\0END\0") if command]


def _commands(page: Path) -> list[Command]:
    """The commands of a page, whose blocks share their variables."""
    return _split("\n".join(_blocks(page, "bash")))


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in _commands(page)))
PROGRAMS = [command for command in COMMANDS if command[0] == PYTHON and command[1] == "-m"]


@pytest.mark.parametrize("command", PROGRAMS, ids=" ".join)
def test_a_command_composes(command: Command) -> None:
    program, overrides = command[2], list(command[3:])
    assert program.startswith("searches.")
    path = REPOSITORY.joinpath(*program.split("."))
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    name = program.rpartition(".")[2]
    if name in ("verify", "export"):
        overrides = command_line(overrides)
    if overrides[-2:] == ["--cfg", "job"]:
        overrides = overrides[:-2]
    if overrides[:1] == ["-m"]:
        overrides = _first_job(overrides[1:])
    config = compose_config(name, overrides)
    OmegaConf.to_container(config, resolve=True)


def _first_job(overrides: Sequence[str]) -> list[str]:
    """The overrides of a multirun's first job, without those of the launcher, which is optional."""
    own = [override for override in overrides if not re.match(r"\+?hydra[./]", override)]
    (jobs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(own), max_batch_size=None)
    return jobs[0]


def test_all_other_commands_are_known() -> None:
    targets = re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.M)
    for command in COMMANDS:
        if command[0] == "make":
            assert {word for word in command[1:] if not word.startswith("ARGS=")} <= set(targets), command
        elif command[0] == PYTHON:
            assert command in PROGRAMS or (REPOSITORY / command[1]).exists(), command


def _anchors(page: Path) -> set[str]:
    """The names that the headings of a page have in links."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_resolves_and_every_block_has_a_language(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]*)\)", FENCE.sub("", text)):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), target
            assert not anchor or anchor in _anchors(file), target
    assert {language for _, language, _ in FENCE.findall(text)} <= {"bash", "python", "text", "yaml", "bibtex"}
    for block in _blocks(page, "python"):
        ast.parse(block)


@pytest.mark.parametrize("package", ["layerskip", "searches"])
def test_every_module_and_folder_of_a_package_is_in_the_picture(package: str) -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = re.search(rf"^{package}/(.*?)(```|──)", text, re.S | re.M)
    assert picture is not None
    modules = [path.name for path in (REPOSITORY / package).glob("*.py") if path.name != "__init__.py"]
    folders = [path.parent.name + "/" for path in (REPOSITORY / package).glob("*/__init__.py")]
    assert min(len(modules), len(folders)) > 5
    assert [name for name in (*modules, *folders, "data/") if name not in picture[1].split()] == []
    paths = re.findall(rf"`({package}/[\w./]*)", text)
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with everything that commands read, whose outputs are its own."""
    place = tmp_path_factory.mktemp("newcomer")
    for name in ("docs", "notebooks", "layerskip", "searches", "conf"):
        (place / name).symlink_to(REPOSITORY / name)
    return place


def _run(folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}  # waiting threads cost more
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _run_python(folder: Path, program: str) -> str:
    """Run a program in a process that has imported everything already, which takes seconds."""
    (folder / "example.py").write_text(program, encoding="utf-8")
    done = fork("tests.docs.example", "example.py", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.system
def test_the_program_of_the_worked_example_prints_its_table(folder: Path) -> None:
    scans = REPOSITORY / "docs" / "scans.md"
    (block,) = _blocks(scans, "python")
    table = scans.read_text(encoding="utf-8").partition("| `K` | rounds | drafted |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [line.split() for line in _run_python(folder, block).splitlines()] == rows
    assert len(rows) == 4


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with as many layers as SmolLM2, which takes its place in examples."""
    return save_tiny(tmp_path_factory.mktemp("stand-in") / "model", num_hidden_layers=30)


def _replace_model(program: str, stand_in: Path) -> str:
    assert 'load_target("smollm2")' in program
    return program.replace('load_target("smollm2")', f"load_target({str(stand_in)!r}, dtype='float32')")


@pytest.mark.system
def test_the_example_of_the_front_page_runs(folder: Path, stand_in: Path) -> None:
    """With the export of the front page, which is valid for all Llamas of 30 layers."""
    (block,) = _blocks(REPOSITORY / "README.md", "python")
    assert len(_run_python(folder, _replace_model(block, stand_in)).splitlines()) >= 3


@pytest.mark.system
def test_the_examples_of_the_drafters_run(folder: Path, stand_in: Path) -> None:
    """One after the other in one process, the new drafter included, which then decodes."""
    blocks = _blocks(REPOSITORY / "docs" / "drafters.md", "python")
    assert len(blocks) == 3
    use = "own = layerskip.SpeculativeConfig.from_dict({'method': 'repeat_last', 'repeats': 3})\n"
    use += "print(len(layerskip.generate(target, 'Why?', own, max_new_tokens=8).tokens))\n"
    printed = _run_python(folder, _replace_model("\n\n".join([*blocks, use]), stand_in)).splitlines()
    assert printed[-1] in map(str, range(1, 9))
    assert Path(printed[-2], "config.json").exists()


@pytest.mark.system
def test_the_quick_steps_of_the_tutorial_run(folder: Path, stand_in: Path) -> None:
    """The model, the prompts, the datastore and the printed configuration; searches and trainings are left out."""
    tutorial = REPOSITORY / "docs" / "tutorial.md"
    _run_python(folder, _replace_model(_blocks(tutorial, "python")[0], stand_in))
    prompts = next(block for block in _blocks(tutorial, "bash") if HERE_DOCUMENT.search(block))
    _run(folder, "bash", "-euc", prompts)
    quick = [command for command in _commands(tutorial) if "searches.datastore" in command]
    quick += [command for command in PROGRAMS if "--cfg" in command]
    assert len(quick) >= 3
    for command in quick:
        done = fork(*command[2:], cwd=folder)
        assert done.returncode == 0, done.stderr
