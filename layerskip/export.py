"""What did a search find, on what evidence, and how is it loaded elsewhere? Versioned JSON, ``layerskip.export/1``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from layerskip.attachments import attach, locate
from layerskip.config import ConfigError, SpeculativeConfig
from layerskip.decoding.sampling import Sampling, SamplingError
from layerskip.files import write_json
from layerskip.hugging_face import custom_generate
from layerskip.models.target import Target
from layerskip.models.trained_module import check_head, is_head

SCHEMA = "layerskip.export/1"
_SECTIONS = ("target", "config", "sampling", "evidence", "environment", "search")
_TARGET_FIELDS = {"name": str, "architecture": str, "layers": int, "dtype": str}


class ExportError(ValueError):
    """A file that is no export of this schema, or an export for another target; the message names the field."""


@dataclass(frozen=True)
class Export:
    """A configuration and everything that is known about it.

    Args:
        target: ``name``, ``revision``, ``architecture``, ``layers`` and ``dtype`` of the model it was found on.
        config: how to decode.
        sampling: how tokens were chosen when it was measured.
        evidence: held-out tokens/s, the baseline's, speedup with interval, acceptance, losslessness.
        environment: device and versions.
        search: study, trials, seconds spent, MLflow run id.
    """

    target: Mapping[str, Any]
    config: SpeculativeConfig
    sampling: Sampling = field(default_factory=Sampling)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def describe(target: Target) -> dict[str, Any]:
        """What an export records of a target."""
        return {
            "name": target.name,
            "revision": target.revision,
            "architecture": target.architecture,
            "layers": target.layers,
            "dtype": target.dtype,
        }

    def to_dict(self) -> dict[str, Any]:
        """The export as plain values, schema first."""
        return {
            "schema": SCHEMA,
            "target": dict(self.target),
            "config": self.config.to_dict(),
            "sampling": self.sampling.to_dict(),
            "evidence": dict(self.evidence),
            "environment": dict(self.environment),
            "search": dict(self.search),
        }

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all, and beside it what is trained and named by the configuration.

        Raises:
            ConfigError: a folder that the configuration names holds nothing that was trained.
        """
        attached = replace(self, config=attach(self.config, Path(path)))
        write_json(Path(path), attached.to_dict())

    @classmethod
    def load(cls, path: str | Path, target: Target | None = None) -> Export:
        """Read an export.

        Args:
            path: of the JSON file.
            target: where given, the export must be for it; see :meth:`check`.

        Raises:
            ExportError: not an export of this schema, or one for another target.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ExportError(f"export: cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # also of what json reads but cannot hold
            raise ExportError(f"export: {path} is not JSON: {error}") from None
        if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
            found = fields.get("schema") if isinstance(fields, dict) else None
            raise ExportError(f"schema: {path} has {found!r}; this program reads {SCHEMA!r}")
        for name in ("target", "config"):
            if name not in fields:
                raise ExportError(f"{name}: is missing from {path}")
        for name, value in fields.items():
            if name != "schema" and name not in _SECTIONS:
                raise ExportError(f"{name}: not a field of {SCHEMA}, in {path}")
            if name != "schema" and not isinstance(value, dict):
                raise ExportError(f"{name}: is not a table, in {path}")
        for name, kind in _TARGET_FIELDS.items():
            if type(fields["target"].get(name)) is not kind:
                raise ExportError(f"target.{name}: is missing or not a {kind.__name__}, in {path}")
        try:
            config = locate(SpeculativeConfig.from_dict(fields["config"]), Path(path))
            sampling = Sampling.from_dict(fields.get("sampling", {}))
        except ConfigError as error:
            raise ExportError(f"config.{error} (in {path})") from None
        except SamplingError as error:
            raise ExportError(f"sampling.{error} (in {path})") from None
        rest = {name: fields.get(name, {}) for name in ("evidence", "environment", "search")}
        export = cls(fields["target"], config, sampling, **rest)
        if target is not None:
            export.check(target)
        return export

    def check(self, target: Target) -> None:
        """Make sure that the configuration means the same on a target.

        Raises:
            ExportError: its architecture or its number of layers is another, or a trained part was made for another target
                or mask.
        """
        for name, value in (("architecture", target.architecture), ("layers", target.layers)):
            if self.target[name] != value:
                raise ExportError(f"target.{name}: the export is for {self.target[name]}, this model has {value}")
        for config in (self.config, *self.config.members):
            # Tokens of another tokenizer are a draft model's own, which is loaded and asked when decoding begins.
            named = ("bridge", "head", *(("draft_head",) if config.kind != "cross_tokenizer" else ()))
            if config.datastore and not Path(config.datastore).is_dir():
                raise ExportError(f"config.datastore: there is no {config.datastore}, and exports take none along")
            for name, folder in ((name, getattr(config, name)) for name in named):
                if folder and is_head(Path(folder)):
                    try:
                        mask = check_head(Path(folder), target, name)["shape"].get("mask")
                        if name == "bridge" and mask != config.mask:
                            raise ConfigError(f"bridge: {folder} stands in for {mask}, not for {config.mask}")
                    except ConfigError as error:
                        raise ExportError(f"config.{error}") from None

    def custom_generate(self, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[..., Any]:
        """The decoding method for ``model.generate(**inputs, custom_generate=export.custom_generate())``.

        It refuses a model that the export is not for.

        Args:
            tokenizer: the model's; needed where it drafts with a model of another one.
        """
        return custom_generate(self.config, self.check, tokenizer)
