"""Files of trained heads, with the target that they belong to.

A head reads one target's hidden states, and on another it would draft noise. The target is identified by a sample of its
weights, in any dtype, and by the revision where both have the same name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from layerskip.config import ConfigError
from layerskip.files import atomic_write, write_json
from layerskip.models.target import Target

_SCHEMA = "layerskip.head/2"
_WEIGHTS = "head.safetensors"
_METADATA = "head.json"
_ROUNDING = 2**-7  # bfloat16 keeps eight bits, and the last one can depend on the conversions before
_SMALLEST = 2**-24  # float16 rounds to multiples of it


def save_trained(
    folder: Path, shape: Mapping[str, Any], weights: Mapping[str, Tensor], target: Target, training: Mapping[str, Any]
) -> None:
    """Save a trained head: the arguments to build it, its own tensors, and a record of its data and training.

    With a full disk (``OSError``), an earlier head in the folder is kept; an incomplete folder is not a trained head.
    """
    about = {"kind": "eagle", "training": dict(training)}  # for the reader
    metadata = {"schema": _SCHEMA, "shape": dict(shape), "target": _identity(target)} | about
    with atomic_write(folder / _METADATA) as partial_metadata, atomic_write(folder / _WEIGHTS) as partial:
        write_json(partial_metadata, metadata)
        save_file({name: tensor.contiguous().cpu() for name, tensor in weights.items()}, partial)
        (folder / _METADATA).unlink(missing_ok=True)


def has_trained(folder: Path) -> bool:
    """Return whether a folder has a head written by :func:`save_trained`."""
    return (folder / _METADATA).is_file()


def load_trained(folder: Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load the shape and weights of a trained head; errors are those of :func:`check_trained`."""
    metadata = check_trained(folder, target)
    try:
        weights = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"head: cannot read {folder}: {' '.join(str(error).split())}") from error
    shape = metadata["shape"]
    if not _are_valid_tokens(weights.get("tokens"), shape.get("vocabulary"), target.vocabulary):
        raise ConfigError(f"head: {folder} is damaged: its tokens are not distinct tokens of the target")
    return shape, weights


def restore_weights(module: nn.Module, weights: Mapping[str, Tensor], damaged: str, optional: Sequence[str] = ()) -> None:
    """Load all weights of a trained head but some optional ones; refuse others with an error that begins ``damaged``."""
    try:
        missing, unknown = module.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise ConfigError(f"{damaged} {' '.join(str(error).split())[:200]}") from error
    if wrong := [*(name for name in missing if name not in optional), *unknown]:
        raise ConfigError(f"{damaged} {', '.join(wrong[:3])}")


def check_trained(folder: Path, target: Target) -> dict[str, Any]:
    """Return what ``head.json`` has; a :class:`ConfigError` if it is missing, damaged or belongs to another target."""
    metadata = read_metadata(folder)
    made_for, own = metadata["target"], _identity(target)
    mismatch = f"head: {folder} was made for another target, {made_for.get('name')}, not for {target.name}: its"
    for name in ("architecture", "layers"):
        if made_for.get(name) != own[name]:
            raise ConfigError(f"{mismatch} {name} is {made_for.get(name)}, not {own[name]}")
    sample = made_for.get("weights")
    if not isinstance(sample, list) or not all(isinstance(value, float) for value in sample):
        raise ConfigError(f"head: {folder} is damaged: {_METADATA} has no weights of its target")
    if not same_weights(sample, target.weights_sample):
        raise ConfigError(f"{mismatch} weights are not the same")
    revisions = made_for.get("revision"), target.revision
    # A copy under another name has no revision to compare.
    if made_for.get("name") == target.name and None not in revisions and revisions[0] != revisions[1]:
        raise ConfigError(f"{mismatch} revision is {revisions[0]}, not {revisions[1]}")
    return metadata


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the contents of ``head.json`` as :func:`check_trained` does, whatever the target."""
    try:
        metadata = json.loads((folder / _METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"head: cannot read {folder}: {' '.join(str(error).split())}") from error
    if not isinstance(metadata, dict) or metadata.get("schema") != _SCHEMA:
        raise ConfigError(f"head: {folder} is not a head of this version")
    for part in ("target", "shape"):
        if not isinstance(metadata.get(part), dict):
            raise ConfigError(f"head: {folder} is damaged: {_METADATA} has no {part}")
    return metadata


def _identity(target: Target) -> dict[str, Any]:
    return target.describe() | {"weights": list(target.weights_sample)}


def _are_valid_tokens(tokens: Tensor | None, size: object, vocabulary: int) -> bool:
    """Return whether tokens are distinct and in the target's vocabulary, as many as the shape says; or absent in both."""
    if tokens is None:
        return size is None
    given = set(tokens.flatten().tolist())
    # A token in two rows would be accepted more often than its probability allows.
    is_list = tokens.dtype == torch.int64 and tokens.shape == (len(given),) and size in (None, len(given))
    return is_list and bool(given) and given.issubset(range(vocabulary))


def same_weights(one: ArrayLike, other: ArrayLike) -> bool:
    """Return whether two samples of weights are equal up to rounding to float16 or bfloat16."""
    return np.shape(one) == np.shape(other) and bool(np.allclose(one, other, rtol=_ROUNDING, atol=_SMALLEST))
