"""Exports: a search's best configuration with its evidence, as versioned JSON (``layerskip.export/2``).

The trained modules that a configuration names are copied next to the file, into folders named after the digest of their
contents. An interrupted copy is never mistaken for a complete one, and an older export keeps its own folders.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from layerskip.config import ConfigError, SpeculativeConfig, check_text
from layerskip.decoding.sampling import Sampling, SamplingError
from layerskip.engines.deployment import Deployment
from layerskip.engines.registry import describe_engines
from layerskip.files import atomic_folder, write_json
from layerskip.hugging_face import custom_generate
from layerskip.models.target import Target
from layerskip.models.trained_module import check_trained, has_trained

SCHEMA = "layerskip.export/2"
PROVISIONAL = "provisional"
"""Field of ``search``: true until the search has confirmed the configuration on held-out prompts."""
_SECTIONS = ("target", "config", "sampling", "evidence", "environment", "search", "engines")
_TRAINED_FILES = ("head.json", "head.safetensors", "config.json", "model.safetensors", "pytorch_model.bin")
_log = logging.getLogger(__name__)
_TARGET_FIELDS = {"name": str, "architecture": str, "layers": int, "dtype": str}


class ExportError(ValueError):
    """A file that is not an export of this schema, or an export for another target. The message begins with the field."""


@dataclass(frozen=True)
class Export:
    """A configuration with the target, evidence and environment of its search.

    ``evidence``: held-out tokens/s, the baseline's tokens/s, speedup with interval, acceptance, losslessness. ``search``:
    study, trials, seconds spent, MLflow run id; ``provisional`` if the search had not confirmed it yet.
    """

    target: Mapping[str, Any]  # ``name``, ``revision``, ``architecture``, ``layers`` and ``dtype`` of the searched model
    config: SpeculativeConfig  # the decoding configuration
    sampling: Sampling = field(default_factory=Sampling)  # the sampling of the measurement
    evidence: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)  # device and versions
    search: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the file atomically, with the commands of engines, and copy the trained modules next to it."""
        portable = replace(self, config=_with_heads(self.config, lambda head: _copy_head(Path(head), Path(path))))
        fields = {"schema": SCHEMA, "target": self.target, "config": portable.config.to_dict()}
        fields |= {"sampling": self.sampling.to_dict(), "evidence": self.evidence, "environment": self.environment}
        write_json(Path(path), fields | {"search": self.search, "engines": portable.engines(path)})

    def engines(self, path: str | Path) -> dict[str, dict[str, Any]]:
        """Return how inference engines start with this export's file, beside which they put what they write."""
        config = _with_found_heads(self.config, Path(path))
        return describe_engines(Deployment(self.target, config, self.sampling, Path(path), self.environment))

    @classmethod
    def load(cls, path: str | Path, target: Target | None = None) -> Export:
        """Read an export, and log a warning if it is provisional. Its ``engines`` are not read; they follow from the rest.

        A ``target`` is checked with :meth:`check`.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ExportError(f"export: cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            raise ExportError(f"export: {path} is not JSON: {error}") from None
        schema = fields.get("schema") if isinstance(fields, dict) else None
        if schema != SCHEMA:
            raise ExportError(f"schema: {path} has {schema!r}; this program reads {SCHEMA!r}")
        try:
            export = cls._from_dict(fields)
        except ValueError as error:
            raise ExportError(f"{error} (in {path})") from None
        export = replace(export, config=_with_found_heads(export.config, Path(path)))
        if target is not None:
            export.check(target)
        if export.search.get(PROVISIONAL):
            _log.warning("%s is provisional: its search has not confirmed it on held-out prompts", path)
        return export

    @classmethod
    def _from_dict(cls, fields: Mapping[str, Any]) -> Export:
        for name in ("target", "config"):
            if name not in fields:
                raise ExportError(f"{name}: is missing")
        for name in fields.keys() - {"schema"}:
            if name not in _SECTIONS:
                raise ExportError(f"{name}: not a field of {SCHEMA}")
            if not isinstance(fields[name], dict):
                raise ExportError(f"{name}: is not a table")
        for name, expected in _TARGET_FIELDS.items():
            value = fields["target"].get(name)
            if type(value) is not expected:
                raise ExportError(f"target.{name}: is missing or not a {expected.__name__}")
            if isinstance(value, str):
                check_text(f"target.{name}", value)
        try:
            config = SpeculativeConfig.from_dict(fields["config"])
            sampling = Sampling.from_dict(fields.get("sampling", {}))
        except (ConfigError, SamplingError) as error:
            raise ExportError(f"{'config' if isinstance(error, ConfigError) else 'sampling'}.{error}") from None
        rest = {name: fields.get(name, {}) for name in ("evidence", "environment", "search")}
        return cls(fields["target"], config, sampling, **rest)

    def check(self, target: Target) -> None:
        """Check that architecture, number of layers and trained heads are those of a target."""
        for name, value in (("architecture", target.architecture), ("layers", target.layers)):
            if self.target[name] != value:
                raise ExportError(f"target.{name}: the export is for {self.target[name]}, this model has {value}")
        for config in (self.config, *self.config.members):
            if config.datastore and not Path(config.datastore).is_dir():
                raise ExportError(f"config.datastore: there is no {config.datastore}; exports do not contain datastores")
            if config.head and has_trained(Path(config.head)):
                try:
                    check_trained(Path(config.head), target)
                except ConfigError as error:
                    raise ExportError(f"config.{error}") from None

    def custom_generate(self, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[..., Any]:
        """Make the decoding method for ``model.generate(**inputs, custom_generate=export.custom_generate())``.

        The method refuses a model that the export is not for. A draft model with another tokenizer needs the model's own.
        """
        return custom_generate(self.config, self.check, tokenizer)


def attached_folders(file: Path) -> list[Path]:
    """Return the folders next to an export's file that its configuration names."""
    config = SpeculativeConfig.from_dict(json.loads(file.read_text(encoding="utf-8"))["config"])
    return [file.parent / name for name in _heads(config) if (file.parent / name).is_dir()]


def attachment_digests(config: SpeculativeConfig) -> list[str]:
    """Return digests of the trained heads that a configuration names; they identify the folders' present contents."""
    return [_digest(_files(Path(name))) for name in _heads(config)]


def _heads(config: SpeculativeConfig) -> list[str]:
    return list(dict.fromkeys(part.head for part in (config, *config.members) if part.head))


def _with_heads(config: SpeculativeConfig, rename: Callable[[str], str]) -> SpeculativeConfig:
    """Apply ``rename`` to the folders of all heads of a configuration and its members."""
    members = tuple(_with_heads(member, rename) for member in config.members)
    return replace(config, members=members, head=rename(config.head) if config.head else "")


def _with_found_heads(config: SpeculativeConfig, file: Path) -> SpeculativeConfig:
    """Replace the names of folders next to an export's file by absolute paths."""
    return _with_heads(config, lambda head: str((file.parent / head).resolve()) if (file.parent / head).is_dir() else head)


def _copy_head(source: Path, file: Path) -> str:
    """Copy a trained head next to an export's file; return the name of its folder there."""
    files = _files(source)
    if not files:
        raise ConfigError(f"head: there is nothing in {source} to export")
    folder = file.parent / f"{file.stem}.head-{_digest(files)}"
    if not folder.exists():
        with atomic_folder(folder) as partial:
            partial.mkdir()
            for path in files:
                shutil.copyfile(path, partial / path.name)
    return folder.name


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in _TRAINED_FILES if (folder / name).is_file()]


def _digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
