"""Attachments of an export: copies of the trained modules that its configuration names, in folders next to its file.

Each folder is named after the digest of its contents. An interrupted copy is never mistaken for a complete one, and an older
export keeps its own folders.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from layerskip.config import ConfigError, SpeculativeConfig
from layerskip.files import beside

_FIELDS = ("bridge", "draft_head", "head")
_FILES = ("head.json", "head.safetensors", "config.json", "model.safetensors", "pytorch_model.bin")


def copy_attachments(config: SpeculativeConfig, file: Path) -> SpeculativeConfig:
    """Copy the trained modules of a configuration next to an export's file.

    Returns:
        The configuration with folder names relative to the file.

    Raises:
        ConfigError: a folder that the configuration names has no trained module.
    """

    def copy(field: str, name: str) -> str:
        source = Path(name)
        files = _files(source)
        if not files:
            raise ConfigError(f"{field}: there is nothing in {source} to export")
        folder = file.parent / f"{file.stem}.{field}-{_digest(files)}"
        if not folder.exists():
            partial = beside(folder, str(os.getpid()))
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process with the same id
            partial.mkdir(parents=True)
            try:
                for path in files:
                    shutil.copyfile(path, partial / path.name)
                partial.replace(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return folder.name

    return _with_folders(config, copy)


def resolve_attachments(config: SpeculativeConfig, file: Path) -> SpeculativeConfig:
    """Replace the names of folders next to an export's file by absolute paths."""

    def resolve(_: str, name: str) -> str:
        folder = file.parent / name
        return str(folder.resolve()) if folder.is_dir() else name

    return _with_folders(config, resolve)


def attached_folders(file: Path) -> list[Path]:
    """Return the folders next to an export's file that its configuration names."""
    config = SpeculativeConfig.from_dict(json.loads(file.read_text(encoding="utf-8"))["config"])
    return [file.parent / name for name in _names(config) if (file.parent / name).is_dir()]


def attachment_digests(config: SpeculativeConfig) -> list[str]:
    """Return digests of the trained modules that a configuration names; they identify the folders' present contents."""
    return [_digest(_files(Path(name))) for name in _names(config)]


def _names(config: SpeculativeConfig) -> list[str]:
    names = [getattr(part, field) for part in (config, *config.members) for field in _FIELDS]
    return [name for name in dict.fromkeys(names) if name]


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in _FILES if (folder / name).is_file()]


def _digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def _with_folders(config: SpeculativeConfig, rename: Callable[[str, str], str]) -> SpeculativeConfig:
    """Apply ``rename(field, name)`` to all folder names of a configuration and its members."""
    changes = {field: rename(field, getattr(config, field)) for field in _FIELDS if getattr(config, field)}
    members = tuple(_with_folders(member, rename) for member in config.members)
    return replace(config, members=members, **changes)  # type: ignore[arg-type]
