"""Bridges: initialisation, files, exports and refusals."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import Export, generate
from layerskip.bridges.bridge import Bridges, BridgeShape, load_bridges, save_bridges
from layerskip.bridges.fit import Calibration
from layerskip.bridges.ridge import regress, regress_mlp
from layerskip.config import ConfigError, SpeculativeConfig
from layerskip.drafters.registry import build_drafter
from layerskip.export import attached_folders
from layerskip.mask import Gap, SkipMask
from layerskip.models.draft_head import save_draft_tokens
from layerskip.models.loading import load_target
from layerskip.models.target import Target
from tests.accelerator import DEVICE
from tests.drafters.bridges import bridge_folder, bridge_shape, calibration
from tests.drafters.contract import target_of
from tests.tiny import save_tiny


def test_a_map_of_lower_rank_is_the_best_approximation_of_the_full_map() -> None:
    """Compared with the leading singular vectors of the full map's outputs on the rows of the fit."""
    torch.manual_seed(0)
    hidden = torch.randn(400, 12)
    targets = hidden @ torch.randn(12, 12) * torch.tensor([4.0, 3.0, 2.0, *[0.3] * 9]) + torch.randn(400, 12)
    gap = SkipMask.parse("layers:1", 3).gaps[0]
    full, ranked = (Bridges(BridgeShape("layers:1", 3, 12, "linear", rank)).of(gap) for rank in (0, 3))
    with torch.no_grad():
        regress(full, hidden, targets)
        regress(ranked, hidden, targets)
        added, fewer = full(hidden), ranked(hidden)
    middle = added.mean(0)
    left, values, right = torch.linalg.svd(added - middle, full_matrices=False)
    assert torch.allclose(fewer, middle + left[:, :3] * values[:3] @ right[:3], atol=1e-3)


@pytest.mark.parametrize("noise", [False, True])
def test_an_mlp_learns_nonlinear_targets_and_ignores_noise(noise: bool) -> None:
    torch.manual_seed(0)
    bridge = Bridges(BridgeShape("layers:1", 3, 12, "mlp", 0, 32)).of(SkipMask.parse("layers:1", 3).gaps[0])
    hidden = torch.randn(6000, 12)
    targets = torch.randn(6000, 12) if noise else hidden.roll(1, -1) + hidden.square()
    other = Bridges(bridge.shape).of(SkipMask.parse("layers:1", 3).gaps[0])
    with torch.no_grad():
        regress(other, hidden, targets)
        regress_mlp(bridge, hidden, targets)
        errors = [float((part(hidden) - targets).square().mean()) for part in (other, bridge)]
        same = torch.equal(other(hidden), bridge(hidden))
    assert same == noise
    assert noise or errors[1] < 0.9 * errors[0]


def test_saved_bridges_belong_to_a_mask_and_a_target(tmp_path: Path) -> None:
    """They fit their target in any dtype and under any name, but not another revision of the same name."""
    model, fitted = target_of("llama").model, calibration("llama")
    own = Target(model, None, "some/model", "one")
    save_bridges(tmp_path, fitted.fit(bridge_shape(own, "layers:1-2")).bridges, own, {}, fitted.digest)
    metadata = json.loads((tmp_path / "head.json").read_text())
    assert metadata["target"]["name"] == "some/model" and metadata["target"]["revision"] == "one"
    assert metadata["target"]["dtype"] == "float32"
    assert metadata["calibration"] == fitted.digest != Calibration(fitted.target, fitted.continuations[:9], 2**24).digest
    for other in (own, Target(model, None, "some/model"), Target(model, None, "elsewhere", "two")):
        load_bridges(tmp_path, other)
    with pytest.raises(ConfigError, match="^bridge: .* another target, some/model, .* its revision is one, not two$"):
        load_bridges(tmp_path, Target(model, None, "some/model", "two"))
    config = SpeculativeConfig("layer_skip", mask="layers:1-2", bridge=str(tmp_path))
    build_drafter(config, own)
    with pytest.raises(ConfigError, match="^bridge: .* is made for mask 'layers:1-2', not for 'layers:1'$"):
        build_drafter(replace(config, mask="layers:1"), own)
    (tmp_path / "head.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="^bridge: cannot read"):
        build_drafter(config, own)
    with pytest.raises(ConfigError, match="^bridge: the mask skips nothing"):
        replace(config, mask="")


def test_a_warm_start_copies_the_nearest_bridges_or_refuses_those_of_another_kind() -> None:
    target = target_of("llama")
    other, own = (Bridges(bridge_shape(target, mask)) for mask in ("layers:0;layers:2-3;mlp:1", "layers:1-2;attention:3"))
    for _, bridge in other.items():
        torch.nn.init.normal_(bridge.bias)
    own.warm_start(other)
    assert torch.equal(own.of(Gap("layers", 1, 2)).bias, other.of(Gap("layers", 2, 3)).bias)
    assert not own.of(Gap("attention", 3, 3)).bias.any()
    with pytest.raises(ConfigError, match="^bridge: .* another kind or size"):
        own.warm_start(Bridges(bridge_shape(target, "layers:1", "mean")))


def test_loading_bridges_uses_no_random_numbers(tmp_path: Path) -> None:
    """A seed gives the same first and second text, although initial weights are drawn before the file is read."""
    target = load_target(str(save_tiny(tmp_path / "target")), dtype="float32", device=DEVICE)
    save_bridges(tmp_path / "bridge", Bridges(bridge_shape(target, "layers:1-2", "mlp", 2, 3)), target, {})
    skip = SpeculativeConfig("layer_skip", 3, mask="layers:1-2", bridge=str(tmp_path / "bridge"))
    method = Export(Export.describe(target), skip).custom_generate()
    ids, outputs = torch.tensor([[9, 30, 31, 9]], device=DEVICE), []
    for _ in range(2):
        torch.manual_seed(0)
        options = dict(do_sample=True, temperature=3.0, top_k=0, max_new_tokens=16)
        outputs.append(target.model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=method, **options))
    assert outputs[0].equal(outputs[1])


