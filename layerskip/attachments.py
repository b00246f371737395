"""What does an export need beside its file? The trained parts that its configuration names, copied next to it.

Their folders are named after what is in them, so that a copy that was interrupted never passes for a whole one, and an older
export keeps its own.
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

_PARTS = ("bridge", "draft_head", "head")
_FILES = ("head.json", "head.safetensors", "config.json", "model.safetensors", "pytorch_model.bin")


def attach(config: SpeculativeConfig, file: Path) -> SpeculativeConfig:
    """Copy what a configuration names beside an export's file; returns the configuration with names relative to it.

    Raises:
        ConfigError: a folder that it names holds nothing of the kind.
    """

    def copied(part: str, name: str) -> str:
        source = Path(name)
        found = _files(source)
        if not found:
            raise ConfigError(f"{part}: there is nothing in {source} to export")
        folder = file.parent / f"{file.stem}.{part}-{_digest(found)}"
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}.{os.getpid()}")
            shutil.rmtree(partial, ignore_errors=True)  # of a process of this number that was killed
            partial.mkdir(parents=True)
            try:
                for path in found:
                    shutil.copyfile(path, partial / path.name)
                partial.replace(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return folder.name

    return _renamed(config, copied)


def locate(config: SpeculativeConfig, file: Path) -> SpeculativeConfig:
    """The configuration of an export's file with absolute names of what lies beside it."""

    def found(_: str, name: str) -> str:
        beside = file.parent / name
        return str(beside.resolve()) if beside.is_dir() else name

    return _renamed(config, found)


def attached(file: Path) -> list[Path]:
    """The folders beside an export's file that it names."""
    config = SpeculativeConfig.from_dict(json.loads(file.read_text(encoding="utf-8"))["config"])
    return [file.parent / name for name in _names(config) if (file.parent / name).is_dir()]


def digests(config: SpeculativeConfig) -> list[str]:
    """What the trained parts are that a configuration names, whatever lies in their folders tomorrow."""
    return [_digest(_files(Path(name))) for name in _names(config)]


def _names(config: SpeculativeConfig) -> list[str]:
    names = [getattr(part, name) for part in (config, *config.members) for name in _PARTS]
    return [name for name in dict.fromkeys(names) if name]


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in _FILES if (folder / name).is_file()]


def _digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def _renamed(config: SpeculativeConfig, rename: Callable[[str, str], str]) -> SpeculativeConfig:
    changes = {part: rename(part, getattr(config, part)) for part in _PARTS if getattr(config, part)}
    members = tuple(_renamed(member, rename) for member in config.members)
    return replace(config, members=members, **changes)  # type: ignore[arg-type]
