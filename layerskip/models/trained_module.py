"""Where does a trained head lie, and whom does it belong to? A folder with safetensors and a file that says so.

A head reads one target's hidden states; on another it would draft noise. It is told by the target's weights, whatever dtype
they are loaded in, and where both have the same name by the revision as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from layerskip.config import ConfigError
from layerskip.files import whole, write_json
from layerskip.models.target import Target

_SCHEMA = "layerskip.head/1"
_WEIGHTS = "head.safetensors"
_ABOUT = "head.json"
_ROUNDING = 2**-7  # bfloat16 keeps eight bits, and the last may depend on the way that a number took to it
_SMALLEST = 2**-24  # in float16, which rounds to multiples of it


def save_head(
    folder: Path,
    kind: str,
    shape: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    target: Target,
    training: Mapping[str, Any],
    calibration: str | None = None,
) -> None:
    """Write a head; what says whom it belongs to comes last, so that half a head is none.

    Args:
        folder: is made.
        kind: ``eagle``, ``medusa``, ``bridge`` or ``draft_head``.
        shape: what its module is made from.
        weights: its own tensors; nothing of the target's.
        target: whose hidden states it reads.
        training: what it was trained on and how, for people, with the digest of the data.
        calibration: the digest of the texts that a bridge was fitted to.

    Raises:
        OSError: the disk is full; a head that was there before is there still.
    """
    about = {"schema": _SCHEMA, "kind": kind, "shape": dict(shape), "target": _identity(target), "training": dict(training)}
    about |= {} if calibration is None else {"calibration": calibration}
    with whole(folder / _ABOUT) as said, whole(folder / _WEIGHTS) as partial:
        write_json(said, about)
        save_file({name: tensor.contiguous().cpu() for name, tensor in weights.items()}, partial)
        (folder / _ABOUT).unlink(missing_ok=True)


def load_head(
    folder: str | Path, kind: str, target: Target, field: str = "head"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head's shape and its weights.

    Args:
        folder: as :func:`save_head` wrote it.
        kind: that it must be of.
        target: that it must be for.
        field: of a configuration, which errors name.

    Raises:
        ConfigError: there is none, it is damaged or of another kind, or it was made for another target.
    """
    folder = Path(folder)
    about = check_head(folder, target, field)
    if about.get("kind") != kind:
        raise ConfigError(f"{field}: {folder} is for {about.get('kind')}, not for {kind}")
    try:
        weights = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{field}: cannot read {folder}: {' '.join(str(error).split())}") from error
    shape = about["shape"]
    if not _is_drafted(weights.get("tokens"), shape.get("vocabulary"), target.vocabulary):
        raise ConfigError(f"{field}: {folder} is damaged: its tokens are not a list of the target's")
    return shape, weights


def is_head(folder: Path) -> bool:
    """Whether anything lies there that :func:`save_head` wrote."""
    return (folder / _ABOUT).is_file()


def check_head(folder: Path, target: Target, field: str = "head") -> dict[str, Any]:
    """What is said of a head, of whatever kind; its weights are not read. Arguments as of :func:`load_head`.

    Raises:
        ConfigError: there is none, what is said of it is damaged, or it was made for another target.
    """
    try:
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: cannot read {folder}: {' '.join(str(error).split())}") from error
    if not isinstance(about, dict) or about.get("schema") != _SCHEMA:
        raise ConfigError(f"{field}: {folder} is not a head of this version")
    made_for, own = about.get("target"), _identity(target)
    if not isinstance(made_for, dict) or not isinstance(about.get("shape"), dict):
        raise ConfigError(
            f"{field}: {folder} is damaged: {_ABOUT} has no {'shape' if isinstance(made_for, dict) else 'target'}"
        )
    other = f"{field}: {folder} was made for another target, {made_for.get('name')}, and is to serve {target.name}: its"
    for name in ("architecture", "layers"):
        if made_for.get(name) != own[name]:
            raise ConfigError(f"{other} {name} is not that of {target.name}")
    sample = made_for.get("weights")
    if not isinstance(sample, list) or not all(isinstance(value, float) for value in sample):
        raise ConfigError(f"{field}: {folder} is damaged: {_ABOUT} has no weights of its target")
    if not any(same_weights(sample, known) for known in (target.weights_sample, target.earlier_weights_sample)):
        raise ConfigError(f"{other} weights are not those of {target.name}")
    revisions = made_for.get("revision"), target.revision
    # A copy elsewhere has another name, and no revision that could be compared.
    if made_for.get("name") == target.name and None not in revisions and revisions[0] != revisions[1]:
        raise ConfigError(f"{other} revision is {revisions[0]}, not {revisions[1]}")
    return about


def _identity(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "revision": target.revision,
        "architecture": target.architecture,
        "layers": target.layers,
        "dtype": target.dtype,
        "weights": list(target.weights_sample),
    }


def _is_drafted(tokens: Tensor | None, size: object, vocabulary: int) -> bool:
    """Whether tokens are different ones of a target's, as many as the shape says; or are not there, and it says none."""
    if tokens is None:
        return size is None
    if tokens.dtype != torch.int64 or tokens.ndim != 1 or not tokens.numel() or size not in (None, tokens.numel()):
        return False
    # One that is drafted in two places would be accepted more often than its probability allows.
    return 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary and len(set(tokens.tolist())) == tokens.numel()


def same_weights(one: ArrayLike, other: ArrayLike) -> bool:
    """Whether two samples of weights are one, but for how half precision, of either kind, rounded them on their way."""
    return np.shape(one) == np.shape(other) and bool(np.allclose(one, other, rtol=_ROUNDING, atol=_SMALLEST))
