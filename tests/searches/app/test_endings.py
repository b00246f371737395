"""The first and last moments of a program: signals while it imports and exits, and output that nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.searches.programs import REPOSITORY, command, environment, fork, quick, runs, sqlite, tracked

pytestmark = pytest.mark.system

_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
_CLOSED = "reader, writer = os.pipe(); os.close(reader)"
_FULL = "writer = os.open('/dev/full', os.O_WRONLY)"


def _with_output(output: str, module: str, folder: Path) -> Path:
    """Write a program that runs a module after its standard output was replaced; return its file."""
    program = folder / "program.py"
    program.write_text(
        f"import os, sys\nfrom tests.searches.programs import run_as_main\n{output}\nrun_as_main({module!r})\n",
        encoding="utf-8",
    )
    return program


@pytest.mark.parametrize(("number", "is_ignored"), [*((number, False) for number in _SIGNALS), (signal.SIGHUP, True)])
def test_a_signal_during_imports_ends_with_one_line_unless_it_is_ignored(
    number: signal.Signals, is_ignored: bool, tmp_path: Path
) -> None:
    heavy = f"import os, time\nos.kill(os.getpid(), {number:d})\ntime.sleep(0.1)\nraise SystemExit('imported')\n"
    (tmp_path / "omegaconf.py").write_text(heavy, encoding="utf-8")  # in place of the library, which is imported first
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    script = 'trap "" HUP; exec "$@"' if is_ignored else 'exec "$@"'  # as nohup does
    ended = subprocess.run(
        ["sh", "-c", script, "sh", *command("layerskip")],
        env=environment() | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    expected = (1, "imported\n") if is_ignored else (128 + number, "interrupted before it began\n")
    assert (ended.returncode, ended.stderr) == expected


@pytest.mark.parametrize(("number", "interrupted"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, True)])
def test_a_signal_while_a_program_exits_changes_nothing(number: signal.Signals, interrupted: bool, tmp_path: Path) -> None:
    program = f"""
import signal
from searches.app.application import run
from searches.app.interrupt import guard_imports

def task(config):
    if {interrupted}:
        signal.raise_signal({number:d})
    print("done")

guard_imports()  # as python -m searches.datastore
try:
    run("datastore", task)
finally:
    signal.raise_signal({number:d})
    print("not reached")
"""
    (tmp_path / "exiting.py").write_text(program, encoding="utf-8")
    ended = fork("exiting.py", cwd=tmp_path, timeout=50)
    assert ended.returncode == (128 + number if interrupted else 0), ended.stderr
    assert ended.stdout == ("" if interrupted else "done\n")
    assert ended.stderr == ("interrupted; the same command continues from here\n" if interrupted else "")


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        (f"{_CLOSED}; os.dup2(writer, 1); os.dup2(writer, 2)", ""),
        (f"{_FULL}; os.dup2(writer, 1)", "standard output: incomplete: No space left on device\n"),
    ],
    ids=["closed", "full"],
)
def test_a_search_goes_on_without_its_output(output: str, errors: str, tiny_folder: Path, tmp_path: Path) -> None:
    outputs = tracked(tmp_path / "outputs")
    overrides = quick(tiny_folder, outputs, "study.name=поиск", "study.n_trials=1", "scan=none", "space.methods=[none]")
    program = _with_output(output, "searches.layerskip", tmp_path)
    ended = fork(str(program), *overrides, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, errors)
    assert (outputs / "поиск" / "best.json").exists()
    assert runs(sqlite(outputs), "study")[0].info.status == "FINISHED"


@pytest.mark.parametrize(
    ("output", "arguments", "code", "errors"),
    [
        (_CLOSED, "{}", 0, ""),
        (_FULL, "{}", 2, "error: standard output: incomplete: No space left on device\n"),
        (_FULL, "{} engine=nonesuch", 2, None),
    ],
)
def test_a_result_that_is_printed_must_reach_its_reader(
    output: str, arguments: str, code: int, errors: str | None, tmp_path: Path
) -> None:
    export = REPOSITORY / "notebooks" / "records" / "best-packed-smollm2-2-cores.json"
    program = _with_output(f"{output}; os.dup2(writer, 1)", "searches.export", tmp_path)
    ended = fork(str(program), *arguments.format(export).split(), cwd=tmp_path)
    assert ended.returncode == code, ended.stderr
    if errors is None:
        assert ended.stderr.startswith("error: engine: ") and ended.stderr.count("\n") == 1
    else:
        assert ended.stderr == errors


@pytest.mark.parametrize(
    ("redirected", "lost"), [(">&- 2>&-", "None"), ("> /dev/full", "28"), ("2>&1 | true", "None"), ("> out", "None")]
)
def test_descriptors_of_a_new_process(redirected: str, lost: str, tmp_path: Path) -> None:
    program = """
import sys
sys.argv[0] = "-m"  # as Python has it while it looks for the program
from searches.app.streams import lost_output, tolerate_loss
tolerate_loss()  # once more changes nothing
with open("opened", "w") as file:  # gets the number of no standard stream
    print("x" * 1_000_000)
    print("ы", flush=True)
    print("error", file=sys.stderr)
    lost = lost_output()
    file.write(str(lost and lost.errno))
assert file.name == "opened"
"""
    shell = ["bash", "-o", "pipefail", "-c", f'"$0" -c "$1" {redirected}', sys.executable, program]
    done = subprocess.run(shell, cwd=tmp_path, env=environment() | {"PYTHONIOENCODING": "latin-1"}, check=False)
    assert done.returncode == 0
    assert (tmp_path / "opened").read_text() == lost
    if redirected == "> out":
        assert (tmp_path / "out").read_text() == "x" * 1_000_000 + "\n\\u044b\n"


def test_a_pipe_that_does_not_block_gets_everything() -> None:
    program = 'import sys; sys.argv[0] = "-m"; import searches; print("x" * 1_000_000)'
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    variables = environment() | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=writer, env=variables) as process:
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            assert len(pipe.read()) == 1_000_001
    assert process.returncode == 0
