"""Lossless speculative decoding of any Hugging Face decoder: generate, measure, export."""

from .anatomy import UnsupportedModel
from .checkpoint import save_draft_checkpoint
from .config import AcceptRule, ConfigError, SpeculativeConfig, StopRule
from .drafters.build import build_drafter
from .export import Export, ExportError
from .generation import Generation, generate
from .loading import load_target
from .mask import MaskError, SkipMask
from .measure import measure
from .measurement import Measurement
from .prompts import PromptError, PromptSet
from .sampling import Sampling, SamplingError
from .stats import DecodeStats, Round
from .target import Target, TargetError

__all__ = [
    "AcceptRule",
    "ConfigError",
    "DecodeStats",
    "Export",
    "ExportError",
    "Generation",
    "MaskError",
    "Measurement",
    "PromptError",
    "PromptSet",
    "Round",
    "Sampling",
    "SamplingError",
    "SkipMask",
    "SpeculativeConfig",
    "StopRule",
    "Target",
    "TargetError",
    "UnsupportedModel",
    "build_drafter",
    "generate",
    "load_target",
    "measure",
    "save_draft_checkpoint",
]
