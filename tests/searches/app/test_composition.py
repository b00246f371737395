"""Paths on a command line are taken as they are typed or as Hydra has them; each bad value is refused by its field."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from layerskip import ConfigError
from searches.app.application import explain
from searches.app.checks import (
    InputError,
    check_flag,
    check_folder,
    check_list,
    check_number,
    check_output_paths,
    check_seed,
    check_whole,
    read_bytes,
)
from searches.app.composition import compose_config, prepare_overrides
from searches.app.targets import command_line

_FIELDS = [
    *(("layerskip", field) for field in ("outputs", "target.path", "prompts.path", "study.storage", "tracking.uri")),
    *(("benchmark", field) for field in ("record", "draft_folder", "contenders.eagle.head", "peers.openvino.python")),
    *(("train", "begin_like"), ("datastore", "corpus"), ("export", "model"), ("scale", "outputs")),
]
_PATHS = [
    " sp ", "my folder=1", "/a b/[x]'y,ö", "a+b", "[x]", "{x}", "x(1)", "range(1,3)", "1_0", "1e3", "true", "a,b",
    "a#b;c&d*?%20",
    "'", '"q', "x'", "a\\'b", "x\\", "C:\\x y", "a${b", "~/x", "研究", "'a' 'b'", "x" * 200,
]  # fmt: skip


@pytest.mark.parametrize(("program", "field"), _FIELDS)
def test_a_path_of_a_program_is_taken_as_it_is_typed(program: str, field: str) -> None:
    groups = {"target.path": ["target=local"], "prompts.path": ["prompts=jsonl"]}.get(field, [])
    config = compose_config(program, [*groups, f"{field}=/a b=1/[x]'y,ö"])
    assert OmegaConf.select(config, field) == "/a b=1/[x]'y,ö"


@pytest.mark.parametrize("path", _PATHS)
def test_a_path_may_have_any_characters(path: str) -> None:
    assert compose_config("verify", [f"outputs={path}"]).outputs == path
    assert compose_config("verify", command_line([path])).export == path


@pytest.mark.parametrize(
    ("typed", "read"), [("'a b=1'", "a b=1"), ("null", None), ("${oc.env:HOME}/x", "~/x"), ("", ""), ("17", "17")]
)
def test_what_hydra_reads_as_a_text_stays(typed: str, read: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "~")
    assert compose_config("verify", [f"record={typed}"]).record == read


def test_commas_separate_the_jobs_of_a_multirun() -> None:
    assert prepare_overrides("verify", ["-m", "outputs=a,b", "record=a=1"]) == ["-m", "outputs=a,b", "record='a=1'"]


def test_a_first_argument_is_an_override_only_if_it_looks_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("record=x", "+new.field=1", "target@other=local", "~record", "--cfg", "hydra/launcher=joblib"):
        assert command_line([given]) == [given]
    monkeypatch.chdir(tmp_path)
    Path("record=x").touch()
    assert command_line(["record=x", "seed=1"]) == ["export='record=x'", "seed=1"]


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\nb", "a\x00b", "a\udcffb"])
def test_names_that_a_terminal_would_obey_are_refused(name: str) -> None:
    for field in ("study.name", "target.name", "outputs"):
        with pytest.raises(ConfigError, match=f"^{field}: 'a.*' has characters that cannot be printed") as refusal:
            compose_config("layerskip", [f"{field}={name}"])
        assert str(refusal.value).isprintable()


_REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: check_seed(True), "seed: True is not a whole number from 0 to 2147483647"),
    (lambda: check_seed(2**31), "seed: 2147483648 is not a whole number"),
    (lambda: check_whole("n", 0), "n: 0 is not a whole number of at least 1"),
    (lambda: check_number("n", 0), "n: 0 is not a number above 0"),
    (lambda: check_number("n", "1", maximum=2), "n: '1' is not a number above 0 and up to 2"),
    (lambda: check_number("n", -1, or_zero=True), "n: -1 is neither 0 nor a number above 0"),
    (lambda: check_number("n", float("nan")), "n: nan is not a number above 0"),
    (lambda: check_number("n", 1.5, maximum=1, or_zero=True), "n: 1.5 is neither 0 nor a number above 0 and up to 1"),
    (lambda: read_bytes("n", "2 GB free"), "n: '2 GB free' is not a number of bytes, such as 2_000_000_000 or 2GiB"),
    (lambda: read_bytes("n", "0.5B"), "n: '0.5B' is not a number of bytes"),
    (lambda: read_bytes("n", True), "n: True is not a number of bytes"),
    (lambda: check_flag("n", 1), "n: 1 is neither true nor false"),
    (lambda: check_list("n", "ab"), "n: 'ab' is not a list, such as [a,b]"),
    (lambda: check_list("n", [], or_empty=False), "n: is empty"),
    (lambda: check_list("n", ["a", "c"], known=["a", "b"]), "n: 'c' is not one of a, b"),
]


@pytest.mark.parametrize(("check", "message"), _REFUSED, ids=[message for _, message in _REFUSED])
def test_bad_values_are_refused_by_field(check: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        check()


def test_sizes_are_read_in_decimal_and_in_binary_units() -> None:
    sizes = {512: 512, "512 B": 512, "1.5KB": 1500, "2GiB": 2 * 2**30, "3 MB": 3_000_000, "4TiB": 4 * 2**40}
    assert {given: read_bytes("n", given) for given in sizes} == sizes


def test_folders_are_refused_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert check_folder("outputs", str(tmp_path / "a" / "b")) == str(tmp_path)  # their parent exists
    with pytest.raises(InputError, match=f"^outputs: {tmp_path}/file is not a folder"):
        check_folder("outputs", str(tmp_path / "file" / "b"))
    monkeypatch.setattr("os.access", lambda *_: False)  # also for root, and on a read-only file system
    with pytest.raises(InputError, match=f"^outputs: {tmp_path} cannot be written to"):
        check_folder("outputs", str(tmp_path))


def test_a_read_only_disk_is_refused_by_field(small_disk: Path) -> None:
    (small_disk / "outputs").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for folder in ("outputs", "new"):
        with pytest.raises(InputError, match=f"^outputs: {small_disk}.* cannot be written to"):
            check_folder("outputs", str(small_disk / folder))
    with pytest.raises(OSError, match="Read-only file system") as raised:
        (small_disk / "outputs" / "study.db").touch()
    assert explain(raised.value) == f"cannot write {small_disk}/outputs/study.db: Read-only file system"


def test_a_folder_of_digits_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = OmegaConf.create({"outputs": 17, "record": 5})
    check_output_paths(config)
    assert (config.outputs, config.record) == ("17", "5")
    with pytest.raises(InputError, match=r"^outputs: \['a'\] is not the path of a folder"):
        check_output_paths(OmegaConf.create({"outputs": ["a"]}))
    with pytest.raises(InputError, match=r"^record: .* is a folder, not a file"):
        check_output_paths(OmegaConf.create({"record": str(tmp_path)}))


def test_names_that_are_too_long_are_refused(tmp_path: Path) -> None:
    name = "ö" * 200
    for path in (tmp_path / name, tmp_path / "new" / name, tmp_path / name / "new"):
        with pytest.raises(InputError, match=f"^outputs: '{name}' cannot be the name of a file: File name too long$"):
            check_folder("outputs", str(path))
    with pytest.raises(InputError, match="^record: "):
        check_output_paths(OmegaConf.create({"record": str(tmp_path / name)}))
    assert not list(tmp_path.iterdir())
    check_folder("outputs", str(tmp_path / name[:100] / name[:100]))
