"""Models in the form that engines load: a folder in the layout of Hugging Face."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download

from layerskip import SpeculativeConfig, Target
from layerskip.attachments import attachment_digests
from layerskip.files import digest, report_full_disk, short_name
from layerskip.heads.portable import save_portable
from layerskip.heads.published_eagle import is_published
from layerskip.models.wheels import WHEELS
from searches.app.checks import InputError


def served_folder(target: Target, folder: Path) -> str:
    """Return a folder that an engine can load a model from; a model from a GGUF file is saved to one.

    Args:
        target: the model.
        folder: saved models are put into it, one folder each, and found there again.

    Raises:
        InputError: the model was quantised on loading.
    """
    source = Path(target.name)
    if target.quantization is not None:
        raise InputError("target.quantization: engines load models themselves; use a checkpoint that is quantised already")
    if target.name not in WHEELS and source.is_dir():
        return str(source.resolve())
    if target.name not in WHEELS and source.suffix != ".gguf":
        with contextlib.suppress(OSError, ValueError):  # it is in the cache that it was loaded from
            return snapshot_download(target.name, revision=target.revision, local_files_only=True)
    saved = folder.resolve() / f"{short_name(source.name.removesuffix('.gguf'))}-{target.digest[:12]}"
    return _written(saved, lambda partial: _save(target, partial))


def served_head(config: SpeculativeConfig, target: Target, folder: Path) -> str:
    """Return a folder that vLLM can load a configuration's head from; one of this project's layout is saved to one.

    Args:
        config: with a head.
        target: that it drafts for.
        folder: as for :func:`served_folder`.

    Raises:
        ConfigError: vLLM has no layout for this head, or it belongs to another target.
    """
    source = Path(config.head)
    if is_published(source):
        return str(source.resolve())
    identity = digest([attachment_digests(config), target.digest])[:12]
    saved = folder.resolve() / f"{short_name(source.resolve().name)}-{identity}"
    return _written(saved, lambda partial: save_portable(source, partial, target))


def _written(folder: Path, write: Callable[[Path], object]) -> str:
    """Return a folder; if it does not exist, write it under another name first, so that it is always complete."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".saving.") as temporary:
            partial = Path(temporary) / folder.name
            with report_full_disk(folder, Path(temporary) / "probe"):
                write(partial)
            partial.replace(folder)
    return str(folder)


def _save(target: Target, folder: Path) -> None:
    """Save weights, configuration and tokenizer."""
    target.model.save_pretrained(folder)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
