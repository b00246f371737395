"""Lossless speculative decoding of Hugging Face decoders: generate, measure, export."""

from layerskip.config import ConfigError, SpeculativeConfig, StopRule
from layerskip.decoding.sampling import Sampling, SamplingError
from layerskip.decoding.stats import DecodeStats, Round
from layerskip.draft_plan import DraftPlan, PlanError
from layerskip.drafters.registry import build_drafter, load_drafters
from layerskip.export import Export, ExportError
from layerskip.generation import Generation, generate
from layerskip.measure.measure import measure
from layerskip.measure.measurement import Measurement
from layerskip.models.architecture import UnsupportedModel
from layerskip.models.draft_checkpoint import save_draft_checkpoint
from layerskip.models.loading import load_target
from layerskip.models.target import Target, TargetError
from layerskip.prompts import PromptError, PromptSet

__all__ = [
    "ConfigError",
    "DecodeStats",
    "DraftPlan",
    "Export",
    "ExportError",
    "Generation",
    "Measurement",
    "PlanError",
    "PromptError",
    "PromptSet",
    "Round",
    "Sampling",
    "SamplingError",
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

load_drafters()
