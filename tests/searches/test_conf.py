"""Every leaf of the configuration composes and builds what it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from layerskip import PromptSet, Sampling, SpeculativeConfig
from searches.app.application import CONF
from searches.space.search_space import SearchSpace
from searches.study.objective import MeasureSettings
from searches.study.study import StudySettings

LEAVES = sorted(path.relative_to(CONF) for path in Path(CONF).glob("*/*.yaml"))
NEEDED = {
    "drafter/layer_skip": ["contenders.layer_skip.mask=layers:15-29"],  # else as deep as the model, which nobody knows here
    "target/hub": ["target.name=some/model"],
    "target/local": ["target.path=/some/folder"],
    "prompts/jsonl": ["prompts.path=some.jsonl"],
    "drafter/draft_model": ["contenders.draft_model.draft=some/draft"],
    "drafter/eagle": ["contenders.eagle.head=some/head"],
    "drafter/medusa": ["contenders.medusa.head=some/head"],
    "drafter/cross_tokenizer": ["contenders.cross_tokenizer.draft=some/draft"],
}


@pytest.mark.parametrize("leaf", [str(leaf.with_suffix("")) for leaf in LEAVES])
def test_a_leaf_composes(leaf: str) -> None:
    group, _, choice = leaf.partition("/")
    program = "benchmark" if leaf in ("measure/benchmark",) or group == "drafter" else "layerskip"
    chosen = f"drafter@contenders.{choice}={choice}" if group == "drafter" else f"{group}={choice}"
    if group == "drafter" and choice == "none":
        chosen = "+drafter@contenders.none=none"
    with initialize_config_dir(CONF, version_base="1.3"):
        config = compose(program, [chosen, *NEEDED.get(leaf, [])])
    if group in ("sampler", "pruner"):
        assert instantiate(config[group], **({"seed": 0} if group == "sampler" else {})) is not None
    elif group == "space":
        assert isinstance(instantiate(config.space, layers=12), SearchSpace)
    elif group == "study" or group == "experiment":
        assert isinstance(instantiate(config.study), StudySettings)
        assert isinstance(instantiate(config.measure), MeasureSettings)
    elif group == "sampling":
        assert isinstance(instantiate(config.sampling), Sampling)
    elif leaf == "prompts/packaged":
        assert isinstance(instantiate(config.prompts), PromptSet)
    elif group == "drafter":
        fields = {key: value for key, value in config.contenders[choice].items() if key != "rival"}
        assert SpeculativeConfig.from_dict(instantiate(fields)).kind == choice


def test_an_unknown_override_is_refused() -> None:
    with initialize_config_dir(CONF, version_base="1.3"), pytest.raises(Exception, match=r"study\.n_trails"):
        compose("layerskip", ["study.n_trails=3"])


@pytest.mark.parametrize("target", ["smollm2", "gemma3", "hub", "local"])
def test_verify_takes_every_target_in_the_exports_dtype(target: str) -> None:
    with initialize_config_dir(CONF, version_base="1.3"):
        own = compose("verify").target
        chosen = compose("verify", [f"target={target}", *NEEDED.get(f"target/{target}", [])]).target
        told = compose("verify", [f"target={target}", "target.dtype=float32", *NEEDED.get(f"target/{target}", [])]).target
    assert "_target_" not in own and own.dtype is None
    assert "_target_" in chosen and chosen.dtype is None
    assert told.dtype == "float32"