def test_an_interrupted_copy_does_not_prevent_an_export(tmp_path: Path) -> None:
    target = load_target(str(save_tiny(tmp_path / "target")), dtype="float32", device=DEVICE)
    save_draft_tokens(tmp_path / "tokens", torch.arange(5, 40), target, {})
    config = SpeculativeConfig("layer_skip", 3, mask="layers:1", draft_head=str(tmp_path / "tokens"))
    Export(Export.describe(target), config).save(tmp_path / "best.json")
    (folder,) = attached_folders(tmp_path / "best.json")
    folder.rename(folder.with_name(f".{folder.name}.{os.getpid()}"))  # as a killed process with this id leaves it
    Export(Export.describe(target), config).save(tmp_path / "best.json")
    assert attached_folders(tmp_path / "best.json") == [folder]


def test_an_export_contains_its_bridges(tmp_path: Path) -> None:
    """The export is moved with its attachments, and the original folders are deleted."""
    target = load_target(str(save_tiny(tmp_path / "target")), dtype="float32", device=DEVICE)
    parts, moved = tmp_path / "parts", tmp_path / "moved"
    save_bridges(parts / "bridge", Bridges(bridge_shape(target, "layers:1-2")), target, {})
    save_draft_tokens(parts / "tokens", torch.arange(5, 40), target, {})
    (parts / "bridge" / "training.pt").write_bytes(b"large")
    fields: dict[str, Any] = {"bridge": str(parts / "bridge"), "draft_head": str(parts / "tokens")}
    skip = SpeculativeConfig("layer_skip", 3, mask="layers:1-2", **fields)
    config = SpeculativeConfig("cascade", members=(SpeculativeConfig("prompt_lookup"), skip))
    for name in ("best", "again"):
        Export(Export.describe(target), config).save(tmp_path / "original" / f"{name}.json")
    folders = attached_folders(tmp_path / "original" / "best.json")
    assert sorted(place.name.partition("-")[0] for place in folders) == ["best.bridge", "best.draft_head"]
    shutil.rmtree(parts)
    (tmp_path / "original").rename(moved)
    assert not list(moved.rglob("training.pt"))
    own = Export.load(moved / "best.json", target).config
    assert Path(own.members[1].bridge).is_relative_to(moved)
    plain = generate(target, "Hello.", SpeculativeConfig(), max_new_tokens=12)
    assert generate(target, "Hello.", own, max_new_tokens=12).tokens == plain.tokens
    shutil.rmtree(own.members[1].bridge)
    with pytest.raises(ConfigError, match="^bridge: cannot read"):
        generate(target, "Hello.", Export.load(moved / "best.json", target).config, max_new_tokens=12)
    with pytest.raises(ConfigError, match="^bridge: there is nothing in"):
        Export(Export.describe(target), skip).save(tmp_path / "lost.json")
    assert not (tmp_path / "lost.json").exists()


BAD_SHAPES: tuple[dict[str, Any], ...] = (
    *({"kind": "other"}, {"rank": 999}, {"rank": "x"}, {"width": None}, {"kind": "mean", "rank": 2}, {"kind": "mlp"}),
)


@pytest.mark.parametrize("fields", BAD_SHAPES)
def test_shapes_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="^bridge\\."):
        BridgeShape(**({"mask": "layers:1", "layers": 4, "hidden": 32} | fields))


def test_damaged_bridges_are_refused(tmp_path: Path) -> None:
    target = target_of("llama")
    folder = Path(bridge_folder("llama", "layers:1-2", "linear"))
    metadata = json.loads((folder / "head.json").read_text())
    (tmp_path / "head.safetensors").write_bytes((folder / "head.safetensors").read_bytes())
    for harm in ({"mask": "layers:1"}, {"kind": "mean"}, {"other": 1}):
        (tmp_path / "head.json").write_text(json.dumps(metadata | {"shape": metadata["shape"] | harm}))
        with pytest.raises(ConfigError, match="^bridge: .* is damaged"):
            load_bridges(tmp_path, target, SkipMask.parse(str(harm.get("mask", "layers:1-2")), 4))
