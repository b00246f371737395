"""Who takes part in a benchmark, what is said of it, and who is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from layerskip import Export, PromptSet, Sampling, SpeculativeConfig, load_target
from searches.app.application import CONF
from searches.benchmarking.benchmark import _contenders
from tests.accelerator import DEVICE
from tests.searches.programs import NO_PEERS
from tests.tiny import save_tiny


def test_an_export_of_elsewhere_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = load_target(str(save_tiny(tmp_path / "model")), dtype="float32", device="cpu")
    lookup = SpeculativeConfig("prompt_lookup")
    Export(Export.describe(target), lookup).save(tmp_path / "same.json")
    elsewhere = Export.describe(target) | {"dtype": "bfloat16"}
    Export(elsewhere, lookup, Sampling(temperature=0.7)).save(tmp_path / "other.json")
    for name, said in (("same", []), ("other", ["dtype bfloat16", "sampling {"])):
        with initialize_config_dir(CONF, version_base="1.3"):
            config = compose("benchmark", [*NO_PEERS, "draft_mask=layers:1", f"config={tmp_path / name}.json"])
        config.contenders = {}
        _contenders(config, target, PromptSet.of(["one"]), Sampling())
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("config: ")]
        assert len(lines) == len(said)
        assert all(line.startswith(f"config: was found with {what}") for line, what in zip(lines, said, strict=True))


def test_who_cannot_draft_for_a_target_is_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-Neo's attention takes no mask of a tree's branches."""
    target = load_target(str(save_tiny(tmp_path / "model", "gpt_neo")), dtype="float32", device=DEVICE)
    skip = "{kind:layer_skip,mask:'layers:1',siblings:1}"
    fanned = f"+contenders.fanned={{kind:cascade,members:[{{kind:prompt_lookup}},{skip}]}}"
    with initialize_config_dir(CONF, version_base="1.3"):
        config = compose(
            "benchmark", ["contenders.layer_skip.mask=layers:1", *NO_PEERS, "contenders.draft_model=null", fanned]
        )
    contenders, rivals, configs = _contenders(config, target, PromptSet.of(["one"]), Sampling())
    assert {"plain", "prompt_lookup", "layer_skip"} <= contenders.keys()
    said = capsys.readouterr().out
    for name in ("token_recycling", "fanned"):
        assert name not in contenders.keys() | configs.keys() | rivals.keys()
        assert f"contenders.{name}: left out: " in said


def test_a_draft_that_transformers_refuses_is_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes tokenizers of as many tokens for one."""
    target = load_target(str(save_tiny(tmp_path / "model")), dtype="float32", device=DEVICE)
    save_tiny(tmp_path / "other", seed=1)
    left = (*NO_PEERS, *(f"contenders.{name}=null" for name in ("layer_skip", "draft_model", "cascade")))
    with initialize_config_dir(CONF, version_base="1.3"):
        config = compose("benchmark", [*left, f"cross_draft={tmp_path / 'other'}"])
    contenders, rivals, _ = _contenders(config, target, PromptSet.of(["one"]), Sampling())
    assert "cross_tokenizer" in contenders
    assert "transformers_universal" not in contenders.keys() | set(rivals.values())
    assert "peers.transformers_universal: left out: draft: " in capsys.readouterr().out


def test_what_drafts_and_their_verification_cost_can_be_said(tmp_path: Path) -> None:
    target = load_target(str(save_tiny(tmp_path / "model")), dtype="float32", device=DEVICE)
    others = [f"contenders.{name}=null" for name in ("layer_skip", "draft_model")]
    with initialize_config_dir(CONF, version_base="1.3"):
        costs = "+contenders.cascade.verify_cost=[1.5]", "+contenders.cascade.draft_cost=[0.0,0.25]"
        config = compose("benchmark", [*NO_PEERS, *costs, *others])
    _, _, configs = _contenders(config, target, PromptSet.of(["one"]), Sampling())
    assert (configs["cascade"].verify_cost, configs["cascade"].draft_cost) == ((1.5,), (0.0, 0.25))
