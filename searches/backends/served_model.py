"""Models in the form that engines load: a folder in the layout of Hugging Face."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from huggingface_hub import snapshot_download

from layerskip import Target
from layerskip.files import report_full_disk
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
    saved = folder.resolve() / f"{source.name.removesuffix('.gguf')}-{target.digest[:12]}"
    if not saved.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        # Written to a temporary folder first, so that the final one is always complete.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving.") as temporary:
            partial = Path(temporary) / saved.name
            with report_full_disk(saved, Path(temporary) / "probe"):
                _save(target, partial)
            partial.replace(saved)
    return str(saved)


def _save(target: Target, folder: Path) -> None:
    """Save weights, configuration and tokenizer."""
    target.model.save_pretrained(folder)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
