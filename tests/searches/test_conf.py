"""Every choice in ``conf/`` composes and builds what it names; unlisted fields have their defaults and can be overridden."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from layerskip import PromptSet, Sampling, SpeculativeConfig
from layerskip.config import methods
from searches.app.composition import CONF, compose_config, fields_of
from searches.space.search_space import SearchSpace
from searches.study.objective import MeasureSettings
from searches.study.study import StudySettings
from tests.searches.conftest import Launch

LEAVES = sorted(path.relative_to(CONF) for path in Path(CONF).glob("*/*.yaml"))
NEEDED = {
    "target/hub": ["target.name=some/model"],
    "target/local": ["target.path=/some/folder"],
    **{f"prompts/{name}": ["prompts.path=some.jsonl"] for name in ("gsm8k", "humaneval", "jsonl", "mt_bench", "spec_bench")},
}


def _leaves(config: DictConfig, prefix: str = "") -> list[str]:
    """Return the dotted names of all values."""
    found = []
    for name in config:
        value = config._get_node(name)
        found += _leaves(value, f"{prefix}{name}.") if isinstance(value, DictConfig) else [f"{prefix}{name}"]
    return found


@pytest.mark.parametrize("leaf", [str(leaf.with_suffix("")) for leaf in LEAVES])
def test_a_choice_composes_and_builds(tmp_path: Path, leaf: str) -> None:
    group = leaf.partition("/")[0]
    config = compose_config("layerskip", [leaf.replace("/", "="), *NEEDED.get(leaf, [])])
    if group in ("sampler", "pruner") and leaf != "sampler/auto":  # which has tests of its own
        assert instantiate(config[group], **({"seed": 0} if group == "sampler" else {})) is not None
    elif group == "space":
        assert isinstance(instantiate(config.space, layers=12), SearchSpace)
    elif group in ("study", "experiment", "measure"):
        assert isinstance(instantiate(config.study), StudySettings)
        assert isinstance(instantiate(config.measure), MeasureSettings)
    elif group == "sampling":
        assert isinstance(instantiate(config.sampling), Sampling)
    elif leaf == "prompts/packaged":
        assert isinstance(instantiate(config.prompts), PromptSet)
    elif group == "prompts":  # the published formats have the names of their files
        fields = {"question_id": 1, "task_id": 2, "category": "stem", "turns": ["Why?"], "question": "Why?", "prompt": "x"}
        written = {"prompt": "Why?"} if leaf == "prompts/jsonl" else fields
        (tmp_path / "jsonl.jsonl").write_text(json.dumps(written), encoding="utf-8")
        assert instantiate(config.prompts, path=tmp_path / "jsonl.jsonl").name == leaf.partition("/")[2]


@pytest.mark.parametrize("method", [method.name for method in methods().values() if method.benchmark is not None])
def test_every_drafter_is_a_contender_of_the_benchmark(method: str) -> None:
    folders = [f"{part}=some/folder" for part in ("draft_folder", "cross_draft", "eagle_head")]
    config = compose_config("benchmark", ["contenders.layer_skip.mask=layers:15-29", *folders])
    fields = {key: value for key, value in config.contenders[method].items() if key != "rival"}
    assert SpeculativeConfig.from_dict(instantiate(fields)).method == method


def test_a_newcomer_meets_at_max_forty_fields(tmp_path: Path, launch: Launch) -> None:
    done = launch("layerskip", "--cfg", "job", cwd=tmp_path)
    shown = OmegaConf.create(done.stdout)
    assert isinstance(shown, DictConfig)
    assert len(_leaves(shown)) <= 40


@pytest.mark.parametrize("part", ["sampling", "space", "measure", "scan", "scan.proposals", "study"])
def test_unlisted_fields_have_defaults_and_can_be_overridden(part: str) -> None:
    composed = OmegaConf.select(compose_config("layerskip"), part)
    every = fields_of(composed._target_)
    assert every.keys() <= composed.keys()
    changed = {name: default + 1 for name, default in every.items() if type(default) is int}
    found = OmegaConf.select(compose_config("layerskip", [f"{part}.{name}={n}" for name, n in changed.items()]), part)
    assert {name: found[name] for name in changed} == changed


@pytest.mark.parametrize(
    ("program", "overrides"),
    [
        ("layerskip", ["study.n_trails=3"]),
        ("verify", ["measure.prompts=3"]),  # a field of another program
        ("layerskip", ["target=local", "target.path=/some/folder", "target.name=y"]),  # of another loader
    ],
)
def test_an_unknown_field_is_refused(program: str, overrides: list[str]) -> None:
    with pytest.raises(Exception, match=re.escape(overrides[-1].partition("=")[0])):
        compose_config(program, overrides)


def test_unlisted_fields_of_nested_parts_can_be_overridden() -> None:
    overrides = ["planted.search.space.protect_first=1", "planted.search.study.threads=5"]
    search = compose_config("calibration", overrides).planted.search
    assert (search.space.protect_first, search.study.threads, search.measure.drift) == (1, 5, 0.3)
    ranges = compose_config("layerskip", ["space.ranges.eagle.num_speculative_tokens=[1,2]"]).space.ranges
    assert ranges == {"eagle": {"num_speculative_tokens": [1, 2]}}
    assert compose_config("layerskip", ["experiment=smoke", "scan.proposals.scanned=1"]).scan.proposals.scanned == 1


def test_verify_takes_every_target_in_the_dtype_of_the_export() -> None:
    own, chosen = (compose_config("verify", target).target for target in ([], ["target=smollm2"]))
    assert ("_target_" in own, own.dtype) == (False, None)
    assert ("_target_" in chosen, chosen.dtype) == (True, None)
    assert compose_config("verify", ["target=smollm2", "target.dtype=float32"]).target.dtype == "float32"
