"""Configurations and deployments for tests of engines, and interpreters that have them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerskip import Sampling, SpeculativeConfig, StopRule
from layerskip.engines.deployment import Deployment

TARGET = {"name": "Org/Model", "revision": "abc", "architecture": "LlamaForCausalLM", "layers": 6, "dtype": "float32"}
LOOKUP = SpeculativeConfig("prompt_lookup", 7, prompt_lookup_min=2, prompt_lookup_max=4, match="first")
MODEL = SpeculativeConfig("draft_model", 3, draft_model="Org/Draft")
KEPT = SpeculativeConfig("layer_skip", 3, mask="layers:2-3", stop=StopRule("adaptive"))
CONFIGS = {
    "none": SpeculativeConfig(),
    "lookup": LOOKUP,
    "last lookup": SpeculativeConfig("prompt_lookup", 5, prompt_lookup_min=1, prompt_lookup_max=3),
    "model": MODEL,
    "stopping model": replace(MODEL, stop=StopRule("threshold", 0.4)),
    "other tokenizer": SpeculativeConfig("cross_tokenizer", 4, draft_model="Org/Other"),
    "kept layers": KEPT,
    "sub-layers": SpeculativeConfig("layer_skip", 3, mask="mlp:2"),
    "all layers": SpeculativeConfig("layer_skip", 3, mask="layers:0-5"),
    "bits": SpeculativeConfig.from_dict({"method": "quantized", "weights": "int8;layers:2=skip;head=keep"}),
    "two formats": SpeculativeConfig.from_dict({"method": "quantized", "weights": "int4;mlp:1=int8"}),
    "head": SpeculativeConfig.from_dict({"method": "quantized", "weights": "head=int8"}),
    "lookup then bits": SpeculativeConfig("cascade", members=(LOOKUP, SpeculativeConfig("quantized", 2))),
    "recycling": SpeculativeConfig("token_recycling", 3),
    "retrieval": SpeculativeConfig("retrieval", 3),
    "lookahead": SpeculativeConfig("lookahead", 3),
    "lookup then model": SpeculativeConfig("cascade", members=(LOOKUP, MODEL)),
    "lookup then recycling": SpeculativeConfig("cascade", members=(LOOKUP, SpeculativeConfig("token_recycling", 3))),
}


def deployment(
    config: SpeculativeConfig, sampling: Sampling | None = None, file: str = "best.json", **target: Any
) -> Deployment:
    """Return a deployment of a configuration; ``target`` changes fields of the target."""
    return Deployment(TARGET | target, config, sampling or Sampling(), Path(file))


SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 4}
"""Sizes of a tiny model whose heads are as wide as vLLM's attention on a CPU needs."""


def interpreter(engine: str) -> str:
    """Return the interpreter that ``LAYERSKIP_<ENGINE>_PYTHON`` names; without it, the test is skipped."""
    name = f"LAYERSKIP_{engine.upper()}_PYTHON"
    if name not in os.environ:
        pytest.skip(f"{name} names no interpreter that has the engine")
    return os.environ[name]
