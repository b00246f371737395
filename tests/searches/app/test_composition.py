"""Paths on a command line are taken as they are typed, and also as Hydra would have them quoted."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from layerskip import ConfigError
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
