"""Bridge stores and predictors of a tiny model, for tests of bridges in a search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from layerskip import PromptSet, Sampling, SkipMask, SpeculativeConfig, StopRule, Target
from layerskip.costs.cost_model import CostProfile
from layerskip.scan.scan import Scanner
from layerskip.texts.continuations import continue_prompts
from searches.bridges.spec import BridgeSpec
from searches.bridges.store import BridgeStore, BridgingSettings
from searches.predict.scan_predictor import ScanPredictor

LINEAR = BridgeSpec("linear")


def new_store(target: Target, outputs: Path, tokens: int = 600, train_seconds: float = 0.5) -> BridgeStore:
    """Return a store of bridges that are fitted to a few texts."""
    return BridgeStore(target, Sampling(), BridgingSettings(tokens, 16, 8, 2**24, train_seconds), outputs, 0)


def bridged(bridge_store: BridgeStore, mask: str) -> SpeculativeConfig:
    """Return a self-draft with the bridges of a mask; it has none if they do not help."""
    parsed = SkipMask.parse(mask, bridge_store.target.layers)
    return SpeculativeConfig("layer_skip", 2, mask=parsed.format(), bridge=bridge_store.bridge(parsed, LINEAR))


def first_bridged(bridge_store: BridgeStore) -> SpeculativeConfig:
    """Return a self-draft whose bridges help."""
    every = (bridged(bridge_store, f"layers:{layer}") for layer in range(bridge_store.target.layers))
    return next(config for config in every if config.bridge)


def new_predictor(
    target: Target, folder: Path, profile: CostProfile, prompts: Sequence[str] = ("Say one.",), tokens: int = 10
) -> ScanPredictor:
    """Return a predictor that tries all draft lengths of which the profile has the cost of verification."""
    depth = len(profile.verify_seconds) - 1
    scanner = Scanner(target, continue_prompts(target, PromptSet.of(prompts), Sampling(), tokens), Sampling(), depth=depth)
    return ScanPredictor(scanner, profile, [(length, StopRule()) for length in range(1, depth + 1)], folder / "scans")
